"""What the workers of an engine say of themselves, as one answer: every rank has its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tangram import control


def ask(instance: str, ranks: int, timeout: float = control.TIMEOUT_SECONDS) -> dict[str, Any]:
    """Ask the workers of that vLLM instance id. Blocks for at most ``timeout`` seconds.

    Raises:
        EngineUnavailable: one of them does not answer.
    """
    latest = time.monotonic() + timeout
    answers = []
    for rank in range(ranks):
        left = max(0.001, latest - time.monotonic())
        answers.append(control.call(control.worker_socket(instance, rank), "worker", timeout=left))
    return merged(answers)


def merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' answers (:meth:`tangram.seal_meter.SealMeter.to_dict`) as one.

    All ranks seal the same chunks, each its own heads of them. So they are counted once: as those that all
    ranks sealed (within so many seconds), and as long as the slowest took. The drift is of all heads, and the
    first rank's.
    """
    first = answers[0]
    buckets = [min(counts) for counts in zip(*(answer["buckets"] for answer in answers), strict=True)]
    return first | {
        "seals": buckets[-1],
        "seconds": max(answer["seconds"] for answer in answers),
        "buckets": buckets,
        "kernels": kernels_of(answers),
    }


def kernels_of(answers: Sequence[dict[str, Any]]) -> str:
    """All implementations that any of these, which may be of several workers themselves, run on."""
    return ", ".join(sorted({name for answer in answers for name in answer["kernels"].split(", ")}))

"""That two kernels did the same work, before their times are compared."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.budgets import HEAD_SIZE
from benchmarks.cases import Case
from kernels.ops import implementation

TOLERANCE = 2e-2
"""Largest relative difference of two kernels' outputs on the same data, both of 8 bits of mantissa."""


class Disagreement(Exception):
    """A peer's output is not ours: it did other work."""


def our_kernels(memory: torch.Tensor) -> str:
    """What our operators run on this memory.

    Raises:
        SystemExit: on a GPU, where it is not the kernels that a benchmark is about.
    """
    kind = implementation(memory.device, memory.dtype, HEAD_SIZE)
    if memory.device.type == "cuda" and kind != "native":
        raise SystemExit(f"our own kernels cannot be built here: the {kind} would be measured")
    return kind


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of two outputs ``[..., D]``: norm of their difference to norm of the second, the worst head's."""
    got, wanted = got.float().flatten(0, -2), wanted.float().flatten(0, -2)
    return float(((got - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


def check(name: str, case: Case, attend: Callable[[int], None], out: torch.Tensor) -> float:
    """Compare a peer with ours on the first, second and last layer.

    Args:
        attend: the peer's attention of one layer, which writes ``out``.

    Returns:
        The largest difference.

    Raises:
        Disagreement: it is above the tolerance.
    """
    worst = 0.0
    for layer in sorted({0, min(1, case.layers - 1), case.layers - 1}):
        case.attend(layer)
        out.fill_(torch.nan)
        attend(layer)
        error = relative_error(out.view_as(case.out), case.out)
        if not error < TOLERANCE:  # also where it is not a number
            raise Disagreement(f"{name}: its output differs from ours by {error:.3g} in layer {layer}")
        worst = max(worst, error)
    return worst


def check_replays(name: str, case: Case, replay: Callable[[], object], out: torch.Tensor) -> None:
    """Compare what a captured step leaves of its last layer with ours, several replays on: what a kernel
    leaves behind for the next one must not spoil it.

    Raises:
        Disagreement: it differs, or nothing was written.
    """
    case.attend(case.layers - 1)
    for number in range(3):
        out.fill_(torch.nan)
        replay()
        error = relative_error(out.view_as(case.out), case.out)
        if not error < TOLERANCE:
            raise Disagreement(f"{name}: its output differs from ours by {error:.3g} in replay {number}")

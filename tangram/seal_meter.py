"""How long sealing takes, measured where it happens: in the worker, which may be a process of its own.

The API server asks over a socket beside the scheduler's. Time is the host's: on a GPU it is the time to
launch the work, as long as sealing does not wait for it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any

from tangram.control import ControlServer, worker_socket
from tangram.drift import DriftMeter

BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Upper ends of the histogram's buckets, seconds."""


class SealMeter:
    """A histogram of the time a chunk's sealing takes. One thread observes, others may read.

    Attributes:
        drift: None where there is no profile to move away from.
    """

    def __init__(self) -> None:
        self.drift: DriftMeter | None = None
        self._counts = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Observe what happens inside; what fails is not counted."""
        start = time.perf_counter()
        yield
        self.observe(time.perf_counter() - start)

    def observe(self, seconds: float) -> None:
        """Count one sealed chunk."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds

    def to_dict(self) -> dict[str, Any]:
        """``seals``, ``seconds`` (their sum), ``buckets``: counts up to each of ``BOUNDS`` and in all, and
        ``drift``: see :meth:`tangram.drift.DriftMeter.to_dict`."""
        buckets = list(accumulate(self._counts))
        drift = self.drift and self.drift.to_dict()
        return {"seals": buckets[-1], "seconds": self._seconds, "buckets": buckets, "drift": drift}


@cache
def serve(instance: str, kernels: str, rank: int = 0) -> SealMeter:
    """This process's meter, answering the call ``worker`` from now on. A worker ends without a word, so its
    socket is removed by the next engine that starts.

    Args:
        kernels: the implementation that the worker runs, to be told with the figures.
        rank: the worker's.
    """
    meter = SealMeter()
    answer = {"worker": lambda _: meter.to_dict() | {"kernels": kernels}}
    ControlServer(worker_socket(instance, rank), answer)
    return meter

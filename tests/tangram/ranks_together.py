"""The ranks of a tensor-parallel engine as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch

from tangram.ranks import Ranks
from tests.patience import PATIENCE

T = TypeVar("T")


class Meeting:
    """Where ranks exchange what they have: each waits for all others."""

    def __init__(self, count: int) -> None:
        self.barrier = Barrier(count, timeout=PATIENCE)
        self.brought: list[Any] = [None] * count

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.brought[rank] = value
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found


class Group:
    """Of vLLM's communicator what :class:`Ranks` uses."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, part), dim=dim)

    def broadcast_object(self, value: Any) -> Any:
        return self.meeting.exchange(self.rank, value)[0]


def together(count: int, work: Callable[[Ranks], T]) -> list[T]:
    """What ``work`` returns on each rank, all at once."""
    meeting = Meeting(count)

    def one(rank: int) -> T:
        try:
            return work(Ranks(rank, count, Group(meeting, rank)))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))

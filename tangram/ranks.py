"""The ranks of a tensor-parallel engine, as the worker of one of them sees them.

Each rank seals and attends its own heads, and needs no other for it. Two things look at all heads of a layer
or of the model at once: scores that are averaged over a layer, and the drift. These are gathered here; as all
ranks run the same steps, they come here in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Ranks:
    """One rank among ``count``.

    Attributes:
        group: vLLM's communicator of all ranks; None where there is one.
    """

    rank: int = 0
    count: int = 1
    group: Any = None

    @classmethod
    def current(cls, count: int) -> Ranks:
        """This worker's, of an engine with so many."""
        if count == 1:
            return ALONE
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        return cls(group.rank_in_group, count, group)

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    def agreed(self, value: bool) -> bool:
        """The first rank's value, on all of them."""
        return (
            value if self.group is None else bool(self.group.broadcast_object(value if self.first else None))
        )

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' [layers, heads, ...] as one, in the order of the model's heads."""
        if self.group is None:
            return part
        whole: torch.Tensor = self.group.all_gather(part.contiguous(), dim=1)
        return whole


ALONE = Ranks()

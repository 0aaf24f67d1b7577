"""What the cache manager remembers of a request that holds pages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm.v1.request import Request


class Return(Enum):
    """What a request that was admitted was to the cache."""

    FOUND = "a conversation that took its row over"
    IN_VAIN = "a conversation whose row had been evicted"
    NONE = "new, as far as is known"


@dataclass
class Live:
    """A running request.

    Attributes:
        step: the scheduler's step in which it was admitted: its copies run with that one.
        slots: tokens that have, or had, a slot; drafts that were rejected included.
        resumed: tokens that it did not compute.
        returned: whether these are an idle conversation's, which it took over.
        raw_from: the first position that its ring can hold.
        next_prefix: the chunk whose prefix is looked at next.
        request: vLLM's own, once it is known.
        pinned: see :mod:`tangram.pins`.
    """

    step: int
    slots: int = 0
    resumed: int = 0
    returned: bool = False
    raw_from: int = 0
    next_prefix: int = 0
    request: Request | None = None
    pinned: bool = False

    def known_tokens(self) -> int:
        """Tokens that are both computed and known: a step in flight may have computed more than is known, and
        the last sampled token is known but not computed."""
        if self.request is None:
            return 0
        return min(self.request.num_computed_tokens, self.request.num_tokens, self.slots)

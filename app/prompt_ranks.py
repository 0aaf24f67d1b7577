"""Which prompts of a stateless client went to which rank, so that what continues one of them follows it.

A request continues another when its prompt begins with the whole prompt of that one: the next turn of a
conversation, or the same turn again. That two prompts begin alike, as all with one system prompt do, says
nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

BLOCK = 32
"""Tokens. Prompts are found by a hash of their whole blocks; the few tokens behind these are compared."""
ITEM = array("I").itemsize
MOST_PROMPTS = 20_000
MOST_ALIKE = 64
"""Prompts kept that differ behind their last whole block only; the oldest goes first."""


class PromptRanks:
    """Prompts by their beginnings, least recently used out first. In memory: so is what the engine holds."""

    def __init__(self, most: int = MOST_PROMPTS) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, deque[tuple[bytes, int]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, owner: str, prompt: Sequence[int]) -> int | None:
        """The rank of the longest earlier prompt that this one begins with; None without one."""
        data, keys = _keys(owner, prompt)
        for place, key in reversed(list(enumerate(keys))):
            rest = data[place * BLOCK * ITEM :]
            for tail, rank in sorted(self._kept.get(key, ()), key=lambda kept: -len(kept[0])):
                if rest.startswith(tail):
                    self._kept.move_to_end(key)
                    return rank
        return None

    def remember(self, owner: str, prompt: Sequence[int], rank: int) -> None:
        """Keep where a prompt went."""
        data, keys = _keys(owner, prompt)
        tail = data[(len(keys) - 1) * BLOCK * ITEM :]
        kept = self._kept.setdefault(keys[-1], deque(maxlen=MOST_ALIKE))
        if (tail, rank) not in kept:
            kept.append((tail, rank))
        self._kept.move_to_end(keys[-1])
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()


def _keys(owner: str, prompt: Sequence[int]) -> tuple[bytes, list[bytes]]:
    """The prompt as bytes, and a hash of the owner and of each number of its whole blocks, from none on."""
    data = array("I", prompt).tobytes()
    running = hashlib.blake2b(owner.encode(), digest_size=16)
    keys = [running.digest()]
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        running.update(data[(end - BLOCK) * ITEM : end * ITEM])
        keys.append(running.digest())
    return data, keys

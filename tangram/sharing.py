"""Which prefixes are worth keeping for others, and which conversations come back. No pages here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tangram.resident import Row

MEMORY = 8192
"""How many lost conversations are remembered; an entry is a hash and a number."""

PROMPTS = 2048
"""How many prefixes are watched; an entry is as large as the prompt's hashes, which its prefixes share."""


class Memory:
    """A bounded mapping that forgets what was set longest ago."""

    def __init__(self, capacity: int = MEMORY) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Any:
        """The value, or None."""
        return self._entries.get(key)

    def set(self, key: Hashable, value: Any) -> None:
        """Remember; the oldest entry goes when there are too many."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def discard(self, key: Hashable) -> None:
        """Forget, if known."""
        self._entries.pop(key, None)


@dataclass(frozen=True)
class Prompt:
    """A prompt as far as it must be remembered: hashes of its whole pages, and the tokens behind them."""

    hashes: tuple[Hashable, ...]
    tail: tuple[int, ...]

    @classmethod
    def of(cls, hashes: Sequence[Hashable], tokens: Sequence[int], page_tokens: int) -> Prompt:
        """Of a request's page hashes, which may reach beyond its prompt, and its prompt's tokens."""
        pages = len(tokens) // page_tokens
        return cls(tuple(hashes[:pages]), tuple(tokens[pages * page_tokens :]))

    def same_conversation(self, later: Prompt) -> bool:
        """Whether one of the two is where the other one began, as far as can be told: a next turn, a
        repetition, an edit that only cuts."""
        pages = min(len(self.hashes), len(later.hashes))
        if self.hashes[:pages][-1:] != later.hashes[:pages][-1:]:
            return False
        if len(self.hashes) == len(later.hashes):
            shorter = min(len(self.tail), len(later.tail))
            return self.tail[:shorter] == later.tail[:shorter]
        return True


class PrefixWatch:
    """Notices prefixes that a second conversation has.

    A conversation that comes back has its own prefix too, when it was evicted and is computed again. What
    counts is that two prompts with the prefix part from each other somewhere.
    """

    def __init__(self) -> None:
        self._seen = Memory(PROMPTS)  # prefix -> the last prompt that had it

    def shared(self, prefix: Hashable, prompt: Prompt) -> bool:
        """Whether another conversation's prompt had this prefix before; remembers this one."""
        shared = self.known_to_others(prefix, lambda: prompt)
        self._seen.set(prefix, prompt)
        return shared

    def known_to_others(self, prefix: Hashable, prompt: Callable[[], Prompt]) -> bool:
        """The same, without remembering this one, which is made only where it is needed."""
        earlier = self._seen.get(prefix)
        return earlier is not None and not earlier.same_conversation(prompt())


class Lost:
    """Remembers evicted conversations, so that their return can be told from a new conversation."""

    def __init__(self) -> None:
        self._targets = Memory()

    def evicted(self, row: Row) -> None:
        """The row or its end is gone; its longest target is what its conversation would have resumed from."""
        length = max(row.targets)
        self._targets.set(row.targets[length], length)

    def returned(self, hashes: Sequence[Hashable], page_tokens: int, resumed: int) -> int:
        """Tokens beyond ``resumed`` that a prompt with these prefix hashes had in the cache once and must
        compute again; 0 for one that never was there. Forgets the conversation: it is back."""
        for count in range(len(hashes), resumed // page_tokens, -1):
            length = self._targets.get(hashes[count - 1])
            if length is not None:
                self._targets.discard(hashes[count - 1])
                return int(length) - resumed
        return 0

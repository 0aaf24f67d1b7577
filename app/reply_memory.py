"""What stateless clients were answered, in token ids, found again by the text of the conversation.

Such a client sends the whole history as text each time. Tokenised again it can differ from what was
generated, and the engine would compute it anew. So the ids of each conversation that was answered are kept
for a while, by a hash of its messages, and the next request that begins with them continues these ids.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.chat_template import Message
from app.templating import Templating

MAX_TOKENS = 4_000_000
"""Kept in all, at four bytes each; of one user at most a quarter, so that nobody pushes out all others."""


class ReplyMemory:
    """Token ids of answered conversations, least recently used out first. In memory, as the cache is."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._kept: OrderedDict[tuple[str, bytes], array[int]] = OrderedDict()
        self._tokens: dict[str, int] = {}
        self._lock = threading.Lock()

    def prompt(
        self,
        owner: str,
        templating: Templating,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        """Ids of a conversation that waits for an answer. Raises BadRequest as `Templating.render`."""
        prefixes = list(_prefixes(templating.model_name, messages, tools))
        for index in range(len(messages) - 1, -1, -1):
            if messages[index]["role"] != "assistant":
                continue
            ids = self._get((owner, prefixes[index]))
            if ids is not None and (rest := templating.after(messages, index, ids, tools)) is not None:
                return [*ids, *rest]
        return templating.render(messages, tools)

    def remember(
        self,
        owner: str,
        templating: Templating,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        ids: Sequence[int],
    ) -> None:
        """Keep the ids of a conversation, its last message being the answer."""
        *_, last = _prefixes(templating.model_name, messages, tools)
        if len(ids) > self._max_tokens // 4:
            return
        key = (owner, last)
        with self._lock:
            self._drop(key)
            self._kept[key] = array("i", ids)
            self._tokens[owner] = self._tokens.get(owner, 0) + len(ids)
            while self._tokens[owner] > self._max_tokens // 4:
                self._drop(next(kept for kept in self._kept if kept[0] == owner))
            while sum(self._tokens.values()) > self._max_tokens:
                self._drop(next(iter(self._kept)))

    @property
    def tokens(self) -> int:
        """How many are kept."""
        return sum(self._tokens.values())

    def _get(self, key: tuple[str, bytes]) -> list[int] | None:
        with self._lock:
            ids = self._kept.get(key)
            if ids is None:
                return None
            self._kept.move_to_end(key)
            return list(ids)

    def _drop(self, key: tuple[str, bytes]) -> None:
        ids = self._kept.pop(key, None)
        if ids is None:
            return
        self._tokens[key[0]] -= len(ids)
        if not self._tokens[key[0]]:
            del self._tokens[key[0]]


def spoken_ids(templating: Templating, ids: Sequence[int], text: str, stop_string: bool) -> list[int] | None:
    """The ids to keep of an answer. None where none stand for exactly its text.

    stop_string: whether a stop string ended it; the text ends before that, and so must the ids.
    """
    if not stop_string:
        return templating.settle(ids)
    kept = list(ids)
    while kept and len(templating.text.decode(kept, skip_special_tokens=True)) > len(text):
        kept.pop()
    return kept if templating.text.decode(kept, skip_special_tokens=True) == text else None


def _prefixes(model: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """A hash for each message, of itself and all before it. A call's id is not part of what was said."""
    running = hashlib.sha256(json.dumps([model, list(tools)], sort_keys=True).encode())
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        said = [message["role"], message["content"], calls]
        running.update(json.dumps(said, sort_keys=True).encode() + b"\n")
        yield running.digest()

"""Token ids for messages that were stored without any, such as imported ones, made once and remembered.

A prompt is put together several times for one reply, to see what fits, and again for the context meter.
Rendering and encoding a long imported conversation each time would take minutes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

from db.views import MessageView

if TYPE_CHECKING:
    from app.templating import Templating

MAX_TOKENS = 8_000_000
"""Remembered in all, at four bytes each."""

_Key = tuple[str, int, str, int, str]


class Segments:
    """The segments that were made by one model's tokenizer, the latest used ones. Safe in threads."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._kept: OrderedDict[_Key, array[int]] = OrderedDict()
        self._tokens = 0
        self._lock = Lock()

    def filled(
        self, templating: Templating, path: Sequence[MessageView], system_prompt: str
    ) -> list[MessageView]:
        """The path with ids on every message, those of `templating`'s model."""
        out: list[MessageView] = []
        for place, message in enumerate(path):
            following = path[place + 1] if place + 1 < len(path) else None
            model = following.model if message.role == "user" and following is not None else message.model
            # A user's message takes its model from the reply after it: all are this one's from here on.
            now = replace(message, model=message.model and templating.model_name)
            if message.content and not (message.token_ids and model in (templating.model_name, None)):
                before = path[place - 1] if place else None
                known = (before.id, before.updated_at) if before else ("", 0)
                key = (message.id, message.updated_at, *known, system_prompt)
                ids = self._get(key)
                if ids is None:
                    ids = array("i", templating.segment([*out, message], system_prompt, following))
                    self._put(key, ids)
                now = replace(now, token_ids=tuple(ids))
            out.append(now)
        return out

    def _get(self, key: _Key) -> array[int] | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _put(self, key: _Key, ids: array[int]) -> None:
        with self._lock:
            self._tokens += len(ids) - len(self._kept.pop(key, ()))
            self._kept[key] = ids
            while self._tokens > self._max_tokens and len(self._kept) > 1:
                self._tokens -= len(self._kept.popitem(last=False)[1])

"""An answer to a chat request, built from what the engine sends: deltas of a stream, or a whole message."""

from __future__ import annotations

import json
from typing import Any

from app.chat_template import Message
from app.openai_api.logprobs import chat_logprobs
from app.openai_api.tool_calls import Call, ToolUse
from app.token_bytes import TokenBytes
from tangram.client import CompletionChunk, TokenLogprob


class ChatAnswer:
    """One of the `n` choices.

    Args:
        top: how many of the likeliest tokens to tell; None: no log-probabilities.
    """

    def __init__(self, index: int, use: ToolUse | None, top: int | None, spell: TokenBytes) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.raw_text = ""
        self.stop_string = False
        self.finish_reason: str | None = None
        self._use = use
        self._reader = use.reader() if use else None
        self._top = top
        self._spell = spell
        self._text = ""
        self._calls: list[Call] = []
        self._untold: list[TokenLogprob] = []
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> dict[str, Any]:
        """The first choice of a stream."""
        return self._choice({"role": "assistant", "content": ""})

    def take(self, chunk: CompletionChunk) -> list[dict[str, Any]]:
        """The choices of a stream that follow from what the engine sent."""
        self.token_ids += chunk.token_ids
        self.raw_text += chunk.text
        self._untold += chunk.logprobs
        self._logprobs += chunk.logprobs
        pieces: list[str | Call] = [chunk.text] if chunk.text else []
        if self._reader is not None:
            pieces = self._reader.feed(chunk.text) + (self._reader.finish() if chunk.finish_reason else [])
        told = [choice for piece in pieces for choice in self._piece(piece)]
        if not chunk.finish_reason:
            return told
        self.stop_string = isinstance(chunk.stop_reason, str)
        self.finish_reason = chunk.finish_reason
        if self._calls and self._use is not None and chunk.finish_reason == "stop":
            self.finish_reason = self._use.finish_reason
        if self._untold:
            told.append(self._choice({"content": ""}))
        return [*told, self._choice({}, self.finish_reason)]

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        message: dict[str, Any] = {"role": "assistant", "content": self._text, "refusal": None}
        if self._calls:
            message["content"] = self._text or None
            message["tool_calls"] = [call.to_json() for call in self._calls]
        logprobs = None if self._top is None else chat_logprobs(self._logprobs, self._top, self._spell)
        return {
            "index": self.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
        }

    @property
    def message(self) -> Message:
        """The answer as a client will send it back, in the form that a chat template takes."""
        calls = [{"function": {"name": c.name, "arguments": json.loads(c.arguments)}} for c in self._calls]
        return {"role": "assistant", "content": self._text} | ({"tool_calls": calls} if calls else {})

    def _piece(self, piece: str | Call) -> list[dict[str, Any]]:
        if isinstance(piece, str):
            self._text += piece
            return [self._choice({"content": piece})]
        if self._calls and self._use is not None and not self._use.several:
            return []
        self._calls.append(piece)
        return [self._choice({"tool_calls": [piece.to_json(len(self._calls) - 1)]})]

    def _choice(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        logprobs = None
        if self._untold:
            logprobs = chat_logprobs(self._untold, self._top or 0, self._spell)
            self._untold = []
        return {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

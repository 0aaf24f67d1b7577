"""What the engine is asked to generate, and what it answers, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tangram.errors import EngineRejected, EngineUnavailable

RANK_HEADER = "X-data-parallel-rank"
"""By it vLLM's servers let a client choose the rank."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A prompt of token ids and how to continue it. None: the engine's own default.

    n: how many answers; their chunks come mixed, told apart by `index`.
    logprobs: log-probabilities of the chosen tokens and of this many of the likeliest; None: not wanted.
    cache_salt: only requests with the same salt can share cached history; one per user.
    request_id: what the engine is to call it; None: a name of its own.
    rank: the engine's rank that is to answer, where there are several; None: the engine's choice.
    extra: further fields of vLLM's /v1/completions, passed as they are.
    """

    model: str
    prompt: Sequence[int]
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    n: int = 1
    logprobs: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    rank: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def headers(self) -> dict[str, str]:
        """The headers of the request, beside the connection's own."""
        return {} if self.rank is None else {RANK_HEADER: str(self.rank)}

    def body(self) -> dict[str, Any]:
        """The JSON body of the streaming request."""
        body: dict[str, Any] = {
            **self.extra,
            "model": self.model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "stop_token_ids": list(self.stop_token_ids),
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": False},
            "return_token_ids": True,
            "skip_special_tokens": True,
        }
        for name in ("temperature", "top_p", "seed", "cache_salt", "request_id"):
            value = getattr(self, name)
            if value is not None:
                body[name] = value
        if self.stop:
            body["stop"] = list(self.stop)
        if self.n != 1:
            body["n"] = self.n
        if self.logprobs is not None:
            body |= {"logprobs": self.logprobs, "return_tokens_as_token_ids": True}
        return body


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token, its log-probability, and (token, log-probability) of the likeliest in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """New text and the ids of the new tokens. The last chunk of a stream carries `usage`.

    index: which of `n` answers it belongs to.
    stop_reason: the stop string or the id of the stop token that ended the answer; None: the model's own end.
    logprobs: one for each of `token_ids`, where they were asked for.
    finish_reason: None, "stop", "length" or "abort". Text may lag the ids: bytes of an unfinished character
    are held back until it is complete.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    usage: Usage | None = None
    index: int = 0
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


def parse_event(data: str) -> CompletionChunk:
    """One event of the engine's stream. Raises EngineRejected where it tells of an error."""
    try:
        event = json.loads(data)
    except ValueError as error:
        raise EngineUnavailable("The engine's stream is damaged.") from error
    if "error" in event:
        said = event["error"]
        code = said.get("code") if isinstance(said, dict) else None
        message = said.get("message") if isinstance(said, dict) else said
        raise EngineRejected(code if isinstance(code, int) else 500, str(message))
    usage = event.get("usage")
    choice = event["choices"][0] if event.get("choices") else {}
    return CompletionChunk(
        text=choice.get("text") or "",
        token_ids=tuple(choice.get("token_ids") or ()),
        finish_reason=choice.get("finish_reason"),
        usage=_usage(usage) if usage else None,
        index=int(choice.get("index") or 0),
        stop_reason=choice.get("stop_reason"),
        logprobs=_logprobs(choice["logprobs"]) if choice.get("logprobs") else (),
    )


def _logprobs(said: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    """From vLLM's four lists, in which a token is written as token_id:NUMBER."""
    likeliest = said.get("top_logprobs") or [None] * len(said["tokens"])
    return tuple(
        TokenLogprob(
            _token(token),
            float(logprob),
            tuple((_token(name), float(value)) for name, value in (top or {}).items()),
        )
        for token, logprob, top in zip(said["tokens"], said["token_logprobs"], likeliest, strict=True)
    )


def _token(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _usage(usage: Mapping[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
    )

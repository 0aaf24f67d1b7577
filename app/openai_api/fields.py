"""Fields that both of OpenAI's completion requests have, checked."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from app.errors import BadRequest
from app.routes.json_body import JsonBody

MOST_ANSWERS = 16
"""Answers that one request may ask for."""

_ENGINE_FIELDS = (
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
)
Name = Annotated[str, Field(min_length=1, max_length=200)]


class StrictBody(JsonBody):
    """Types are what they are called: no number in quotes, no 1 for true. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True)


class StreamOptions(StrictBody):
    include_usage: bool | None = False


class CompletionFields(StrictBody):
    """unsupported: fields of OpenAI's that this server does not do; they are refused rather than ignored."""

    unsupported: ClassVar[tuple[str, ...]] = ()

    model: Annotated[str, Field(max_length=1000)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = 1
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Name | Annotated[list[Name], Field(max_length=16)] | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, max_length=300
    )

    def check_supported(self) -> None:
        """Raises BadRequest for a field that asks for what this server does not do."""
        for name in self.unsupported:
            if getattr(self, name):
                raise BadRequest(f"{name} is not supported.", param=name)
        for token in self.logit_bias or ():
            if not (token.isascii() and token.isdecimal() and len(token) < 10):
                raise BadRequest(
                    "logit_bias names tokens by their number in the vocabulary.", param="logit_bias"
                )

    @property
    def answers(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def engine_fields(self) -> dict[str, Any]:
        """Fields that the engine takes under the same name."""
        return {name: value for name in _ENGINE_FIELDS if (value := getattr(self, name)) is not None}

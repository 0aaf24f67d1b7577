"""The body of POST /v1/chat/completions, checked. Unknown fields are ignored, unsupported ones refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from app.errors import BadRequest
from app.routes.json_body import JsonBody

_ENGINE_FIELDS = ("presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty")
_UNSUPPORTED = ("tools", "functions", "logprobs", "top_logprobs", "audio", "logit_bias", "prediction")


class TextPart(BaseModel):
    type: str
    text: str = ""


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None

    def as_text(self, index: int) -> dict[str, str]:
        """{"role", "content"} as a chat template takes it. Raises BadRequest."""
        param = f"messages.{index}"
        if self.role in ("tool", "function"):
            raise BadRequest(f"Messages of the role {self.role!r} are not supported.", param=f"{param}.role")
        parts = (
            self.content
            if isinstance(self.content, list)
            else [TextPart(type="text", text=self.content or "")]
        )
        for part in parts:
            if part.type != "text":
                raise BadRequest(
                    f"Content of the type {part.type!r} is not supported, only text.",
                    param=f"{param}.content",
                )
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n".join(part.text for part in parts)}


class StreamOptions(BaseModel):
    include_usage: bool = False


class ResponseFormat(BaseModel):
    type: str


class ChatRequest(JsonBody):
    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    response_format: ResponseFormat | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    tools: Any = None
    functions: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    audio: Any = None
    logit_bias: Any = None
    prediction: Any = None

    def conversation(self) -> list[dict[str, str]]:
        """The messages as text. Raises BadRequest for whatever this server does not do."""
        if self.n != 1:
            raise BadRequest("Only n=1 is supported: send the request several times.", param="n")
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise BadRequest(f"{name} is not supported.", param=name)
        if self.response_format is not None and self.response_format.type != "text":
            raise BadRequest("Only response_format text is supported.", param="response_format")
        if any(not text for text in self.stop_strings):
            raise BadRequest("A stop string must not be empty.", param="stop")
        return [message.as_text(index) for index, message in enumerate(self.messages)]

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def engine_fields(self) -> dict[str, Any]:
        """Fields that the engine takes under the same name."""
        return {name: value for name in _ENGINE_FIELDS if (value := getattr(self, name)) is not None}

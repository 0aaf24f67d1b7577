"""The body of POST /v1/chat/completions, checked."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from app.chat_template import Message
from app.errors import BadRequest
from app.openai_api.fields import CompletionFields, Name, StrictBody


class TextPart(StrictBody):
    type: str
    text: str = ""


class CalledFunction(StrictBody):
    name: Name
    arguments: str = ""


class ToolCall(StrictBody):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template_sees_it(self, param: str) -> dict[str, Any]:
        """Templates print the arguments as an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise BadRequest("A tool call's arguments must be a JSON object.", param=param) from error
        if not isinstance(arguments, dict):
            raise BadRequest("A tool call's arguments must be a JSON object.", param=param)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(StrictBody):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def as_template_sees_it(self, index: int, tools: bool) -> Message:
        """The message with its content as text. Raises BadRequest.

        tools: whether the model's template knows of tools.
        """
        param = f"messages.{index}"
        if self.role == "function" or (self.role == "tool" and not tools):
            raise BadRequest(f"Messages of the role {self.role!r} are not supported.", param=f"{param}.role")
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._text(f"{param}.content"),
        }
        if self.tool_calls:
            if not tools:
                raise BadRequest("This model's template has no tools.", param=f"{param}.tool_calls")
            place = f"{param}.tool_calls"
            message["tool_calls"] = [call.as_template_sees_it(place) for call in self.tool_calls]
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id or "", "name": self.name or ""}
        return message

    def _text(self, param: str) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        for part in self.content:
            if part.type != "text":
                raise BadRequest(
                    f"Content of the type {part.type!r} is not supported, only text.", param=param
                )
        return "\n".join(part.text for part in self.content)


class Function(StrictBody):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictBody):
    type: Literal["function"]
    function: Function


class NamedFunction(StrictBody):
    name: Name


class NamedTool(StrictBody):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(StrictBody):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(CompletionFields):
    """conversation_id: our extension, answer within this stored conversation (app.openai_api.stored)."""

    unsupported: ClassVar[tuple[str, ...]] = (
        "functions",
        "function_call",
        "audio",
        "prediction",
        "web_search_options",
    )

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    response_format: ResponseFormat | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    conversation_id: Annotated[str, Field(max_length=100)] | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None

    def check(self) -> None:
        """Raises BadRequest for what this server does not do and for fields that contradict each other."""
        self.check_supported()
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        wanted = self.response_format
        schema = wanted.json_schema if wanted is not None else None
        if wanted is not None and wanted.type == "json_schema" and (not schema or schema.schema_ is None):
            raise BadRequest("response_format json_schema needs a schema.", param="response_format")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise BadRequest("tool_choice needs tools.", param="tool_choice")
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if name not in {tool.function.name for tool in self.tools or ()}:
                raise BadRequest(f"There is no tool {name!r} among the tools.", param="tool_choice")

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools as a template prints them; none where the model is not to call any."""
        if not self.tools or self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def format_fields(self) -> dict[str, Any]:
        """The engine's field for structured answers, as OpenAI's API writes it."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return {}
        return {"response_format": wanted.model_dump(by_alias=True, exclude_none=True)}

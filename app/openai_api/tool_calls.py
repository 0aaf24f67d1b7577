"""Tool calls in a model's text: found while it streams, and enforced where the client wants one.

Two ways of writing a call are known, told by the model's chat template:

    tagged    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere in the text, also several
    bare      the whole answer is {"name": ..., "parameters": {...}}
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import BadRequest
from app.openai_api.chat_request import ChatRequest, NamedTool
from app.tokenizer import ModelText

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class CallStyle:
    """How a model writes a call. arguments: the name of that field; tagged: see above."""

    arguments: str
    tagged: bool


def call_style(text: ModelText) -> CallStyle | None:
    """How this model's template tells it to call tools; None when it does not, or in a way not known here."""
    source = text.chat_template
    if "tools" not in source:
        return None
    if OPEN in source and "<function=" not in source and OPEN not in text.special_texts:
        return CallStyle("arguments", tagged=True)
    if '"parameters"' in source and '"name"' in source and OPEN not in source:
        return CallStyle("parameters", tagged=False)
    return None


@dataclass(frozen=True)
class Call:
    """One call: `arguments` is JSON text."""

    name: str
    arguments: str

    def to_json(self, index: int | None = None) -> dict[str, Any]:
        """As in a message, or with an index as in a chunk."""
        place = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return {**place, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class CallReader:
    """Splits an answer into text and calls while it comes.

    A call is handed out when it is whole. What looks like one and is not stays text, so that nothing is lost.

    Args:
        inside: the answer begins within a call's tags (they were put into the prompt).
    """

    def __init__(self, style: CallStyle, *, inside: bool = False) -> None:
        self._style = style
        self._held = ""
        self._inside = inside
        self._began = inside
        self._plain = False

    def feed(self, text: str) -> list[str | Call]:
        """What is certain after some more text."""
        self._held += text
        return self._tagged() if self._style.tagged else self._bare()

    def finish(self) -> list[str | Call]:
        """The rest, when the answer has ended. An open tag's call counts if it is whole."""
        held, self._held = self._held, ""
        if not held and not (self._inside and not self._began):
            return []
        if self._inside or (not self._style.tagged and not self._plain):
            if call := self._call(held):
                return [call]
            if self._inside and not self._began:
                return [OPEN + held]
        return [held]

    def _bare(self) -> list[str | Call]:
        start = self._held.lstrip()
        if self._plain or (start and not start.startswith("{")):
            self._plain = True
            held, self._held = self._held, ""
            return [held] if held else []
        return []

    def _tagged(self) -> list[str | Call]:
        found: list[str | Call] = []
        while True:
            tag = CLOSE if self._inside else OPEN
            before, seen, after = self._held.partition(tag)
            if not seen:
                break
            if self._inside:
                found.append(self._call(before) or f"{OPEN}{before}{CLOSE}")
            elif before.strip():
                found.append(before.rstrip())
            self._inside, self._began, self._held = not self._inside, False, after
        if not self._inside:
            # Space is held back too: that before a call belongs to neither.
            certain = self._held[: len(self._held) - _possible_start(self._held, OPEN)].rstrip()
            if certain:
                found.append(certain)
                self._held = self._held[len(certain) :]
        return found

    def _call(self, text: str) -> Call | None:
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(said, dict) or not isinstance(said.get("name"), str):
            return None
        arguments = said.get(self._style.arguments, {})
        if not isinstance(arguments, dict):
            return None
        return Call(said["name"], json.dumps(arguments, ensure_ascii=False))


def _possible_start(text: str, tag: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `tag`."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)


@dataclass(frozen=True)
class ToolUse:
    """What one request wants with tools. prefix: text that the answer is made to begin with."""

    style: CallStyle
    forced: bool = False
    named: bool = False
    several: bool = True
    schema: dict[str, Any] | None = None

    @property
    def prefix(self) -> str:
        return f"{OPEN}\n" if self.forced and self.style.tagged else ""

    @property
    def engine_fields(self) -> dict[str, Any]:
        return {"structured_outputs": {"json": self.schema}} if self.schema is not None else {}

    @property
    def finish_reason(self) -> str:
        """Of an answer that has calls; OpenAI's API says "stop" where a function was named."""
        return "stop" if self.named else "tool_calls"

    def reader(self) -> CallReader:
        return CallReader(self.style, inside=bool(self.prefix))


def tool_use(body: ChatRequest, text: ModelText) -> ToolUse | None:
    """What a request wants with tools; None for nothing. Raises BadRequest when the model has none."""
    if not body.offered_tools:
        return None
    style = call_style(text)
    if style is None:
        raise BadRequest(
            "This model's chat template has no tools, or calls them in a way that this server does not know.",
            param="tools",
        )
    several = body.parallel_tool_calls is not False
    if body.tool_choice in (None, "auto"):
        return ToolUse(style, several=several)
    if body.response_format is not None and body.response_format.type != "text":
        raise BadRequest("A forced tool call cannot have a response_format.", param="response_format")
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    tools = [tool.function for tool in body.tools or () if named in (None, tool.function.name)]
    schema = _any_of([_call_schema(one.name, one.parameters, style) for one in tools])
    return ToolUse(style, forced=True, named=named is not None, several=False, schema=schema)


def _call_schema(name: str, parameters: dict[str, Any] | None, style: CallStyle) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, style.arguments: parameters or {"type": "object"}},
        "required": ["name", style.arguments],
        "additionalProperties": False,
    }


def _any_of(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}

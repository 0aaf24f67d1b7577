"""Renders a model's Jinja chat template as Transformers does, without Transformers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from app.errors import ModelUnusable

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant", "content": text}; with tools "tool_calls" and role "tool" too."""


class TemplateRefused(Exception):
    """The template raised: it does not take these messages (a role it does not know, an order it forbids)."""


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja source, as in `chat_template.jinja` or tokenizer_config.json.
        special_tokens: names such as "bos_token" and their text, visible to the template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelUnusable(f"The model's chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The text of a conversation. Raises TemplateRefused with the template's own words."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise TemplateRefused(str(error)) from error


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}: marks text for training, changes nothing here."""

    tags = {"generation"}  # noqa: RUF012  (the name and type that Jinja reads)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

"""Tool calls: found in a model's text however it is cut, and the whole way round through OpenAI's client."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import BadRequest
from app.openai_api.chat_request import ChatRequest
from app.openai_api.tool_calls import Call, CallReader, CallStyle, call_style, tool_use
from app.settings import Settings
from app.tokenizer import ModelText, load_model_text
from tests.app.conftest import Product, running_product
from tests.fake_engine import FakeEngine

TAGGED = """{% if tools %}{{ '<|im_start|>system\nAnswer, or call a tool like this: <tool_call>' }}
{{- '{"name": NAME, "arguments": OBJECT}</tool_call>' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
BARE = TAGGED.replace("<tool_call>", "").replace("</tool_call>", "").replace('"arguments"', '"parameters"')
STYLES = {"tagged": CallStyle("arguments", tagged=True), "bare": CallStyle("parameters", tagged=False)}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town <|im_end|>",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def read(style: str, text: str, cuts: tuple[int, ...] = (), *, inside: bool = False) -> list[str | Call]:
    """All pieces of an answer that comes cut at some places, neighbouring texts joined."""
    reader = CallReader(STYLES[style], inside=inside)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces: list[str | Call] = []
    for start, end in itertools.pairwise(places):
        pieces += reader.feed(text[start:end])
    pieces += reader.finish()
    joined: list[str | Call] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


ONE = Call("weather", '{"town": "Köln"}')
TEXT = '{"name": "weather", "arguments": {"town": "Köln"}}'
CASES = [
    ("tagged", "Just text, 1 < 2 <tool", ["Just text, 1 < 2 <tool"]),
    ("tagged", f"<tool_call>\n{TEXT}\n</tool_call>", [ONE]),
    ("tagged", f"Let me see. <tool_call>{TEXT}</tool_call>\n", ["Let me see.", ONE, "\n"]),
    ("tagged", f"<tool_call>{TEXT}</tool_call>\n<tool_call>{TEXT}</tool_call>", [ONE, ONE]),
    ("tagged", f"<tool_call>{TEXT}", [ONE]),
    ("tagged", "<tool_call>not JSON</tool_call>.", ["<tool_call>not JSON</tool_call>."]),
    ("tagged", '<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
    ("tagged", '<tool_call>{"name": "x", "argu', ['<tool_call>{"name": "x", "argu']),
    ("tagged", '<tool_call>{"name": "x"}</tool_call>', [Call("x", "{}")]),
    ("bare", '{"name": "weather", "parameters": {"town": "Köln"}}', [ONE]),
    ("bare", '\n{"name": "weather", "parameters": {"town": "Köln"}}\n', [ONE]),
    ("bare", '{"name": "weather"', ['{"name": "weather"']),
    ("bare", '{"x": 1}', ['{"x": 1}']),
    ("bare", f"As JSON: {TEXT}", [f"As JSON: {TEXT}"]),
    ("bare", "", []),
]


@pytest.mark.parametrize(("style", "text", "expected"), CASES)
@given(cuts=st.lists(st.integers(min_value=0, max_value=200), max_size=8))
def test_calls_are_found_however_the_text_is_cut(
    style: str, text: str, expected: list[str | Call], cuts: list[int]
) -> None:
    assert read(style, text, tuple(cuts)) == expected


@given(text=st.text('<>/tol_ca{}"n: a', max_size=60), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_no_text_is_lost(text: str, cuts: list[int]) -> None:
    pieces = read("tagged", text, tuple(cuts))
    if all(isinstance(piece, str) for piece in pieces):
        shown = "".join(str(piece) for piece in pieces)
        assert shown.split() == text.split()


def test_an_answer_that_begins_inside_a_call() -> None:
    assert read("tagged", TEXT, inside=True) == [ONE]
    assert read("tagged", '{"name": "weather", "arg', inside=True) == ['{"name": "weather", "arg']


@pytest.fixture(scope="module")
def model_text(bundled_model_dir: Path) -> ModelText:
    return load_model_text(str(bundled_model_dir))


def test_styles_are_told_by_the_template(model_text: ModelText) -> None:
    assert call_style(model_text) is None
    assert call_style(replace(model_text, chat_template=TAGGED)) == STYLES["tagged"]
    assert call_style(replace(model_text, chat_template=BARE)) == STYLES["bare"]
    assert call_style(replace(model_text, chat_template=TAGGED + "<function=f>")) is None
    assert call_style(replace(model_text, chat_template=TAGGED.replace("tools", "things"))) is None


def asked(**fields: Any) -> ChatRequest:
    body = ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [WEATHER, CLOCK], **fields}
    )
    body.check()
    return body


def test_what_a_request_wants(model_text: ModelText) -> None:
    tagged = replace(model_text, chat_template=TAGGED)
    bare = replace(model_text, chat_template=BARE)
    assert tool_use(asked(tool_choice="none"), model_text) is None
    with pytest.raises(BadRequest, match="template has no tools"):
        tool_use(asked(), model_text)
    free = tool_use(asked(), tagged)
    assert free is not None
    assert (free.prefix, free.engine_fields, free.several) == ("", {}, True)
    required = tool_use(asked(tool_choice="required"), tagged)
    assert required is not None
    assert (required.prefix, required.finish_reason) == ("<tool_call>\n", "tool_calls")
    schemas = required.engine_fields["structured_outputs"]["json"]["anyOf"]
    assert [schema["properties"]["name"]["const"] for schema in schemas] == ["weather", "clock"]
    assert schemas[0]["properties"]["arguments"] == WEATHER["function"]["parameters"]  # type: ignore[index]
    named = tool_use(asked(tool_choice={"type": "function", "function": {"name": "clock"}}), bare)
    assert named is not None
    assert (named.prefix, named.finish_reason) == ("", "stop")
    assert named.engine_fields["structured_outputs"]["json"]["required"] == ["name", "parameters"]
    with pytest.raises(BadRequest, match="cannot have a response_format"):
        tool_use(asked(tool_choice="required", response_format={"type": "json_object"}), tagged)


@pytest.fixture
async def product(settings: Settings, tmp_path: Path, bundled_model_dir: Path) -> AsyncIterator[Product]:
    """With a template that knows of tools."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(bundled_model_dir / name, model)
    (model / "chat_template.jinja").write_text(TAGGED)
    async with running_product(settings.model_copy(update={"model": str(model)})) as running:
        yield running


async def test_round_trip_with_the_official_client(product: Product, fake_engine: FakeEngine) -> None:
    key, _ = await product.services.accounts.create_api_key(product.owner, "openai")
    said = f"Let me see.<tool_call>{TEXT}</tool_call><tool_call>{TEXT}</tool_call>"
    messages: Any = [{"role": "user", "content": f"/say {said}"}]
    ask: Any = {"model": "fake-model", "tools": [WEATHER, CLOCK]}
    async with openai.AsyncOpenAI(base_url=f"{product.url}/v1", api_key=key, max_retries=0) as client:
        create = client.chat.completions.create
        first = (await create(messages=messages, **ask)).choices[0]
        assert (first.finish_reason, first.message.content) == ("tool_calls", "Let me see.")
        calls: Any = first.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("weather", ONE.arguments)
        ] * 2
        assert len({call.id for call in calls}) == 2
        prompt = fake_engine.tokenizer.decode(fake_engine.requests[-1]["prompt"], skip_special_tokens=False)
        assert '"name": "weather"' in prompt
        marks = fake_engine.tokenizer.token_to_id("<|im_end|>")
        assert fake_engine.requests[-1]["prompt"].count(marks) == 2, "a tool's text cannot end a turn"

        content, streamed, reason = "", [], None
        async for chunk in await create(messages=messages, stream=True, **ask):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            streamed += delta.tool_calls or []
            reason = chunk.choices[0].finish_reason or reason
        assert (content, reason) == ("Let me see.", "tool_calls")
        assert [(call.index, call.function.name) for call in streamed] == [(0, "weather"), (1, "weather")]
        one = (await create(messages=messages, parallel_tool_calls=False, **ask)).choices[0].message
        assert len(one.tool_calls or ()) == 1

        messages += [
            first.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}),
            *({"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls),
        ]
        again = await create(messages=messages, **ask)
        before, after = fake_engine.requests[-4], fake_engine.requests[-1]
        written = [*before["prompt"], *fake_engine.tokenizer.encode(said).ids]
        assert after["prompt"][: len(written)] == written, "what it wrote comes back token by token"
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == len(written)
        tail = fake_engine.tokenizer.decode(after["prompt"][len(written) :], skip_special_tokens=False)
        assert tail == "<|im_end|>\n" + "<|im_start|>tool\nrain<|im_end|>\n" * 2 + "<|im_start|>assistant\n"

        named: Any = {"type": "function", "function": {"name": "weather"}}
        forced = await create(
            messages=[{"role": "user", "content": f"/say {TEXT}"}], tool_choice=named, **ask
        )
        assert forced.choices[0].finish_reason == "stop"
        assert forced.choices[0].message.tool_calls is not None
        assert fake_engine.tokenizer.decode(fake_engine.requests[-1]["prompt"]).endswith("<tool_call>\n")
        schema = fake_engine.requests[-1]["structured_outputs"]["json"]
        assert json.dumps(schema["properties"]["name"]) == '{"const": "weather"}'
        bad = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "["}}
        broken = [messages[0], {"role": "assistant", "content": None, "tool_calls": [bad]}]
        with pytest.raises(openai.BadRequestError, match="must be a JSON object"):
            await create(messages=broken, **ask)

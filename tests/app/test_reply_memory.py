"""A stateless client's history comes back as the very tokens that were generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.reply_memory import ReplyMemory, spoken_ids
from app.templating import Templating
from app.tokenizer import load_model_text
from tests.app.conftest import Product
from tests.fake_engine import FakeEngine

URL = "/v1/chat/completions"


def odd_ids(text: Any, said: str) -> list[int]:
    """Ids that a model may generate for a text, and that tokenising it would not give."""
    return [token for character in said for token in text.encode(character)]


@pytest.fixture(scope="module")
def templating(bundled_model_dir: Path) -> Templating:
    return Templating("m", load_model_text(str(bundled_model_dir)))


def talk(*texts: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)
    ]


def test_the_longest_known_beginning_is_used(templating: Templating) -> None:
    memory = ReplyMemory()
    first = talk("one", "two")
    ids = [*templating.render(first[:1]), *odd_ids(templating.text, "two"), templating.turn_end or 0]
    memory.remember("ann", templating, first, [], ids)
    longer = talk("one", "two", "three")
    prompt = memory.prompt("ann", templating, longer, [])
    assert prompt[: len(ids)] == ids
    assert templating.text.decode(prompt) == templating.text.decode(templating.render(longer))
    assert prompt != templating.render(longer)
    second = [*prompt, *odd_ids(templating.text, "four")]  # cut short: without the end of turn
    memory.remember("ann", templating, talk("one", "two", "three", "four"), [], second)
    prompt = memory.prompt("ann", templating, talk("one", "two", "three", "four", "five"), [])
    assert prompt[: len(second)] == second
    assert templating.text.decode(prompt[len(second) :]).startswith("<|im_end|>\n<|im_start|>user\nfive")


@pytest.mark.parametrize(
    ("owner", "messages", "tools"),
    [
        ("bob", talk("one", "two", "three"), []),
        ("ann", talk("one", "two!", "three"), []),
        ("ann", talk("one!", "two", "three"), []),
        ("ann", [{"role": "system", "content": "S"}, *talk("one", "two", "three")], []),
        ("ann", talk("one", "two", "three"), [{"type": "function", "function": {"name": "f"}}]),
    ],
)
def test_another_conversation_is_another(
    templating: Templating, owner: str, messages: list[dict[str, str]], tools: list[dict[str, Any]]
) -> None:
    memory = ReplyMemory()
    memory.remember("ann", templating, talk("one", "two"), [], [1, 2, 3])
    assert memory.prompt(owner, templating, messages, tools) == templating.render(messages, tools)


def test_memory_is_bounded_and_shared_out(templating: Templating) -> None:
    memory = ReplyMemory(max_tokens=400)
    for turn in range(50):
        memory.remember("heavy", templating, talk("one", str(turn)), [], list(range(30)))
    assert memory.tokens == 90
    memory.remember("light", templating, talk("one", "x"), [], [5] * 20)
    for user in range(10):
        memory.remember(f"user {user}", templating, talk("one", "x"), [], [5] * 100)
        assert memory.tokens <= 400
    memory.remember("heavy", templating, talk("one", "x"), [], [5] * 101)
    assert memory.prompt("user 9", templating, talk("one", "x", "y"), [])[:100] == [5] * 100
    untouched = templating.render(talk("one", "x", "y"))
    assert memory.prompt("heavy", templating, talk("one", "x", "y"), []) == untouched
    assert memory.prompt("light", templating, talk("one", "x", "y"), []) == untouched


def test_what_is_used_stays(templating: Templating) -> None:
    memory = ReplyMemory(max_tokens=400)
    memory.remember("ann", templating, talk("one", "kept"), [], [7] * 40)
    for turn in range(20):
        memory.remember("ann", templating, talk("one", str(turn)), [], [5] * 40)
        assert memory.prompt("ann", templating, talk("one", "kept", "more"), [])[:40] == [7] * 40


def test_ids_end_where_the_text_ends(templating: Templating) -> None:
    ids = templating.text.encode("one two three")
    assert spoken_ids(templating, ids, "one two", stop_string=True) == ids[:2]
    assert spoken_ids(templating, ids, "one tw", stop_string=True) is None
    assert spoken_ids(templating, [*ids, templating.turn_end or 0], "one two three", stop_string=False) == [
        *ids,
        templating.turn_end,
    ]


async def test_over_http(product: Product, fake_engine: FakeEngine) -> None:
    said = "a long reply, spelled out 👩‍👩‍👧 漢字"
    odd = odd_ids(product.services.templating.text, said)
    plan = fake_engine.plan
    fake_engine.plan = lambda prompt: ([*odd, fake_engine.end], *plan(prompt)[1:])  # type: ignore[method-assign]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}, {"role": "user", "content": "1"}]
    for stream in (False, True):
        await product.http.post(URL, json={"model": "fake-model", "messages": messages, "stream": stream})
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "next"}]
    last = {"model": "fake-model", "messages": messages}
    usage = (await product.http.post(URL, json=last)).json()["usage"]
    first, second, third = (request["prompt"] for request in fake_engine.requests)
    assert second[: len(first) + len(odd)] == [*first, *odd]
    assert third[: len(second) + len(odd)] == [*second, *odd]
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(second) + len(odd)

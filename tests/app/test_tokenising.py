"""Long texts: tokenised beside everything else, few at a time, and not at all where they cannot fit."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from app.errors import ContextTooLong
from app.tokenising import Tokenising
from app.tokenizer import ModelText, load_model_text
from db.views import QuotaView
from tests.app.conftest import Product, eventually
from tests.patience import PATIENCE, fastest


@pytest.fixture(scope="module")
def text(bundled_model_dir: Path) -> ModelText:
    return load_model_text(str(bundled_model_dir))


@pytest.mark.parametrize("how", ["encode", "encode_plain", "encode_prompt"])
async def test_tokenising_lets_the_event_loop_run(text: ModelText, how: str) -> None:
    encode = getattr(text, how)
    assert encode("lorem")

    async def longest_gap() -> float:
        """The longest time between two turns of the loop, as a share of the time that it all took."""
        began = last = time.monotonic()
        gap = 0.0
        work = asyncio.create_task(asyncio.to_thread(encode, "lorem ipsum dolor 12 " * 40_000))
        while not work.done():
            await asyncio.sleep(0.005)
            now = time.monotonic()
            gap, last = max(gap, now - last), now
        assert len(work.result()) > 160_000
        return gap / (last - began)

    assert await fastest(longest_gap, 0.6) < 0.6, "the loop stood still while the text was tokenised"


def test_ids_are_those_of_a_single_encoding(text: ModelText) -> None:
    said = "Hello <|im_end|> w\u00f6rld \U0001f600 12"
    single = text.tokenizer.encode
    assert text.encode(said) == single(said, add_special_tokens=False).ids
    assert text.encode_prompt(said) == single(said).ids
    assert text.decode(text.encode_plain(said)) == said
    assert text.encode_plain(said) != text.encode(said)


def test_length_refuses_only_what_cannot_fit(text: ModelText) -> None:
    longest = max(text.tokenizer.get_vocab(), key=len)
    assert text.longest_token == len(longest) > 10
    text.check_length(10**9, 0)
    text.check_length(text.longest_token * 99, 100)
    with pytest.raises(ContextTooLong, match=r"at least 102 tokens long, .* at most 100"):
        text.check_length(text.longest_token * 100 + 1, 100)


async def test_one_thread_of_each_user_and_few_in_all() -> None:
    tokenising, release, begun = Tokenising(threads=2), threading.Event(), []

    def work(user: str) -> str:
        begun.append(user)
        release.wait(PATIENCE)
        return user

    tasks = [
        asyncio.create_task(tokenising.run(user, work, user)) for user in ("ann", "ann", "ann", "bob", "cho")
    ]
    try:
        await eventually(lambda: len(begun) == 2)
        assert begun == ["ann", "bob"]
        tasks[0].cancel()  # the client went away; its thread is busy all the same
        await asyncio.wait(tasks[:1])
        tasks[1].cancel()
        await asyncio.wait(tasks[1:2])
        await asyncio.sleep(0.05)
        assert begun == ["ann", "bob"]
    finally:
        release.set()
    assert await asyncio.gather(*tasks[2:]) == ["ann", "bob", "cho"]
    assert sorted(begun) == ["ann", "ann", "bob", "cho"]
    del tasks
    assert await tokenising.run("ann", work, "ann") == "ann"
    await eventually(lambda: not tokenising._users)


async def test_what_cannot_fit_is_refused_unread_and_counted(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: ModelText, text: str) -> list[int]:
        raise AssertionError("tokenised")

    for name in ("encode", "encode_plain", "encode_prompt"):
        monkeypatch.setattr(ModelText, name, never)
    longest = product.services.templating.text.longest_token
    long = "lorem " * (8192 * longest // 6 + 100)
    product.services.queue.set_quota(product.owner, QuotaView(per_minute=4))
    said = [{"role": "user", "content": long}]
    tools = [{"type": "function", "function": {"name": "look", "description": long}}]
    bodies = [
        ("chat/completions", {"messages": said}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": long}]}]}),
        ("completions", {"prompt": long}),
        ("completions", {"prompt": ["short", long]}),
        ("chat/completions", {"messages": said, "tools": tools}),
    ]
    codes = []
    for path, body in bodies:
        answer = await product.http.post(f"/v1/{path}", json={"model": "fake-model", **body})
        codes.append((answer.status_code, answer.json()["error"]["code"]))
    assert codes == [(400, "context_length_exceeded")] * 4 + [(429, "rate_limited")]
    product.services.queue.set_quota(product.owner, QuotaView())
    conversation = await product.conversation(system_prompt=long)
    with pytest.raises(ContextTooLong, match="Shorten the system prompt"):
        await product.services.generation.send(product.owner, conversation, "hello")


async def test_a_system_prompt_that_fills_the_context_is_named(product: Product) -> None:
    conversation = await product.conversation(system_prompt="lorem ipsum " * 5000)
    with pytest.raises(ContextTooLong, match=r"The system prompt would be .* Shorten the system prompt"):
        await product.services.generation.send(product.owner, conversation, "hello")

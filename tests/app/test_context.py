"""A full context: the oldest turns leave, the system prompt stays, and the user is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.context import Branch, can_continue, fit, notice
from app.errors import ContextTooLong
from app.events import Sampling
from app.settings import Settings
from app.templating import Templating
from app.tokenizer import load_model_text
from db.views import MessageView
from tests.app.conftest import Product, running_product
from tests.app.test_templating import NO_SYSTEM, THINKING, Talk, message, with_template
from tests.fake_engine import FakeEngine
from tests.patience import PATIENCE

LIMIT = 600


@pytest.fixture(scope="module", params=["own", NO_SYSTEM, THINKING], ids=["own", "no-system", "thinking"])
def templating(request: pytest.FixtureRequest, bundled_model_dir: Path) -> Templating:
    text = load_model_text(str(bundled_model_dir))
    return Templating("m", text) if request.param == "own" else with_template(text, request.param)


def grown(templating: Templating, turns: int, words: int = 10, system: str = "Be kind.") -> list[MessageView]:
    """A branch of some turns and a last question."""
    talk = Talk(templating, system)
    path = talk.path
    for turn in range(turns + 1):
        content = f"question {turn} " + "word " * words
        path.append(message("user", content, templating.user_segment(path, system, content)))
        if turn < turns:
            reply = templating.text.encode(f"answer {turn} " + "word " * words)
            path.append(message("assistant", templating.text.decode(reply), reply, status="stopped"))
    return path


def shown(templating: Templating, prompt: list[int]) -> str:
    return templating.text.decode(prompt)


def test_what_fits_is_left_alone(templating: Templating) -> None:
    path = grown(templating, 3)
    window = fit(templating, Branch(path, "Be kind."), 8192, 4096)
    assert window.prompt == templating.prompt(path, "Be kind.")
    assert window.facts == {}
    assert fit(templating, Branch(path, "Be kind."), 0, 4096).facts == {}


def test_oldest_turns_leave_and_the_system_prompt_stays(templating: Templating) -> None:
    path = grown(templating, 20)
    window = fit(templating, Branch(path, "Be kind."), LIMIT, 100)
    text = shown(templating, window.prompt)
    assert 0 < len(window.prompt) <= LIMIT // 2
    assert text.count("Be kind.") == 1
    assert text.index("Be kind.") < text.index("question")
    first = path[window.left_out]
    assert (first.role, window.starts_at, window.cut) == ("user", first.id, True)
    for place, said in enumerate(path):
        assert (said.content.split(" word")[0] + " " in text) == (place >= window.left_out)
    earlier = templating.prompt(path, "Be kind.", window.left_out - 2)
    assert len(earlier) > LIMIT // 2, "no more leaves than has to"


def test_the_start_stays_until_the_context_is_full_again(templating: Templating) -> None:
    path = grown(templating, 20)
    window = fit(templating, Branch(path, "Be kind."), LIMIT, 100)
    starts = [window.starts_at]
    for _ in range(12):
        reply = templating.text.encode("answer " + "word " * 10)
        stats = {"prompt_tokens": 5, **window.facts}
        answer = replace(message("assistant", templating.text.decode(reply), reply), stats=stats)
        path = [*path, replace(answer, status="stopped")]
        before = window
        question = message("user", "more", templating.user_segment(path, "Be kind.", "more"))
        path.append(question)
        window = fit(templating, Branch(path, "Be kind."), LIMIT, 100)
        starts.append(window.starts_at)
        if window.starts_at == before.starts_at:
            assert window.prompt[: len(before.prompt) + len(reply)] == [*before.prompt, *reply]
            assert not window.cut
        else:
            assert window.cut
            assert window.left_out > before.left_out
    assert 2 <= len(set(starts)) <= 4


def test_one_long_question_pushes_out_all_others(templating: Templating) -> None:
    path = grown(templating, 5)
    long = "word " * (LIMIT - 150)
    path[-1] = replace(path[-1], content=long, token_ids=tuple(templating.user_segment(path[:-1], "S", long)))
    window = fit(templating, Branch(path, "S"), LIMIT, 100)
    assert LIMIT - 150 < len(window.prompt) <= LIMIT - 100
    assert window.left_out > 0
    longer = "word " * (LIMIT + 1)
    segment = tuple(templating.user_segment(path[:-1], "S", longer))
    path[-1] = replace(path[-1], content=longer, token_ids=segment)
    with pytest.raises(ContextTooLong, match="This message with the system prompt would be"):
        fit(templating, Branch(path, "S"), LIMIT, 100)


def test_failed_questions_go_with_the_one_that_was_answered(templating: Templating) -> None:
    path = grown(templating, 6, words=30)
    failed = message("assistant", "", status="error")
    path = [*path, failed]
    path.append(message("user", "again", templating.user_segment(path, "S", "again")))
    window = fit(templating, Branch(path, "S"), 200, 50)
    text = shown(templating, window.prompt)
    assert "question 6" in text
    assert "again" in text
    assert window.left_out <= 12


def test_who_can_go_on() -> None:
    assert not can_continue(message("user", "x"))
    assert not can_continue(replace(message("assistant", "x"), finish_reason="stop"))
    assert can_continue(replace(message("assistant", "x"), finish_reason="length"))
    for status in ("stopped", "interrupted", "error"):
        assert can_continue(message("assistant", "x", status=status))
    assert not can_continue(message("assistant", "x", status="streaming"))


@pytest.fixture
async def product(settings: Settings, fake_engine: FakeEngine) -> AsyncIterator[Product]:
    """With an engine of a short context."""
    fake_engine.config.max_model_len = LIMIT
    settings = settings.model_copy(update={"max_reply_tokens": 120})
    async with running_product(settings) as running:
        yield running


async def test_a_conversation_never_ends(product: Product, fake_engine: FakeEngine) -> None:
    generation = product.services.generation
    conversation = await product.conversation(system_prompt="Be kind.")
    empty = await generation.context(product.owner, conversation)
    assert (empty.tokens, empty.limit, empty.left_out) == (0, LIMIT, 0)
    notices, hits = [], 0
    for turn in range(16):
        reply = await product.reply(conversation, f"/say {turn} " + "word " * 30)
        assert reply.status == "complete", reply.error
        sent = fake_engine.requests[-1]
        assert len(sent["prompt"]) + sent["max_tokens"] <= LIMIT
        text = fake_engine.tokenizer.decode(sent["prompt"], skip_special_tokens=False)
        assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>")
        meter = await generation.context(product.owner, conversation)
        assert meter.tokens == len(sent["prompt"]) + len(reply.token_ids)
        assert (meter.kept_fraction, meter.kept_tokens) == (1.0, meter.tokens)  # nothing is sealed yet
        assert meter.left_out == reply.stats.get("left_out", 0)
        if told := notice(reply):
            notices.append(turn)
            assert f"{reply.stats['left_out']} oldest messages" in told
        hits += reply.stats["cached_tokens"] > len(sent["prompt"]) / 2
    assert 2 <= len(notices) <= 5
    assert hits >= 16 - 1 - len(notices) - 1, "turns after a cut continue what the engine holds"
    path = await product.services.store.path(product.owner, conversation)
    assert len(path) == 32, "nothing is lost"
    over_http = (await product.http.get(f"/api/conversations/{conversation}/context")).json()
    assert over_http == {
        "tokens": meter.tokens,
        "limit": LIMIT,
        "kept_fraction": 1.0,
        "kept_tokens": meter.tokens,
        "left_out": meter.left_out,
        "starts_at": path[meter.left_out].id,
    }
    early = await generation.context(product.owner, conversation, path[1].id)
    assert early.left_out == 0
    async with await product.stranger() as other:
        assert (await other.get(f"/api/conversations/{conversation}/context")).status_code == 404

    again = await generation.regenerate(product.owner, conversation, path[-1].id)
    whole = await product.finish(again.reply.id)
    assert whole.stats["starts_at"] == path[-1].stats["starts_at"]
    with pytest.raises(ContextTooLong):
        await generation.send(product.owner, conversation, "word " * LIMIT)
    assert len(await product.services.store.path(product.owner, conversation)) == 32


async def test_the_newest_question_can_be_all_that_is_left(product: Product) -> None:
    conversation = await product.conversation()
    await product.reply(conversation, "/say " + "word " * 100)
    reply = await product.reply(conversation, "/say " + "word " * 420)
    assert reply.status == "complete"
    path = await product.services.store.path(product.owner, conversation)
    assert (reply.stats["left_out"], reply.stats["starts_at"]) == (2, path[2].id)
    last = await product.reply(conversation, "/say on")
    assert last.stats["starts_at"] in (path[2].id, None) or last.stats["left_out"] == 4


async def test_a_reply_that_filled_the_context_goes_on(product: Product) -> None:
    conversation = await product.conversation()
    await product.reply(conversation, "/say " + "word " * 60)
    first: Any = await product.reply(conversation, "/tokens 500", sampling=Sampling(max_tokens=200))
    assert first.finish_reason == "length"
    for _ in range(2):
        await product.services.generation.continue_reply(
            product.owner, conversation, first.id, Sampling(max_tokens=150)
        )
        first = await product.finish(first.id)
        assert first.status == "complete", first.error
    assert first.stats["left_out"] == 2
    assert notice(first)


async def test_a_running_reply_counts(product: Product, fake_engine: FakeEngine) -> None:
    conversation = await product.conversation()
    generation = product.services.generation
    handle = await generation.send(product.owner, conversation, "/tokens 2000 /delay 0.05")
    await product.wait_for_text(handle.reply.id)
    seen = [len(handle.user.token_ids)]
    async with asyncio.timeout(PATIENCE):
        while len(seen) < 4:
            if (tokens := (await generation.context(product.owner, conversation)).tokens) != seen[-1]:
                seen.append(tokens)
            await asyncio.sleep(0.05)
    assert seen == sorted(seen)
    await generation.stop(product.owner, handle.reply.id)


async def test_the_meter_grows_with_a_reply(product: Product, fake_engine: FakeEngine) -> None:
    """What a page shows meanwhile is what it would be told if it asked, and nobody asks the engine."""
    generation, owner = product.services.generation, product.owner
    conversation = await product.conversation(system_prompt="Be kind.")
    for turn in range(6):  # until the oldest turns have left
        await product.reply(conversation, f"/say {turn} " + "word " * 30)
    fake_engine.up_to = 5
    handle = await generation.send(owner, conversation, "/tokens 100")
    seen = []
    async for event in generation.subscribe(owner, handle.reply.id):
        fake_engine.up_to += 5  # so that no event brings more, however slow this is
        if event.kind == "done":
            break
        if growing := generation.growing_context(owner, handle.reply.id):  # else it has just been saved
            seen.append(growing)
        assert generation.growing_context("somebody else", handle.reply.id) is None
    assert len({meter.tokens for meter in seen}) > 5
    assert seen == sorted(seen, key=lambda meter: meter.tokens)
    assert generation.growing_context(owner, handle.reply.id) is None
    final = await generation.context(owner, conversation)
    assert final.left_out > 0
    assert replace(seen[-1], tokens=0, kept_tokens=0) == replace(final, tokens=0, kept_tokens=0)
    assert seen[0].tokens == len(fake_engine.requests[-1]["prompt"])
    assert (
        seen[-1].tokens
        <= final.tokens
        == seen[0].tokens + len((await product.services.store.get_message(owner, handle.reply.id)).token_ids)
    )

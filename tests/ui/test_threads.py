"""Messages in a real browser: long threads, several tabs, a lost network, going on, thoughts, ratings."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.fake_engine import FakeEngine
from tests.patience import PATIENCE, TRIES
from tests.ui.support import ChatPage, Product, eventually

pytestmark = pytest.mark.ui

WORDS = re.compile(r"lorem(\s\w+){5}")


def import_thread(chat: ChatPage, title: str, *messages: str) -> None:
    """Take in a conversation of these messages, and open it."""
    turns = [{"from": "gpt" if i % 2 else "human", "value": text} for i, text in enumerate(messages)]
    answer = chat.page.request.post(
        f"{chat.url}/api/import",
        data=[{"title": title, "conversations": turns}],
        headers={"Origin": chat.url},
    )
    assert answer.status == 201, answer.text()
    chat.page.reload()
    chat.usable()
    chat.open(title)


def test_a_long_thread_starts_at_its_end_and_pages_upward(chat: ChatPage) -> None:
    said = [f"Message number {i}\n\n```python\nprint({i})\n```" for i in range(2000)]
    import_thread(chat, "Two thousand", *said)
    expect(chat.replies.last).to_contain_text("Message number 1999")
    expect(chat.messages).to_have_count(25)
    eventually(lambda: position(chat)["below"] < 5, PATIENCE, "the end is in sight")

    chat.page.mouse.move(640, 300)
    chat.page.mouse.wheel(0, -5)  # until the reader scrolls, a thread just opened is kept at its end
    eventually(lambda: stays_at(chat, 60), PATIENCE, "the page has seen the reader scroll")
    before = position(chat)
    chat.page.mouse.wheel(0, -5)
    expect(chat.messages).to_have_count(50)
    expect(chat.messages.first).to_contain_text("Message number 1900")
    # What was read stays where it was, though fifty messages came in above it.
    eventually(lambda: abs(top_of(chat, before["id"]) - before["top"]) < 60, PATIENCE, "the place is held")

    chat.box.fill("/say The end.")
    chat.box.press("Enter")
    expect(chat.replies.last).to_have_text("The end.")
    expect(chat.page.locator(".tc-told")).to_contain_text("do not fit")
    expect(chat.page.locator(".tc-meter")).to_have_attribute(
        "title", re.compile("no longer shown to the model")
    )
    chat.settled()
    chat.edit(24, "/say Another end.")
    expect(chat.replies.last).to_have_text("Another end.")
    expect(chat.page.locator(".tc-foot-user").last).to_contain_text("2/2")


def stays_at(chat: ChatPage, top: int) -> bool:
    """Scroll there; whether the thread is still there after two frames, and was not taken to its end."""
    script = """async (box, top) => {
        const frame = () => new Promise(requestAnimationFrame);
        box.scrollTop = top;
        await frame();
        await frame();
        return box.scrollTop === top;
    }"""
    return bool(chat.page.locator("#tc-chat .bubble-wrap").evaluate(script, top))


def position(chat: ChatPage) -> dict[str, Any]:
    script = """() => {
        const box = document.querySelector("#tc-chat .bubble-wrap"), edge = box.getBoundingClientRect().top;
        const top = (each) => each.getBoundingClientRect().top;
        const mark = [...box.querySelectorAll("[data-act=copy]")].find((each) => top(each) > edge);
        const below = box.scrollHeight - box.scrollTop - box.clientHeight;
        return { id: mark.dataset.id, top: top(mark), below };
    }"""
    return dict(chat.page.evaluate(script))


def top_of(chat: ChatPage, message_id: str) -> float:
    box = chat.page.locator(f'#tc-chat [data-act="copy"][data-id="{message_id}"]').bounding_box()
    assert box is not None
    return float(box["y"])


def shown_id(chat: ChatPage) -> str:
    return str(chat.footers.last.get_by_label("Copy").get_attribute("data-id"))


def test_a_lost_network_loses_nothing(chat: ChatPage, fake: FakeEngine) -> None:
    fake.up_to = 40
    chat.send("/tokens 120")
    expect(chat.replies.last).to_have_text(WORDS)
    chat.page.evaluate("window.before = true")
    lost = {"predicate": lambda request: "queue/join" in request.url, "timeout": 4 * PATIENCE * 1000}
    with chat.page.expect_event("requestfailed", **lost):  # it notices: with the next tick
        chat.context.set_offline(True)
        fake.up_to = 80
    early = len(chat.replies.last.inner_text())
    chat.context.set_offline(False)
    # Gradio loads the page anew when the network is back. What is typed meanwhile is kept, and not sent.
    chat.page.wait_for_function("() => !window.before", timeout=4 * PATIENCE * 1000)
    chat.usable()
    fake.up_to = math.inf
    eventually(lambda: len(chat.replies.last.inner_text()) > early, PATIENCE, "it goes on")
    chat.settled()
    expect(chat.footers.last).to_have_attribute("data-status", "complete")
    whole = chat.page.request.get(f"{chat.url}/api/messages/{shown_id(chat)}").json()["content"]
    assert chat.replies.last.inner_text() == whole
    assert chat.say("/say Still here.") == "Still here."


def test_two_tabs_show_one_conversation(chat: ChatPage, fake: FakeEngine) -> None:
    chat.say("/say First.")
    other = ChatPage(chat.context.browser, chat.address(), state=chat.context.storage_state())  # type: ignore[arg-type]
    other.page.goto(other.url)
    other.usable()
    fake.up_to = 40  # two pages that draw a reply all the time leave a busy machine no time for a click
    chat.send("/tokens 3000")
    expect(other.replies.last).to_have_text(WORDS)
    other.stop()
    for tab in (other, chat):
        expect(tab.footers.last).to_have_attribute("data-status", "stopped")
        expect(tab.page.locator("#tc-composer .submit-button")).to_be_visible()
    expect(chat.replies).to_have_text(other.replies.all_inner_texts(), use_inner_text=True)
    other.page.locator('[data-act="ask_menu"]').last.click()
    other.page.locator('#tc-menu [data-act="ask_delete"]').click()
    other.page.locator("#tc-delete-dialog .tc-danger").click()
    expect(chat.notice).to_contain_text("not here any more")
    other.close()


def test_escape_stops_and_the_reply_can_go_on(chat: ChatPage, served: Product, fake: FakeEngine) -> None:
    fake.up_to = 40
    chat.send("/tokens 3000")
    expect(chat.replies.last).to_have_text(WORDS)
    chat.page.keyboard.press("Escape")
    eventually(lambda: served.running(served) == 0, PATIENCE, "the engine is free")
    expect(chat.footers.last).to_contain_text("Stopped")
    chat.settled()
    kept = chat.replies.last.inner_text()
    chat.page.get_by_role("button", name="Continue").click()
    expect(chat.stop_button).to_be_visible()
    fake.up_to = 80
    eventually(lambda: len(chat.replies.last.inner_text()) > len(kept) + 20, PATIENCE, "the reply grows")
    assert chat.replies.last.inner_text().startswith(kept.rstrip()[:-1])
    expect(chat.replies).to_have_count(1)
    chat.page.keyboard.press("Escape")
    chat.settled()


def test_thoughts_fold_away_and_are_no_part_of_the_answer(chat: ChatPage) -> None:
    evil = "<img src=x onerror=alert(1)> {{constructor}} ${alert(2)}"
    chat.say(f"/say <think>I must *weigh* this. {evil}</think>\n\nThe **answer**.")
    thoughts = chat.page.locator(".tc-thoughts")
    expect(thoughts.locator("summary")).to_have_text("Thoughts")
    expect(thoughts.locator("div")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator("div")).to_have_text(f"I must *weigh* this. {evil}")
    assert thoughts.locator("img").count() == 0
    expect(chat.replies.last).to_have_text("The answer.")


def test_copy_and_ratings(chat: ChatPage) -> None:
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = "Use `a < b` & ![x](y) **now**"
    chat.say(f"/say {text}")
    chat.footers.last.get_by_label("Copy").click()
    expect(chat.page.locator("#tc-said")).to_have_text("Copied")
    assert chat.page.evaluate("navigator.clipboard.readText()") == text
    like, dislike = chat.footers.last.get_by_label("Good reply"), chat.footers.last.get_by_label("Bad reply")
    like.click()
    expect(like).to_have_attribute("aria-pressed", "true")
    dislike.click()
    expect(like).to_have_attribute("aria-pressed", "false")
    expect(dislike).to_have_attribute("aria-pressed", "true")
    chat.page.reload()
    chat.usable()
    expect(dislike).to_have_attribute("aria-pressed", "true")
    dislike.click()
    expect(dislike).to_have_attribute("aria-pressed", "false")


def test_a_length_limit_and_settings_of_the_conversation(chat: ChatPage, fake: FakeEngine) -> None:
    page = chat.page
    page.locator('[data-act="ask_settings"]').click()
    page.get_by_label("System prompt").fill("Answer like a LIGHTHOUSE.")
    page.get_by_label("Temperature").fill("0.25")
    longest = page.get_by_label("Longest reply (tokens)")
    expect(longest).to_have_attribute("placeholder", "4096")  # MODEL names a model: not the bundled one's
    longest.fill("7")
    page.locator("#tc-settings-dialog .tc-primary").click()
    expect(page.locator("#tc-settings-dialog")).to_be_hidden()
    chat.send("/tokens 50")
    chat.settled()
    expect(chat.footers.last).to_contain_text("length limit")
    asked = fake.requests[-1]
    assert (asked["temperature"], asked["max_tokens"]) == (0.25, 7)
    assert "LIGHTHOUSE" in fake.tokenizer.decode(asked["prompt"])
    expect(page.get_by_role("button", name="Continue")).to_be_visible()

    page.reload()
    chat.usable()
    page.get_by_label("Conversation settings, changed").click()
    expect(page.get_by_label("System prompt")).to_have_value("Answer like a LIGHTHOUSE.")
    expect(page.get_by_label("Temperature")).to_have_value("0.25")
    page.get_by_label("Seed").fill("99999999999999999999")
    page.locator("#tc-settings-dialog .tc-primary").click()
    expect(page.locator("#tc-settings-dialog .tc-problem")).to_contain_text("seed must be")
    page.get_by_label("Seed").fill("")
    page.get_by_label("Longest reply (tokens)").fill("")
    page.locator("#tc-settings-dialog .tc-primary").click()
    expect(page.locator("#tc-settings-dialog")).to_be_hidden()
    page.get_by_role("button", name="Continue").click()
    expect(chat.footers.last).not_to_contain_text("length limit")  # or it is what was there before
    expect(chat.footers.last).to_have_attribute("data-status", "complete")
    expect(chat.footers.last).not_to_contain_text("length limit")


def test_the_first_paint_comes_within_a_second(browser: Browser, chat: ChatPage) -> None:
    """In the best of some loads: whatever else the machine does may hold up one of them."""
    chat.say("/say Something to show.")
    times = []
    while len(times) < TRIES and min(times, default=1000) >= 1000:
        chat.page.reload()
        chat.usable()
        chat.page.wait_for_function("performance.getEntriesByType('paint').length === 2")
        paints = chat.page.evaluate("performance.getEntriesByType('paint').map((entry) => entry.startTime)")
        times.append(max(paints))
    assert min(times) < 1000, times
    expect(chat.page.locator("#tc-skeleton")).to_have_count(0)

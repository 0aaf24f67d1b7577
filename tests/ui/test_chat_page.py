"""The chat page in a real browser, on the real app and the imitated engine."""

import math
import re

import pytest
from playwright.sync_api import Browser, expect

from tests.fake_engine import FakeEngine
from tests.patience import PATIENCE
from tests.ui.support import PASSWORD, PHONE, ChatPage, Product, eventually

pytestmark = pytest.mark.ui

EVIL_HTML = (
    "<script>alert(1)</script><img src=x onerror=alert(2)><svg onload=alert(3)></svg>"
    "<iframe srcdoc='<script>alert(4)</script>'></iframe><a href='javascript:alert(5)'>five</a> "
    "[six](javascript:alert(6)) ![seven](http://evil.invalid/pixel.png) "
    "<button data-act='delete_chat'>eight</button>"
)


def test_two_turns_a_reload_and_the_history_is_there(chat: ChatPage) -> None:
    first = chat.say("/say The first answer.")
    assert first == "The first answer."
    address = chat.address()
    assert "?c=" in address
    assert chat.say("/say The second answer.") == "The second answer."
    numbers = re.compile(r"\d+ tokens.*cached.*KV kept: \d+%", re.DOTALL)
    expect(chat.footers.last).to_contain_text(numbers)
    chat.page.reload()
    chat.usable()
    expect(chat.replies).to_have_text(["The first answer.", "The second answer."])
    expect(chat.page.locator(".tc-row.tc-active")).to_have_count(1)
    assert chat.address() == address


def test_a_second_turn_finds_the_first_in_the_cache(chat: ChatPage, fake: FakeEngine) -> None:
    chat.say("/tokens 40")
    chat.say("/tokens 5")
    expect(chat.footers.last).to_contain_text(re.compile(r"[1-9]\d* cached"))


def test_a_reply_that_takes_its_time_shows_its_speed(chat: ChatPage) -> None:
    chat.say("/tokens 30 /delay 0.03")
    expect(chat.footers.last).to_contain_text(re.compile(r"31 tokens.*\d tokens/s", re.DOTALL))


def test_text_appears_while_it_is_written(chat: ChatPage, fake: FakeEngine) -> None:
    fake.up_to = 20
    chat.send("/tokens 60")
    expect(chat.replies.last).to_have_text(re.compile("lorem"))
    expect(chat.stop_button).to_be_visible()
    early = len(chat.replies.last.inner_text())
    fake.up_to = math.inf
    chat.settled()
    assert len(chat.replies.last.inner_text()) > early > 0


def test_the_ring_moves_while_a_reply_is_written(chat: ChatPage, fake: FakeEngine) -> None:
    def tokens() -> int:
        found = re.match(r"Context: ([\d,]+) of 8,192 tokens", ring.get_attribute("aria-label") or "")
        return int(found[1].replace(",", "")) if found else 0

    ring = chat.page.locator(".tc-meter")
    fake.up_to = 100
    chat.send("/tokens 600")
    seen = [0]
    for _ in range(4):
        eventually(lambda: tokens() > seen[-1], PATIENCE, "the ring has moved on")
        seen.append(tokens())
        fake.up_to += 100
    expect(chat.stop_button).to_be_visible()
    # It can be used while it moves, and is the same element all the time.
    ring.evaluate("element => { element.marked = true; element.focus() }")
    ring.click()
    expect(chat.page.locator("#tc-meter-note")).to_contain_text("tokens in context")
    now = tokens()
    fake.up_to = math.inf
    eventually(lambda: tokens() > now, PATIENCE, "the ring moves on")
    assert ring.evaluate("element => element.marked && element === document.activeElement")
    chat.settled()
    assert tokens() > 600
    assert tokens() >= max(seen)


def test_stop_frees_the_engine(chat: ChatPage, served: Product, fake: FakeEngine) -> None:
    fake.up_to = 40
    chat.send("/tokens 5000")
    expect(chat.replies.last).to_have_text(re.compile("lorem"))
    eventually(lambda: served.running(served) == 1, PATIENCE, "the engine works on the reply")
    chat.stop()
    eventually(lambda: served.running(served) == 0, PATIENCE, "the engine is free")
    chat.settled()
    expect(chat.footers.last).to_contain_text("Stopped")
    assert "lorem" in chat.replies.last.inner_text()
    fake.up_to = math.inf
    assert chat.say("/say Going on.") == "Going on."


def test_a_closed_tab_only_detaches(
    chat: ChatPage, browser: Browser, served: Product, fake: FakeEngine
) -> None:
    fake.up_to = 80
    chat.send("/tokens 160")
    expect(chat.replies.last).to_have_text(re.compile("lorem"))
    address, state = chat.address(), chat.context.storage_state()
    chat.page.close()
    assert served.running(served) == 1
    again = ChatPage(browser, address, state=state)
    again.page.goto(address)
    again.usable()
    expect(again.stop_button).to_be_visible()
    seen = again.replies.last.inner_text()
    fake.up_to = math.inf
    again.settled()
    assert again.replies.last.inner_text().startswith(seen)
    assert len(again.replies.last.inner_text()) > len(seen) > 0
    expect(again.footers.last).to_have_attribute("data-status", "complete")
    again.close()


def test_another_conversation_while_one_is_written(chat: ChatPage, fake: FakeEngine) -> None:
    chat.say("/say Quiet one.")
    chat.page.locator(".tc-new").click()
    expect(chat.footers).to_have_count(0)
    fake.up_to = 40
    chat.send("/tokens 3000 /delay 0.02")
    expect(chat.replies.last).to_have_text(re.compile("lorem"))
    chat.open("Quiet one")
    expect(chat.replies).to_have_text(["Quiet one."])
    expect(chat.page.locator("#tc-composer .submit-button")).to_be_visible()
    fake.up_to = 100
    chat.page.wait_for_timeout(1500)  # several updates of the other reply, none of which may show here
    expect(chat.replies).to_have_text(["Quiet one."])
    chat.open("/tokens 3000")
    expect(chat.stop_button).to_be_visible()
    expect(chat.replies.last).to_have_text(re.compile("lorem"))
    chat.stop()
    chat.settled()


def test_a_conversation_is_deleted_while_its_reply_is_written(
    chat: ChatPage, served: Product, fake: FakeEngine
) -> None:
    aborted, fake.up_to = fake.aborted, 40
    chat.send("/tokens 3000")
    expect(chat.replies.last).to_have_text(re.compile("lorem"))
    chat.delete("/tokens 3000")
    expect(chat.rows).to_have_count(0)
    expect(chat.footers).to_have_count(0)
    expect(chat.page.locator("#tc-composer .submit-button")).to_be_visible()
    eventually(lambda: served.running(served) == 0, PATIENCE, "the engine is free")
    assert fake.aborted == aborted + 1
    fake.up_to = math.inf
    assert chat.say("/say Something else.") == "Something else."


def test_regenerate_keeps_both_versions(chat: ChatPage) -> None:
    chat.say("/say Once.")
    chat.page.get_by_label("Regenerate").last.click()
    expect(chat.footers.last).to_contain_text("2/2")
    chat.settled()
    chat.page.get_by_label("Previous version").last.click()
    expect(chat.footers.last).to_contain_text("1/2")
    expect(chat.replies).to_have_text(["Once."])
    chat.page.get_by_label("Next version").last.click()
    expect(chat.footers.last).to_contain_text("2/2")


def test_edit_starts_a_new_branch(chat: ChatPage) -> None:
    chat.say("/say <b>First</b>")
    chat.say("/say Second")
    held = chat.edit(0, "/say Changed")
    assert held.replace("\u200b", "") == "/say <b>First</b>"
    expect(chat.replies).to_have_text(["Changed"])
    chat.settled()
    expect(chat.page.locator(".tc-foot-user")).to_contain_text("2/2")
    chat.page.locator(".tc-foot-user").get_by_label("Previous version").click()
    expect(chat.replies).to_have_text(["<b>First</b>", "Second"])
    assert chat.say("/say Third") == "Third"


def test_rename_delete_undo_and_search(chat: ChatPage) -> None:
    chat.say("/say Pelican soup")
    chat.rename("Pelican soup", "Lunch plans")
    expect(chat.rows.first).to_contain_text("Lunch plans")
    expect(chat.page.locator(".tc-top h1")).to_have_text("Lunch plans")
    chat.keep_toasts()
    for words in ("pelican", ""):
        chat.page.locator("#tc-search input").fill("no such words")
        expect(chat.page.locator(".tc-none")).to_be_visible()
        chat.page.locator("#tc-search input").fill(words)
        expect(chat.rows).to_have_count(1)
    expect(chat.rows.first).to_contain_text("Lunch plans")
    chat.delete("Lunch plans")
    expect(chat.footers).to_have_count(0)
    expect(chat.rows.filter(has_text="Lunch plans")).to_have_count(0)
    assert "?c=" not in chat.address()
    chat.page.locator(".tc-toast button").click()
    expect(chat.rows.first).to_contain_text("Lunch plans")
    expect(chat.replies).to_have_text(["Pelican soup"])


def test_an_example_starts_a_conversation(chat: ChatPage) -> None:
    chat.page.locator("#tc-chat .example").first.click()
    expect(chat.messages).to_have_count(1)
    chat.settled()


def test_markdown_is_rendered(chat: ChatPage) -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |"
    chat.say(f"/say **bold** `code`\n\n```python\nprint(1)\n```\n\n{table}\n\n\\(x^2\\)")
    reply = chat.replies.last
    expect(reply.locator("strong")).to_have_text("bold")
    expect(reply.locator("pre .token.builtin, pre .token.keyword, pre .token.function").first).to_be_visible()
    expect(reply.locator("td")).to_have_count(2)
    expect(reply.locator(".katex").first).to_be_visible()


def test_a_model_cannot_run_script_or_load_anything(chat: ChatPage) -> None:
    chat.say(f"/say {EVIL_HTML}\n\n```mermaid\ngraph TD; A[<img src=x onerror=alert(9)>]\n```")
    reply = chat.replies.last
    expect(reply).to_contain_text("<script>alert(1)</script>")
    assert reply.locator("script, img, iframe, button:not(.copy_code_button)").count() == 0
    assert reply.locator('a[href^="javascript"]').count() == 0
    chat.page.reload()
    chat.usable()
    expect(chat.replies.last).to_contain_text("<script>alert(1)</script>")
    assert chat.dialogs == []
    assert chat.hosts == {chat.url.partition("://")[2]}


def test_a_title_cannot_run_script(chat: ChatPage) -> None:
    chat.say("/say A title")
    chat.rename("A title", EVIL_HTML[:190])
    expect(chat.page.locator(".tc-top h1")).to_contain_text("<script>alert(1)</script>")
    chat.menu("script", "ask_delete")
    expect(chat.page.locator("#tc-delete-dialog b")).to_contain_text("<script>alert(1)</script>")
    chat.page.locator("#tc-delete-dialog [data-act=cancel]").click()
    assert chat.page.locator("#tc-app :is(script, iframe), #tc-app img").count() == 0
    assert chat.hosts == {chat.url.partition("://")[2]}


def test_no_engine_keeps_the_text_and_says_so(chat: ChatPage, fake: FakeEngine) -> None:
    fake.healthy = False
    try:
        expect(chat.page.locator(".tc-banner")).to_be_visible()
        chat.box.fill("Please keep me.")
        chat.box.press("Enter")
        expect(chat.notice).to_be_visible()
        expect(chat.box).to_have_value("Please keep me.")
        expect(chat.messages).to_have_count(0)
    finally:
        fake.healthy = True
    expect(chat.page.locator(".tc-banner")).to_have_count(0)
    expect(chat.notice).to_have_count(0)
    expect(chat.box).to_have_value("Please keep me.")
    chat.box.press("Enter")
    expect(chat.messages).to_have_count(1)
    chat.settled()


def test_a_refusing_engine_marks_the_reply(chat: ChatPage) -> None:
    chat.send("/refuse")
    chat.settled()
    expect(chat.footers.last).to_have_attribute("data-status", "error")
    expect(chat.footers.last.locator(".tc-mark")).not_to_be_empty()
    # Long enough that the refused words are out of the imitation's sight.
    assert "better better" in chat.say("/say " + "better " * 50)


def test_too_long_a_message_is_refused_with_its_text_kept(chat: ChatPage) -> None:
    long = "word " * 9000
    chat.box.fill(long)
    chat.box.press("Enter")
    expect(chat.notice).to_contain_text("8192")
    expect(chat.box).to_have_value(long)
    expect(chat.rows.filter(has_text="word word")).to_have_count(0)


def test_shift_enter_is_a_new_line(chat: ChatPage) -> None:
    chat.box.fill("/say one")
    chat.box.press("Shift+Enter")
    chat.box.press_sequentially("two")
    expect(chat.box).to_have_value("/say one\ntwo")
    chat.box.press("Enter")
    expect(chat.messages).to_have_count(1)
    chat.settled()


def test_someone_elses_address_shows_nothing(chat: ChatPage) -> None:
    chat.page.goto(f"{chat.url}/?c=0123456789abcdef")
    chat.usable()
    expect(chat.notice).to_contain_text("not here")
    expect(chat.footers).to_have_count(0)


def test_sign_out_and_in(browser: Browser, served: Product, chat: ChatPage) -> None:
    chat.page.get_by_label("Sign out").click()
    expect(chat.page).to_have_url(re.compile("/login$"))
    chat.fill_form(password="not the password")
    expect(chat.page.get_by_role("alert")).to_be_visible()
    chat.page.get_by_label("Password").fill(PASSWORD)
    chat.page.locator("form button").click()
    chat.usable()


def test_an_ended_session_leads_to_the_sign_in_page(chat: ChatPage) -> None:
    chat.context.clear_cookies()
    expect(chat.page).to_have_url(re.compile("/login$"))


def test_phone_width(browser: Browser, served: Product, chat: ChatPage) -> None:
    chat.say("/say " + "a wide | table | of | words " * 8)
    phone = ChatPage(browser, chat.address(), PHONE, touch=True, state=chat.context.storage_state())
    phone.page.goto(phone.url)
    phone.usable_on_phone()
    expect(phone.footers).to_have_count(1)
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    expect(phone.page.locator("#tc-side")).not_to_be_in_viewport()
    phone.page.get_by_label("Show or hide conversations").tap()
    expect(phone.page.locator("#tc-side")).to_be_in_viewport()
    phone.page.locator(".tc-new").tap()
    expect(phone.page.locator("#tc-side")).not_to_be_in_viewport()
    expect(phone.footers).to_have_count(0)
    phone.send("/say On the phone.")
    phone.settled()
    expect(phone.replies.last).to_have_text("On the phone.")
    for box in (phone.box.bounding_box(), phone.footers.last.bounding_box()):
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE[0]
    phone.close()


def test_dark_follows_the_system_and_can_be_chosen(browser: Browser, served: Product, chat: ChatPage) -> None:
    dark = ChatPage(browser, chat.url, scheme="dark", state=chat.context.storage_state())
    dark.page.goto(dark.url)
    dark.usable()
    expect(dark.page.locator("body")).to_have_class(re.compile("dark"))
    dark.page.get_by_label("Switch between light and dark").click()
    expect(dark.page.locator("body")).not_to_have_class(re.compile("dark"))
    dark.page.reload()
    dark.usable()
    expect(dark.page.locator("body")).not_to_have_class(re.compile("dark"))
    dark.close()

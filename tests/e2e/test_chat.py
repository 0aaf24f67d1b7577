"""A person's way through the product, on the real engine and the bundled model."""

import re

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.conftest import be_brief, tell
from tests.patience import PATIENCE
from tests.ui.support import DESKTOP, NAME, PHONE, ChatPage, Product, eventually, fetch

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUMBERS = re.compile(r"\d+ tokens?.*\d+ cached.*KV kept: \d+%", re.DOTALL)


def test_first_start(browser: Browser, served: Product) -> None:
    assert fetch(f"{served.url}/health/live")[0] == 200
    page = ChatPage(browser, served.url)
    page.page.goto(served.url)
    expect(page.page).to_have_url(re.compile("/setup$"))
    page.fill_form(password="short")
    assert page.page.url.endswith("/setup")
    page.fill_form()
    page.usable()
    expect(page.page.locator(".tc-name")).to_have_text(NAME)
    expect(page.page.locator("#tc-chat .example")).to_have_count(4)
    assert page.hosts == {served.url.partition("://")[2]}
    page.close()


def test_two_turns_reload_and_the_history_is_there(chat: ChatPage) -> None:
    first = chat.say("In one sentence: what is a lighthouse for?", 300)
    assert first.strip()
    expect(chat.footers.last).to_contain_text(NUMBERS)
    second = chat.say("And who lives in it?", 300)
    assert second.strip()
    # The second turn found the first one resident: only its new tokens were read.
    expect(chat.footers.last).to_contain_text(re.compile(r"[1-9][\d,]* cached"))
    chat.page.reload()
    chat.usable()
    expect(chat.messages).to_have_text(["In one sentence: what is a lighthouse for?", "And who lives in it?"])
    expect(chat.replies).to_have_count(2)
    assert [text.strip() for text in chat.replies.all_inner_texts()] == [first.strip(), second.strip()]


def test_stop_frees_the_engine(chat: ChatPage, served: Product, story: str) -> None:
    tell(chat, story)
    expect(chat.replies.last).to_have_text(re.compile(r"\w+"), timeout=120_000)
    eventually(lambda: served.running(served) == 1, PATIENCE, "the engine works on the reply")
    chat.stop()
    eventually(lambda: served.running(served) == 0, PATIENCE, "the engine is free")
    chat.settled()
    expect(chat.footers.last).to_contain_text("Stopped")
    assert chat.replies.last.inner_text().strip()
    be_brief(chat)
    assert chat.say("Thank you, that is enough.", 300)


def test_a_reply_goes_on_after_a_reload(chat: ChatPage, served: Product, story: str) -> None:
    tell(chat, story)
    expect(chat.replies.last).to_have_text(re.compile(r"\w+"), timeout=120_000)
    chat.page.reload()
    chat.usable()
    expect(chat.stop_button).to_be_visible()
    early = len(chat.replies.last.inner_text())
    eventually(lambda: len(chat.replies.last.inner_text()) > early, PATIENCE, "the reply grows")
    chat.stop()
    chat.settled()
    eventually(lambda: served.running(served) == 0, PATIENCE, "the engine is free")


def test_regenerate_edit_rename_delete(chat: ChatPage) -> None:
    chat.say("Name one colour.", 300)
    chat.page.get_by_label("Regenerate").last.click()
    expect(chat.footers.last).to_contain_text("2/2")
    chat.settled(300)
    chat.edit(0, "Name one animal.")
    # The page shows the new words at once; the new reply is there with the second version.
    expect(chat.messages).to_have_text(["Name one animal."])
    expect(chat.page.locator(".tc-foot-user")).to_contain_text("2/2")
    chat.settled(300)
    chat.rename("Name one colour.", "<b>Colours</b> & animals")
    expect(chat.page.locator(".tc-top h1")).to_have_text("<b>Colours</b> & animals")
    chat.delete("Colours")
    expect(chat.rows.filter(has_text="Colours")).to_have_count(0)
    expect(chat.footers).to_have_count(0)


def test_html_in_a_message_stays_text(chat: ChatPage) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script> ![p](http://evil.invalid/p.png)"
    chat.say(f"Repeat exactly this text and nothing else: {evil}", 300)
    expect(chat.messages.last).to_contain_text("<script>alert(2)</script>")
    assert chat.page.locator("#tc-chat .md :is(img, script, iframe)").count() == 0
    assert chat.dialogs == []
    assert chat.hosts == {chat.url.partition("://")[2]}


def test_phone_and_desktop_show_the_same(browser: Browser, served: Product, chat: ChatPage) -> None:
    assert chat.page.viewport_size == {"width": DESKTOP[0], "height": DESKTOP[1]}
    chat.say("Say good morning.", 300)
    phone = ChatPage(browser, chat.address(), PHONE, touch=True, state=chat.context.storage_state())
    phone.page.goto(phone.url)
    phone.usable_on_phone()
    expect(phone.replies).to_have_text(chat.replies.all_inner_texts(), use_inner_text=True)
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    phone.say("And good night.", 300)
    phone.close()
    chat.page.reload()
    chat.usable()
    expect(chat.replies).to_have_count(2)

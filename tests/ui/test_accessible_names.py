"""Whatever can be clicked or filled in has a name for those who do not see the icon."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.fake_engine import FakeEngine
from tests.patience import PATIENCE
from tests.ui.support import PHONE, ChatPage, controls, nameless

pytestmark = pytest.mark.ui

_NOTES = """button => {
    window.copySaid = [];
    new MutationObserver(() => window.copySaid.push(button.textContent)).observe(button, { childList: true });
}"""
"""Notes each text that a button gets."""


def test_the_chat_page(chat: ChatPage, fake: FakeEngine) -> None:
    page = chat.page
    assert nameless(page) == []
    buttons = {name for role, name, _ in controls(page) if role == "button"}
    assert "Send the message" in buttons
    assert ("textbox", "Message") in {(role, name) for role, name, _ in controls(page)}
    chat.say("/say ```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |")
    chat.page.get_by_label("Regenerate").last.click()
    expect(chat.footers.last).to_contain_text("2/2")
    chat.settled()
    fake.up_to = 40
    chat.send("/tokens 3000")
    expect(chat.stop_button).to_be_visible()
    assert nameless(page) == []
    buttons = {name for role, name, _ in controls(page) if role == "button"}
    assert "Stop the reply" in buttons
    assert "Send the message" not in buttons
    chat.stop()
    chat.settled()
    chat.messages.first.hover()
    chat.page.locator('#tc-chat [data-act="edit"]').first.click()
    expect(page.get_by_label("Your message")).to_be_focused()
    assert nameless(page) == []
    page.keyboard.press("Escape")


@pytest.mark.parametrize(
    "opened",
    [
        lambda page: page.get_by_role("button", name="Conversation settings").click(),
        lambda page: page.get_by_role("button", name="Import and export").click(),
        lambda page: page.get_by_label("More for this conversation").click(),
        lambda page: page.locator(".tc-meter").click(),
    ],
    ids=["settings", "data", "menu", "meter"],
)
def test_what_opens_over_the_chat_page(chat: ChatPage, opened: Callable[..., None]) -> None:
    chat.say("/say hello")
    opened(chat.page)
    expect(chat.page.locator("dialog[open], :popover-open").first).to_be_visible()
    assert nameless(chat.page) == []


def test_the_chat_page_on_a_phone(browser: Browser, chat: ChatPage) -> None:
    chat.say("/say hello")
    phone = ChatPage(browser, chat.address(), PHONE, touch=True, state=chat.context.storage_state())
    phone.page.goto(phone.url)
    phone.usable_on_phone()
    expect(phone.footers).to_have_count(1)
    assert nameless(phone.page) == []
    phone.page.get_by_label("Show or hide conversations").tap()
    expect(phone.page.locator("#tc-side")).to_be_in_viewport()
    assert nameless(phone.page) == []
    phone.close()


def test_the_account_page_whose_new_key_can_be_copied_and_the_door(
    chat: ChatPage, account: httpx.Client
) -> None:
    page = chat.page
    page.goto(f"{chat.url}/account")
    page.get_by_label("Name of a new key").fill("laptop")
    page.get_by_role("button", name="Create key").click()
    copy = page.locator("#copy")
    expect(copy).to_have_text("Copy key")
    assert nameless(page) == []
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    # It says so for two seconds, which is less than a busy machine may want to look.
    copy.evaluate(_NOTES)
    page.get_by_role("button", name="Copy key").click()
    page.wait_for_function("() => window.copySaid.includes('Copied')")
    key = page.locator("#secret").inner_text()
    assert page.evaluate("navigator.clipboard.readText()") == key
    allowed = {"Authorization": f"Bearer {key}"}
    assert httpx.get(f"{chat.url}/v1/models", headers=allowed, timeout=PATIENCE).status_code == 200
    chat.context.clear_cookies()
    page.goto(f"{chat.url}/login")
    assert nameless(page) == []
    made = account.post("/api/admin/invitations", json={}).json()
    page.goto(made["url"])
    assert nameless(page) == []

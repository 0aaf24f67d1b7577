"""The app dies in the middle of a reply and comes back."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.fake_engine import FakeEngine
from tests.ui.support import ChatPage, Product, fake_state, product

pytestmark = pytest.mark.ui


@pytest.fixture
def own(fake: FakeEngine, bundled_model_dir: Path) -> Iterator[Product]:
    url = fake.url  # type: ignore[attr-defined]
    environment = {"TANGRAM_ENGINE_URL": url, "MODEL": str(bundled_model_dir), "OMP_NUM_THREADS": "1"}
    with product(environment, lambda _: fake_state(url)["running"], ready=120) as running:
        yield running


def test_killed_in_the_middle_of_a_reply(browser: Browser, own: Product) -> None:
    chat = ChatPage(browser, own.url).enter()
    chat.say("/say Before the crash.")
    chat.send("/tokens 3000 /delay 0.05")
    expect(chat.replies.last).to_have_text(re.compile(r"(\w+ ){30}"))
    chat.page.wait_for_timeout(1200)  # what is saved is at most about a second old
    own.kill(signal.SIGKILL)
    own.start(120)
    # The page finds by itself that the server is back, and the reply goes on.
    kept = len(chat.replies.last.inner_text().split())
    expect(chat.replies.last).to_have_text(re.compile(rf"(\w+ ){{{kept + 20}}}"))
    chat.stop()
    chat.settled()
    expect(chat.footers.last).to_have_attribute("data-status", "stopped")
    assert len(chat.replies.last.inner_text().split()) >= 20
    assert "after the crash" in chat.say("/say " + "after the crash " * 20)
    assert chat.problems == []
    chat.close()


def test_a_page_left_open_works_on_after_a_restart(browser: Browser, own: Product) -> None:
    chat = ChatPage(browser, own.url).enter()
    chat.say("/say One.")
    address = chat.address()
    own.kill()
    chat.box.fill("/say Two.")
    with chat.page.expect_navigation(timeout=150_000):
        own.start(120)
    chat.usable()
    expect(chat.box).to_have_value("/say Two.")
    chat.box.press("Enter")
    expect(chat.footers).to_have_count(2)
    chat.settled()
    expect(chat.replies).to_have_text(["One.", "Two."])
    assert chat.address() == address
    chat.close()

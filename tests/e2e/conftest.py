"""The whole product as a user starts it: `python -m app` in a fresh data directory, with its own engine.

With TANGRAM_TEST_ENGINE=fake the imitated engine takes the real one's place, to work on the tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, expect

from tests.ui.support import ROOT, ChatPage, Product, chromium, engine_url, fake_state, product, real_running

FAKE = os.environ.get("TANGRAM_TEST_ENGINE") == "fake"


def running(served: Product) -> int:
    return int(fake_state(engine_url(served))["running"]) if FAKE else real_running(served)


@pytest.fixture(scope="session")
def served(bundled_model_dir: Path) -> Iterator[Product]:
    """The running product: `url`, `home`, `log`, and `running(served)` for what the engine works on."""
    # The real model may go on for thousands of tokens, which a busy machine takes minutes for.
    environment = {"MODEL": str(bundled_model_dir), "TANGRAM_MAX_REPLY_TOKENS": "600"}
    if FAKE:
        environment["TANGRAM_ENGINE_COMMAND"] = f"{sys.executable} {ROOT / 'tests' / 'fake_engine.py'}"
    with product(environment, running, ready=600) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def story() -> str:
    """A message whose reply takes long."""
    words = "Write a very long story about a lighthouse keeper and the sea, with many chapters."
    return f"{words} /tokens 3000 /delay 0.05" if FAKE else words


def tell(chat: ChatPage, story: str) -> None:
    """Ask for the story in a conversation whose replies may be longer than others': none ends while a busy
    machine still looks at it."""
    origin = {"origin": chat.url}
    made = chat.page.request.post(
        f"{chat.url}/api/conversations", data={"settings": {"max_tokens": 4000}}, headers=origin
    )
    assert made.status == 201, made.text()
    chat.page.goto(f"{chat.url}/?c={made.json()['id']}")
    chat.usable()
    expect(chat.page.locator(".tc-row.tc-active")).to_have_count(1)
    chat.send(story)


def be_brief(chat: ChatPage) -> None:
    """From now on the replies of the open conversation are short."""
    own = parse_qs(urlsplit(chat.address()).query)["c"][0]
    body = {"settings": {"max_tokens": 40}}
    done = chat.page.request.patch(
        f"{chat.url}/api/conversations/{own}", data=body, headers={"origin": chat.url}
    )
    assert done.status == 200, done.text()


@pytest.fixture(scope="session")
def states() -> dict[str, Any]:
    """Cookies of sign-ins, by user name, kept between tests."""
    return {}


@pytest.fixture
def chat(browser: Browser, served: Product, states: dict[str, Any]) -> Iterator[ChatPage]:
    """The chat page of the administrator (created on first use), on a new conversation."""
    page = ChatPage(browser, served.url, state=states.get("admin")).enter()
    states["admin"] = page.context.storage_state()
    yield page
    problems, dialogs = page.problems, page.dialogs
    page.close()
    assert not problems, "the page raised errors"
    assert not dialogs, "something in the page ran a script of its own"

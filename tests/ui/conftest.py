"""The product on the imitated engine, one for all tests of this folder; each begins without conversations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser

from tests.fake_engine import FakeConfig, FakeEngine, ThreadServer
from tests.patience import PATIENCE
from tests.ui.support import NAME, PASSWORD, SETUP_KEY, ChatPage, Product, chromium, fake_state, product


@pytest.fixture(scope="session")
def fake(bundled_model_dir: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine(FakeConfig(model=str(bundled_model_dir)))
    with ThreadServer(engine.app) as server:
        engine.url = server.url  # type: ignore[attr-defined]
        yield engine


@pytest.fixture(scope="session")
def served(fake: FakeEngine, bundled_model_dir: Path) -> Iterator[Product]:
    url = fake.url  # type: ignore[attr-defined]
    environment = {"TANGRAM_ENGINE_URL": url, "MODEL": str(bundled_model_dir), "OMP_NUM_THREADS": "1"}
    with product(environment, lambda _: fake_state(url)["running"], ready=120) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="session")
def account(served: Product) -> Iterator[httpx.Client]:
    """The account of all tests here, outside the browser."""
    options: dict[str, Any] = {"base_url": served.url, "headers": {"Origin": served.url}}
    options |= {"trust_env": False, "timeout": 2 * PATIENCE}
    with httpx.Client(**options) as http:
        form = {"name": NAME, "password": PASSWORD, "key": SETUP_KEY}
        assert http.post("/setup", data=form).status_code == 303
        yield http


def empty(account: httpx.Client) -> None:
    """Delete what earlier tests left: their order must not matter."""
    for conversation in account.get("/api/conversations", params={"limit": 1000}).json()["conversations"]:
        account.delete(f"/api/conversations/{conversation['id']}").raise_for_status()


@pytest.fixture
def chat(browser: Browser, served: Product, account: httpx.Client, fake: FakeEngine) -> Iterator[ChatPage]:
    empty(account)
    page = ChatPage(browser, served.url).enter()
    yield page
    fake.up_to = math.inf
    problems, dialogs = page.problems, page.dialogs
    page.close()
    assert not problems, "the page raised errors"
    assert not dialogs, "something in the page ran a script of its own"

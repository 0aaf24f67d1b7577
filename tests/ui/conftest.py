"""The product on the imitated engine, one for all tests of this folder; a fresh sign-in for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.fake_engine import FakeConfig, FakeEngine, ThreadServer
from tests.ui.support import ChatPage, Product, chromium, fake_state, product


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


@pytest.fixture
def chat(browser: Browser, served: Product) -> Iterator[ChatPage]:
    page = ChatPage(browser, served.url).enter()
    yield page
    problems, dialogs = page.problems, page.dialogs
    page.close()
    assert not problems, "the page raised errors"
    assert not dialogs, "something in the page ran a script of its own"

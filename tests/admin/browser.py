"""The console as an operator uses it, in a real browser."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any, Self

from playwright.sync_api import Browser, Locator, Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from tests.patience import PATIENCE
from tests.ui.support import DESKTOP, NAME, PASSWORD, SETUP_KEY, eventually

_MAP = "#memory-map-figure"


class AdminPage:
    """An open console. ``problems`` are script errors, ``foreign`` requests that left the product."""

    def __init__(
        self, browser: Browser, url: str, size: tuple[int, int] = DESKTOP, scheme: Any = "light"
    ) -> None:
        self.url = url
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE * 1000)
        self.problems: list[str] = []
        self.foreign: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self._requested(request.url))

    def __enter__(self) -> Self:
        """Sign in (or make the first account) and open the console."""
        self.page.goto(f"{self.url}/admin")
        self.page.get_by_label("name").first.fill(NAME)
        self.page.get_by_label("Password").fill(PASSWORD)
        if (key := self.page.get_by_label("Setup key")).count():
            key.fill(SETUP_KEY)
        self.page.locator("form button").click()
        self.page.wait_for_url(lambda url: not url.endswith(("/login", "/setup")))
        self.page.goto(f"{self.url}/admin")
        expect(self.page.locator(_MAP)).to_have_attribute("data-drawn", re.compile(r"\d+"), timeout=120_000)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.context.close()

    def _requested(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:")):
            self.foreign.append(url)

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()

    def show(self, view: str) -> None:
        """Switch the map and wait until it is drawn so; what it showed before may be drawn again first."""
        before = self.page.locator(_MAP).get_attribute("data-drawn")
        self.page.get_by_role("radio", name=view, exact=True).check()
        self.page.wait_for_function(
            "([map, before, view]) => map.dataset.drawn !== before && map.layout.meta.view === view",
            arg=[self.page.locator(_MAP).element_handle(), before, view],
        )

    def values(self) -> list[list[float]]:
        """What the map shows, one row a KV head."""
        shown: list[list[float]] = self.page.evaluate(f"document.querySelector('{_MAP}').data[0].z")
        return shown

    def card(self, label: str) -> str:
        return self.page.locator(".card", has_text=label).first.inner_text()

    def set(self, name: str, value: str) -> None:
        """Type into a field of the form: ``retention``, ``group`` or ``alpha``."""
        field = self.page.locator(f"#tune-{name} input[type=number]")
        field.fill(value)
        field.press("Tab")

    def pick(self, field: str, option: str) -> None:
        """Choose in a list, which may not be filled yet or be filled anew at this moment."""
        box = self.page.locator(f"#{field} input")

        def picked() -> bool:
            box.click()
            try:
                self.page.get_by_role("option", name=option).first.click(timeout=5000)
            except PlaywrightTimeoutError:
                box.press("Escape")
                return False
            return option in box.input_value()

        eventually(picked, 2 * PATIENCE, f"{option} is chosen in {field}")

    def apply(self) -> None:
        self.page.locator("#tune-apply").click()
        self.page.locator("#tune-restart").click()

    @property
    def preview(self) -> Locator:
        return self.page.locator("#tune-preview")

    @property
    def refusal(self) -> Locator:
        return self.page.locator("#tune-refusal")

    @property
    def progress(self) -> Locator:
        return self.page.locator("#tune-progress")

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        wider: int = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return wider

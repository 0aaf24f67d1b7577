"""Takes the pictures of the pages that the README and the documentation show.

    python docs/screenshots.py [--out docs/images] [--model DIR] [--all]

It starts the product in a temporary data directory on the imitated engine of the tests, so that the pictures
come out the same everywhere. Without --all only the pictures that the documents show are kept.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from playwright.sync_api import Browser, expect  # noqa: E402

from app import bundled_model  # noqa: E402
from tests.admin.browser import AdminPage  # noqa: E402
from tests.fake_engine import FakeConfig, FakeEngine, Sequence, ThreadServer  # noqa: E402
from tests.ui.support import DESKTOP, PHONE, ChatPage, Product, chromium, product  # noqa: E402

SHOWN = ("chat", "chat-dark", "chat-phone", "settings", "console")

ANSWER = """<think>They ask for an explanation and some code. Drawers make a good picture.</think>

A **hash map** is a cabinet of drawers with a rule that says which drawer a thing belongs in.

1. Take the key, say `"apple"`.
2. A *hash function* turns it into a number.
3. That number picks the drawer.

```python
def drawer(key: str, drawers: int) -> int:
    return hash(key) % drawers  # always the same one
```

| Operation | Average | Worst |
|---|---|---|
| Insert | O(1) | O(n) |
| Look up | O(1) | O(n) |

With n things in m drawers a drawer holds \\(\\alpha = n/m\\) of them, so keep \\(\\alpha\\) small."""

OTHERS = ("Plan a quiet weekend by the sea", "Why is the sky blue?", "A letter to the landlord")
QUESTION = "Explain how a hash map works. Show some code."


class Scripted(FakeEngine):
    """The imitated engine, with prepared answers to some messages."""

    script: dict[str, str]

    def plan(self, prompt: list[int]) -> Any:
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        asked = text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        plan: Any = super().plan(prompt)
        if answer := getattr(self, "script", {}).get(asked.strip()):
            ids = self.tokenizer.encode(answer, add_special_tokens=False).ids
            return ([*ids, self.end], 0.02, *plan[2:])
        return plan


class Album:
    """Names and keeps pictures, each at both sizes where that makes sense."""

    def __init__(
        self, browser: Browser, served: Product, fake: Scripted, out: Path, everything: bool
    ) -> None:
        self.browser, self.served, self.fake, self.out, self.everything = (
            browser,
            served,
            fake,
            out,
            everything,
        )
        self.state: object = None

    def keep(self, page: ChatPage, name: str) -> None:
        if self.everything or name in SHOWN:
            page.page.mouse.move(0, 0)
            page.page.wait_for_timeout(400)  # transitions end
            page.page.screenshot(path=self.out / f"{name}.png")

    def page(self, address: str = "", *, phone: bool = False, scheme: str = "light") -> ChatPage:
        size = PHONE if phone else DESKTOP
        page = ChatPage(
            self.browser, address or self.served.url, size, touch=phone, scheme=scheme, state=self.state
        )
        page.page.goto(page.url)
        return page

    def sizes(self, name: str, address: str) -> None:
        """The page at ``address`` in all its looks."""
        looks = {"": (False, "light"), "-phone": (True, "light"), "-dark": (False, "dark")}
        looks["-phone-dark"] = (True, "dark")
        for suffix, (phone, scheme) in looks.items():
            page = self.page(address, phone=phone, scheme=scheme)
            if self.state:
                page.usable_on_phone()
            self.keep(page, f"{name}{suffix}")
            page.close()

    def take(self) -> None:
        url = self.served.url
        self.sizes("setup", f"{url}/setup")
        first = self.page()
        first.fill_form()
        first.usable()
        self.sizes("login", f"{url}/login")
        self.state = first.context.storage_state()
        self.sizes("empty", url)
        for title in OTHERS:
            first.page.locator(".tc-new").click()
            expect(first.footers).to_have_count(0)
            first.say(f"/say Of course. ({title})")
            first.rename("/say Of course", title)
            expect(first.rows.first).to_contain_text(title)
        first.page.locator(".tc-new").click()
        expect(first.footers).to_have_count(0)
        self.conversation(first)
        self.console()
        self.moments(first)
        first.close()

    def conversation(self, page: ChatPage) -> None:
        self.fake.script = {QUESTION: ANSWER}
        page.say(QUESTION)
        self.sizes("chat", page.address())

    def console(self) -> None:
        """With conversations long enough to have sealed chunks."""
        lengths = (5200, 3900, 2600, 1800)
        self.fake.resident += [Sequence(f"cmpl-{n:024x}-0", "others", [*range(n)]) for n in lengths]
        for suffix, size, scheme in (
            ("", DESKTOP, "light"),
            ("-dark", DESKTOP, "dark"),
            ("-phone", PHONE, "light"),
            ("-phone-dark", PHONE, "dark"),
        ):
            with AdminPage(self.browser, self.served.url, size, scheme) as page:
                for tab in ("Memory", "Engine", "Tune", "Profiles", "Users", "Audit", "Health"):
                    page.tab(tab)
                    page.page.wait_for_timeout(1500)  # the tab's pictures are drawn
                    name = "console" if tab == "Memory" else f"console-{tab.lower()}"
                    if self.everything or f"{name}{suffix}" in SHOWN:
                        page.page.screenshot(path=self.out / f"{name}{suffix}.png", full_page=True)

    def moments(self, page: ChatPage) -> None:
        page.send("/tokens 400 /delay 0.05")
        expect(page.replies.last).to_have_text(re.compile(r"lorem(\s\w+){15}"))
        self.keep(page, "streaming")
        page.stop()
        page.settled()
        page.page.get_by_label("Regenerate").last.click()
        expect(page.footers.last).to_contain_text("2/2")
        expect(page.replies.last).to_have_text(re.compile(r"lorem(\s\w+){15}"))
        page.stop()
        page.settled()
        self.keep(page, "versions")
        page.messages.last.hover()
        page.page.locator('#tc-chat [data-act="edit"]').last.click()
        self.keep(page, "edit")
        page.page.locator('#tc-chat [aria-label="Cancel"]').click()
        page.menu(QUESTION, "ask_rename")
        self.keep(page, "rename")
        page.page.locator("#tc-rename-dialog [data-act=cancel]").click()
        page.menu(OTHERS[0], "ask_delete")
        self.keep(page, "delete")
        page.page.locator("#tc-delete-dialog .tc-danger").click()
        expect(page.page.locator(".tc-toast")).to_be_visible()
        self.keep(page, "undo")
        page.menu(OTHERS[1], "archive_chat")
        expect(page.page.locator(".tc-archive")).to_be_visible()
        for suffix, on_phone, scheme in (
            ("", False, "light"),
            ("-dark", False, "dark"),
            ("-phone", True, "light"),
            ("-phone-dark", True, "dark"),
        ):
            self.panels(page.address(), suffix, phone=on_phone, scheme=scheme)
        self.fake.healthy = False
        expect(page.page.locator(".tc-banner")).to_be_visible(timeout=30_000)
        page.box.fill("This text waits until the engine is back.")
        page.box.press("Enter")
        expect(page.notice).to_be_visible()
        self.keep(page, "not-ready")

    def panels(self, address: str, suffix: str, *, phone: bool, scheme: str) -> None:
        """Everything that opens over the page."""
        page = self.page(address, phone=phone, scheme=scheme)
        page.usable_on_phone()
        page.page.get_by_label("More for this conversation").click()
        self.keep(page, f"menu{suffix}")
        page.page.keyboard.press("Escape")
        page.page.locator(".tc-meter").click()
        self.keep(page, f"meter{suffix}")
        page.page.keyboard.press("Escape")
        page.page.locator('[data-act="ask_settings"]').click()
        self.keep(page, f"settings{suffix}")
        page.page.locator("#tc-settings-dialog [data-act=cancel]").click()
        if phone:
            page.page.get_by_label("Show or hide conversations").tap()
            self.keep(page, f"sidebar{suffix}")
        page.page.locator('[data-act="ask_data"]').click()
        self.keep(page, f"files{suffix}")
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes the pictures of the pages.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--model", type=Path, help="a prepared model folder; default: the bundled model")
    parser.add_argument("--all", action="store_true", help="keep every picture, not only the published ones")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or bundled_model.prepare(Path(folder), print)
        fake = Scripted(FakeConfig(model=str(model)))
        with ThreadServer(fake.app) as engine:
            environment = {"TANGRAM_ENGINE_URL": engine.url, "MODEL": str(model)}
            with product(environment, lambda _: 0, 120) as served, chromium() as browser:
                Album(browser, served, fake, options.out, options.all).take()
    print(f"pictures are in {options.out}")


if __name__ == "__main__":
    main()

"""The whole product in a process of its own, a headless Chromium, and the chat page as a person uses it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from tests.leftovers import kill_session
from tests.patience import PATIENCE

T = TypeVar("T")
expect.set_options(timeout=PATIENCE * 1000)

ROOT = Path(__file__).resolve().parents[2]
NAME, PASSWORD = "robin", "correct horse battery"
SETUP_KEY = "key of the tests' first account"
DESKTOP, PHONE = (1280, 800), (390, 844)
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


def eventually(look: Callable[[], T], seconds: float, what: str) -> T:
    """Return the first truthy answer of ``look``; fail with ``what`` when there is none in time."""
    end = time.monotonic() + seconds
    while not (answer := look()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.05)
    return answer


def fetch(url: str) -> tuple[int, str]:
    """GET, as (status, body); status 0 when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Product:
    """`python -m app` in its own session and data directory."""

    home: Path
    port: int
    environment: dict[str, str]
    running: Callable[[Product], int] = lambda product: real_running(product)
    """How many requests the engine works on at this moment."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.home / "app.log").read_text(errors="replace")

    def start(self, ready_seconds: float) -> None:
        """Start it and wait until the engine answers too."""
        environment = os.environ | self.environment
        environment |= {"TANGRAM_HOME": str(self.home), "TANGRAM_PORT": str(self.port)}
        environment["TANGRAM_SETUP_KEY"] = SETUP_KEY
        with (self.home / "app.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app"],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        def ready() -> bool:
            if self.process is None or self.process.poll() is not None:
                raise AssertionError(f"the app ended:\n{self.log[-3000:]}")
            return fetch(f"{self.url}/health/ready")[0] == 200

        eventually(ready, ready_seconds, f"the product is ready; its log ends:\n{self.log[-3000:]}")

    def kill(self, sign: signal.Signals = signal.SIGTERM) -> None:
        """End the app with a signal and wait for it; what is left of its session is killed."""
        if self.process is None:
            return
        self.process.send_signal(sign)
        try:
            self.process.wait(2 * PATIENCE)
        finally:
            kill_session(self.process.pid)
            self.process.wait()
            self.process = None


@contextmanager
def product(
    environment: dict[str, str], running: Callable[[Product], int], ready: float
) -> Iterator[Product]:
    """A running product in a fresh data directory."""
    with tempfile.TemporaryDirectory(prefix="tangram-ui-") as folder:
        made = Product(Path(folder), free_port(), environment, running)
        try:
            made.start(ready)
            yield made
        finally:
            made.kill()


def real_running(product: Product) -> int:
    """Requests that the product's own engine runs or has waiting, from the engine's metrics."""
    text = fetch(f"{engine_url(product)}/metrics")[1]
    found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([\d.]+)", text, re.MULTILINE)
    if not found:
        raise AssertionError("the engine's metrics do not tell how many requests run")
    return int(sum(map(float, found)))


def engine_url(product: Product) -> str:
    """The address of the engine that the product started: a child process with a --port."""
    if product.process is None:
        raise AssertionError("the product does not run")
    return f"http://127.0.0.1:{_engine_port(product.process.pid)}"


def _engine_port(parent: int) -> str:
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            arguments = (status.parent / "cmdline").read_bytes().decode().split("\0")
            child = f"PPid:\t{parent}\n" in status.read_text()
        except OSError:
            continue
        if child and "--port" in arguments:
            return arguments[arguments.index("--port") + 1]
    raise AssertionError("the app has no engine process with a --port")


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium when there is one, else Playwright's."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("TANGRAM_TEST_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS, timeout=4 * PATIENCE * 1000)
        try:
            yield browser
        finally:
            browser.close()


class ChatPage:
    """The chat page in one browser context, and what was said on its console or asked of the network."""

    def __init__(
        self,
        browser: Browser,
        url: str,
        size: tuple[int, int] = DESKTOP,
        *,
        touch: bool = False,
        scheme: Any = "light",
        state: Any = None,
    ) -> None:
        self.url = url
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            has_touch=touch,
            is_mobile=touch,
            color_scheme=scheme,
            storage_state=state,
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE * 1000)
        self.hosts: set[str] = set()
        self.dialogs: list[str] = []
        self.problems: list[str] = []
        self.page.on(
            "request", lambda request: self.hosts.add(request.url.partition("://")[2].partition("/")[0])
        )
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", self._dialog)

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    # Getting in

    def fill_form(self, name: str = NAME, password: str = PASSWORD) -> None:
        self.page.get_by_label("name").first.fill(name)
        self.page.get_by_label("Password").fill(password)
        if (key := self.page.get_by_label("Setup key")).count():
            key.fill(SETUP_KEY)
        self.page.locator("form button").click()

    def enter(self) -> ChatPage:
        """Open the page, creating the account or signing in when asked, and wait until it can be used."""
        self.page.goto(self.url)
        if "/setup" in self.page.url or "/login" in self.page.url:
            self.fill_form()
        return self.usable()

    def usable(self) -> ChatPage:
        expect(self.page.locator(".tc-name")).to_be_visible()
        return self

    def usable_on_phone(self) -> ChatPage:
        expect(self.page.locator(".tc-name")).to_be_attached()
        return self

    def close(self) -> None:
        self.context.close()

    # Parts

    @property
    def box(self) -> Locator:
        return self.page.locator("#tc-composer textarea")

    @property
    def replies(self) -> Locator:
        return self.page.locator("#tc-chat .bot-row .md")

    @property
    def messages(self) -> Locator:
        return self.page.locator("#tc-chat .user-row .md")

    @property
    def footers(self) -> Locator:
        return self.page.locator("#tc-chat .bot-row .tc-foot")

    @property
    def rows(self) -> Locator:
        return self.page.locator("#tc-conversations .tc-row")

    @property
    def stop_button(self) -> Locator:
        return self.page.locator("#tc-composer .stop-button")

    @property
    def notice(self) -> Locator:
        return self.page.locator(".tc-notice")

    def address(self) -> str:
        return str(self.page.evaluate("location.href"))

    # Doing

    def send(self, text: str) -> None:
        """Send without waiting for the reply."""
        before = self.messages.count()
        self.box.fill(text)
        self.box.press("Enter")
        expect(self.messages).to_have_count(before + 1)

    def say(self, text: str, seconds: float = 60) -> str:
        """Send, wait for the whole reply and return its text."""
        before = self.footers.count()
        self.send(text)
        expect(self.footers).to_have_count(before + 1)
        self.settled(seconds)
        return self.replies.last.inner_text()

    def settled(self, seconds: float = 60) -> None:
        """Wait until no reply is being written."""
        expect(self.footers.last).to_have_attribute(
            "data-status", re.compile("complete|stopped|interrupted|error"), timeout=seconds * 1000
        )
        expect(self.page.locator("#tc-composer .submit-button")).to_be_visible()

    def stop(self) -> None:
        self.stop_button.click()

    def open(self, title: str) -> None:
        self.page.locator(".tc-open", has_text=title).first.click()
        expect(self.page.locator(".tc-row.tc-active")).to_contain_text(title)

    def menu(self, title: str, act: str) -> None:
        """Click an entry of a conversation's menu, `act`, in the list."""
        row = self.rows.filter(has_text=title).first

        def opened() -> bool:  # the list may be drawn anew in between, the row elsewhere
            row.hover()
            try:
                row.locator('[data-act="ask_menu"]').click(timeout=2000)
            except PlaywrightTimeoutError:
                return False
            return True

        eventually(opened, 2 * PATIENCE, f"the menu of {title} is open")
        self.page.locator(f'#tc-menu [data-act="{act}"]').click()

    def keep_toasts(self) -> None:
        """Until they are used: a busy machine may want longer than they last."""
        self.page.evaluate("""() => {
            const sheet = new CSSStyleSheet();
            sheet.replaceSync(".tc-toast { animation: none !important }");
            document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
        }""")

    def rename(self, title: str, new: str) -> None:
        self.menu(title, "ask_rename")
        self.page.locator("#tc-rename-dialog input").fill(new)
        self.page.locator("#tc-rename-dialog .tc-primary").click()

    def delete(self, title: str) -> None:
        self.menu(title, "ask_delete")
        self.page.locator("#tc-delete-dialog .tc-danger").click()

    def edit(self, index: int, text: str) -> str:
        """Edit the user's message number ``index``; return what the edit box held."""
        self.messages.nth(index).hover()
        self.page.locator('#tc-chat [data-act="edit"]').nth(index).click()
        area = self.page.locator("#tc-chat textarea.edit-textarea")
        held = area.input_value()
        area.fill(text)
        self.page.locator('#tc-chat [aria-label="Submit"]').click()
        return held


def fake_state(url: str) -> dict[str, Any]:
    """What the imitated engine at ``url`` says about itself."""
    return dict(json.loads(fetch(f"{url}/fake/state")[1]))


CONTROLS = {"button", "link", "textbox", "searchbox", "combobox", "listbox", "option", "spinbutton", "slider"}
CONTROLS |= {"checkbox", "radio", "switch", "tab", "menuitem"}


def controls(page: Page) -> list[tuple[str, str, str]]:
    """(role, accessible name, HTML) of everything on a page that can be used, as the browser tells assistive
    technology."""
    page.wait_for_load_state()
    session = page.context.new_cdp_session(page)
    found = []
    try:
        for node in session.send("Accessibility.getFullAXTree")["nodes"]:
            role = node.get("role", {}).get("value", "")
            if node.get("ignored") or role not in CONTROLS:
                continue
            name = " ".join(str(node.get("name", {}).get("value", "")).split())
            element = {"backendNodeId": node["backendDOMNodeId"]}
            found.append((role, name, str(session.send("DOM.getOuterHTML", element)["outerHTML"])[:300]))
    finally:
        session.detach()
    return found


def nameless(page: Page) -> list[str]:
    """The HTML of what can be used and has no accessible name. Fails on a page without anything to use."""
    found = eventually(lambda: controls(page), PATIENCE, "something on this page can be used")
    return [html for _, name, html in found if not name]

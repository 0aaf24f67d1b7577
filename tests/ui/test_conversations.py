"""The list of conversations in a real browser: search, archive, files in and out, and the phone."""
# ruff: noqa: E501 - one attack a line

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.ui.support import PHONE, ChatPage

pytestmark = pytest.mark.ui

CORPUS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    '"><svg onload=alert(1)>',
    "<iframe srcdoc='<script>parent.alert(1)</script>'></iframe>",
    "<a href='javascript:alert(1)'>x</a> [x](javascript:alert(1)) [x](JaVaScRiPt:alert(1)) [x](data:text/html,<script>alert(1)</script>)",
    "![x](http://evil.invalid/a.png) <img src=http://evil.invalid/b.png> ![x]: http://evil.invalid/c.png",
    "<style>@import 'http://evil.invalid/d.css'; #tc-app { display: none }</style>",
    "<form action=http://evil.invalid><input name=password></form><base href=http://evil.invalid>",
    "<button data-act='delete_chat' data-id='1'>x</button><details open ontoggle=alert(1)>",
    "```html\n<script>alert(1)</script>\n```\n```mermaid\ngraph TD; A[<img src=x onerror=alert(1)>]\n```",
    "$$\\href{javascript:alert(1)}{x}$$ \\(\\includegraphics{http://evil.invalid/e.png}\\) $$\\htmlData{x=1}{y}$$",
    "<math><mtext><table><mglyph><style><!--</style><img src=x onerror=alert(1)>",
    "`${alert(1)}` {{alert(1)}} {{#with constructor}}{{/with}} <think><img src=x onerror=alert(1)></think>",
    "<think>${alert(1)}{{constructor.constructor('alert(1)')()}}</script><script>alert(1)</script></think>x",
]  # fmt: skip


def choose(chat: ChatPage, path: Path) -> None:
    chat.page.get_by_role("button", name="Import and export").click()
    chat.page.locator("#tc-data-dialog input[type=file]").set_input_files(path)


def test_files_in_and_out(chat: ChatPage, tmp_path: Path) -> None:
    data: Any = [
        {"title": "Über C++", "conversations": [{"from": "human", "value": 'Why "?'}, {"from": "gpt", "value": "So."}]},
        {"messages": [{"role": "user", "content": "北京天气怎么样"}, {"role": "assistant", "content": "晴 ☀️"}]},
    ]  # fmt: skip
    file = tmp_path / "some.json"
    file.write_text(json.dumps([*data[:1], {"title": "Bad", "messages": [{"role": "x"}]}]))
    choose(chat, file)
    dialog = chat.page.locator("#tc-data-dialog")
    expect(dialog.locator(".tc-problem")).to_contain_text("Conversation 2 “Bad”, message 1")
    expect(dialog.locator(".tc-problem")).to_contain_text("Nothing was imported")
    file.write_text(json.dumps(data))
    dialog.locator("input[type=file]").set_input_files(file)
    expect(dialog.locator(".tc-done")).to_have_text("2 conversations with 4 messages imported.")
    expect(chat.rows.filter(has_text="Über C++")).to_have_count(1)
    with chat.page.expect_download() as download:
        dialog.get_by_text("ShareGPT").first.click()
    every = json.loads(Path(download.value.path()).read_text())
    assert {"Über C++", "北京天气怎么样"} <= {item["title"] for item in every}
    dialog.get_by_text("Close").click()

    search = chat.page.locator("#tc-search input")
    for words, title in (
        ("c++", "Über C++"),
        ('"', "Über C++"),
        ("天气", "北京天气怎么样"),
        ("☀️", "北京"),
        ("ÜBER", "Über"),
    ):
        search.fill("no such words")  # or what one search finds would be taken for what the next one does
        expect(chat.page.locator(".tc-none")).to_be_visible()
        search.fill(words)
        expect(chat.rows).to_have_count(1)
        expect(chat.rows.first).to_contain_text(title)
    chat.rows.first.locator(".tc-open").click()
    expect(chat.replies).to_have_text(["So."])
    chat.page.get_by_label("More for this conversation").click()
    with chat.page.expect_download() as download:
        chat.page.locator("#tc-menu").get_by_text("Markdown").click()
    assert download.value.suggested_filename == "Über C++.md"
    assert (
        Path(download.value.path()).read_text() == '# Über C++\n\n## You\n\nWhy "?\n\n## Assistant\n\nSo.\n'
    )
    assert chat.say("/say It goes on.") == "It goes on."


def test_archive_and_back(chat: ChatPage) -> None:
    chat.say("/say A pelican to put away")
    title = "A pelican to put away"
    chat.keep_toasts()
    chat.menu(title, "archive_chat")
    archive = chat.page.locator(".tc-archive")
    expect(archive).to_have_attribute("open", "")  # it holds the one that is open
    expect(archive.locator(".tc-row")).to_contain_text([title])
    chat.page.locator(".tc-new").click()
    expect(chat.footers).to_have_count(0)
    expect(archive).not_to_have_attribute("open", "")
    chat.page.locator("#tc-search input").fill("pelican")
    expect(archive).to_have_attribute("open", "")
    chat.open(title)
    expect(chat.replies).to_have_text([title])
    chat.page.locator("#tc-search input").fill("")
    chat.menu(title, "unarchive_chat")
    expect(chat.page.locator(".tc-archive .tc-row", has_text=title)).to_have_count(0)
    expect(chat.rows.filter(has_text=title)).to_have_count(1)
    chat.menu(title, "archive_chat")
    expect(chat.page.locator(".tc-archive .tc-row", has_text=title)).to_have_count(1)
    chat.page.locator(".tc-toast button").click()
    expect(chat.page.locator(".tc-archive .tc-row", has_text=title)).to_have_count(0)
    expect(chat.rows.filter(has_text=title)).to_have_count(1)


def test_no_file_brings_a_script_with_it(chat: ChatPage, tmp_path: Path) -> None:
    file = tmp_path / "evil.json"
    turns = [
        turn for text in CORPUS for turn in ({"from": "human", "value": text}, {"from": "gpt", "value": text})
    ]
    file.write_text(
        json.dumps(
            [{"title": "Corpus", "conversations": turns}]
            + [{"title": text, "conversations": turns[:2]} for text in CORPUS]
        )
    )
    choose(chat, file)
    expect(chat.page.locator("#tc-data-dialog .tc-done")).to_contain_text(f"{len(CORPUS) + 1} conversations")
    chat.page.locator("#tc-data-dialog").get_by_text("Close").click()
    for title, messages in (("Corpus", len(CORPUS)), (CORPUS[1], 1), (CORPUS[13], 1)):
        chat.open(title[:40])
        expect(chat.page.locator(".tc-top h1")).to_contain_text(title[:40])
        expect(chat.messages).to_have_count(messages)
        expect(chat.messages.first).to_contain_text("alert(1)")
        chat.page.wait_for_timeout(300)
        bad = chat.page.locator(
            "#tc-app :is(script, iframe, form:not([action='/logout']), base, object, embed, .md img, .md style, "
            ".md svg:not(.md button svg), .md button:not(.copy_code_button), [onload], [onerror], [ontoggle])"
        )
        assert [each.evaluate("e => e.outerHTML.slice(0, 200)") for each in bad.all()] == []
        assert chat.page.locator("a[href^='javascript' i], a[href^='data:' i]").count() == 0
    chat.page.locator("#tc-search input").fill(CORPUS[6])
    expect(chat.rows).to_have_count(2)
    chat.menu("evil.invalid", "ask_rename")
    expect(chat.page.locator("#tc-rename-dialog input")).to_have_value(CORPUS[6])
    chat.page.keyboard.press("Escape")
    assert chat.hosts == {chat.url.partition("://")[2]}


def test_everything_fits_a_phone(browser: Browser, chat: ChatPage) -> None:
    chat.say("/say " + "A wide thing. " * 10)
    phone = ChatPage(browser, chat.address(), PHONE, touch=True, state=chat.context.storage_state())
    page = phone.page
    page.goto(phone.url)
    phone.usable_on_phone()
    expect(phone.footers).to_have_count(1)

    def fits(selector: str) -> None:
        expect(page.locator(selector).last).to_be_visible()
        box = page.locator(selector).last.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["y"] >= 0
        assert box["x"] + box["width"] <= PHONE[0]
        assert box["y"] + box["height"] <= PHONE[1]

    page.get_by_role("button", name="Conversation settings").tap()
    fits("#tc-settings-dialog")
    page.locator("#tc-settings-dialog [data-act=cancel]").tap()
    page.get_by_label("More for this conversation").tap()
    fits("#tc-menu")
    page.locator('#tc-menu [data-act="ask_rename"]').tap()
    page.locator("#tc-rename-dialog input").fill("On the phone")
    page.locator("#tc-rename-dialog .tc-primary").tap()
    expect(page.locator(".tc-top h1")).to_have_text("On the phone")
    page.locator(".tc-meter").tap()
    fits("#tc-meter-note")
    expect(page.locator("#tc-meter-note")).to_contain_text("tokens in context")
    page.keyboard.press("Escape")
    page.get_by_label("Show or hide conversations").tap()
    page.get_by_role("button", name="Import and export").tap()
    fits("#tc-data-dialog")
    page.locator("#tc-data-dialog [data-act=cancel]").tap()
    page.locator('.tc-row.tc-active [data-act="ask_menu"]').tap()
    page.locator('#tc-menu [data-act="archive_chat"]').tap()
    expect(page.locator(".tc-archive .tc-active")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    assert phone.problems == []
    phone.close()

"""What the page is made of: footers, list, pages. Nothing that a person or a model wrote becomes markup."""

import re
from dataclasses import replace
from typing import Any

import pytest

from app.ui import pages, shell
from app.ui.footer import stats_parts
from app.ui.render import chat_message, notice, undo_toast
from app.ui.sidebar import conversation_list
from db.views import ConversationView, MessageView

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
DAY = 86_400


def message(**changes: Any) -> MessageView:
    base = MessageView(
        id="m1",
        user_id="u",
        conversation_id="c",
        parent_id=None,
        role="assistant",
        content="Hello",
        token_ids=(),
        status="complete",
        finish_reason="stop",
        error=None,
        stats={},
        model="m",
        created_at=0,
        updated_at=0,
        sibling_index=0,
        sibling_count=1,
    )
    return replace(base, **changes)


def conversation(**changes: Any) -> ConversationView:
    base = ConversationView("c1", "u", "Title", "", {}, None, 0, 0, None)
    return replace(base, **changes)


def footer(view: MessageView) -> str:
    return str(chat_message(view)["content"][-1]["value"])


def test_status_line() -> None:
    stats = {
        "completion_tokens": 1234,
        "tokens_per_second": 41.26,
        "cached_tokens": 0,
        "kept_fraction": 0.516,
    }
    assert stats_parts(stats) == ["1,234 tokens", "41.3 tokens/s", "0 cached", "KV kept: 52%"]


@pytest.mark.parametrize("stats", [{}, {"tokens_per_second": None}, {"kept_fraction": None}])
def test_status_line_leaves_out_what_is_unknown(stats: dict[str, Any]) -> None:
    assert stats_parts(stats) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": "stopped"}, "Stopped"),
        ({"status": "interrupted"}, "Interrupted"),
        ({"status": "error", "error": "The engine went away."}, "The engine went away."),
        ({"status": "complete", "finish_reason": "length"}, "length limit"),
    ],
)
def test_an_unfinished_reply_is_marked(changes: dict[str, Any], words: str) -> None:
    assert words in footer(message(**changes))
    assert words not in footer(message())


@pytest.mark.parametrize(
    "error", [None, "The reply was interrupted: the server or its engine was restarted."]
)
def test_an_interruption_is_said_in_one_way(error: str | None) -> None:
    html = footer(message(status="interrupted", error=error))
    assert re.findall(r'class="tc-mark tc-warn">([^<]+)<', html) == ["Interrupted by a restart"]


def test_a_live_reply_cannot_be_regenerated_a_finished_one_can() -> None:
    assert "regenerate_reply" not in footer(message(status="streaming"))
    assert "regenerate_reply" in footer(message())


def test_versions() -> None:
    assert "show_version" not in footer(message())
    first = footer(message(sibling_count=3))
    assert "1/3" in first
    assert re.search(r'aria-label="Previous version" disabled', first)
    assert not re.search(r'aria-label="Next version" disabled', first)
    mine = chat_message(message(role="user", sibling_index=1, sibling_count=2))["content"]
    assert [part["type"] for part in mine] == ["text", "component"]
    assert "2/2" in mine[1]["value"]


def test_an_empty_reply_has_only_its_footer() -> None:
    parts = chat_message(message(content="", status="pending"))["content"]
    assert [part["type"] for part in parts] == ["component"]


@pytest.mark.parametrize(
    "html",
    [
        footer(message(status="error", error=EVIL)),
        conversation_list([conversation(title=EVIL, id=EVIL)], EVIL),
        conversation_list([], "", EVIL),
        conversation_list([], EVIL, archived=[conversation(title=EVIL, id=EVIL, archived_at=1)]),
        notice(EVIL),
        undo_toast(conversation(title=EVIL)),
        shell.account_row(EVIL, is_admin=True),
        shell.top_bar(EVIL, EVIL),
        str(chat_message(message(content=f"<think>{EVIL}"))["content"][0]["value"]),
        shell.engine_banner("failed", EVIL),
        pages.login_page(EVIL, name=EVIL).partition("<form")[2],
        pages.setup_page(EVIL, name=EVIL, key=EVIL).partition("<form")[2],
        pages.invite_page(EVIL, EVIL, name=EVIL).partition("<form")[2],
        pages.reset_page(EVIL, EVIL).partition("<form")[2],
        pages.spent_page(EVIL).partition("<form")[2],
    ],
)
def test_nothing_written_becomes_markup(html: str) -> None:
    assert "<script" not in html
    assert "<img" not in html
    assert "alert(1)" in html


def test_list_groups_and_marks() -> None:
    now = 100 * DAY
    ages = {"a": 0.5, "b": 3, "c": 20, "d": 90}
    items = [
        conversation(id=key, title=key, updated_at=int((now - age * DAY) * 1000)) for key, age in ages.items()
    ]
    html = conversation_list(items, "c", now=now)
    assert re.findall(r'tc-age">([^<]+)<', html) == ["Last 24 hours", "Last 7 days", "Last 30 days", "Older"]
    assert re.findall(r'aria-current="page">(\w)<', html) == ["c"]


def test_no_banner_while_the_engine_answers() -> None:
    assert shell.engine_banner("ready", "") == ""
    for state in ("starting", "restarting", "draining", "stopped", "failed"):
        assert 'role="status"' in shell.engine_banner(state, "loading weights")


def test_the_banner_promises_no_more_than_a_drain_does() -> None:
    text = shell.engine_banner("draining", "")
    assert "get a few seconds to finish; their text is kept" in text
    assert "will finish" not in text


def test_setup_asks_for_the_key_only_when_needed() -> None:
    assert '<label for="key"' in pages.setup_page()
    assert '<label for="key"' not in pages.setup_page(key="from the link")
    assert '<input type="hidden" name="key" value="from the link">' in pages.setup_page(key="from the link")
    assert 'minlength="8"' in pages.setup_page()


@pytest.mark.parametrize(
    "page",
    [
        pages.login_page("no"),
        pages.setup_page("no"),
        pages.invite_page("token", "no"),
        pages.reset_page("token", "no"),
        pages.spent_page("no"),
    ],
)
def test_pages_fetch_nothing_and_label_everything(page: str) -> None:
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "@import" not in page
    assert "url(" not in page
    for name in re.findall(r'<input id="(\w+)"', page):
        assert f'<label for="{name}"' in page
    assert 'role="alert"' in page

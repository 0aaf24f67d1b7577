"""What stands under messages, the context meter, and the parting of thoughts from answers."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.context import ContextMeter
from app.events import Event
from app.ui.footer import reply_footer
from app.ui.meter import meter
from app.ui.progress import Progress
from app.ui.reasoning import part, thoughts_html
from app.ui.render import chat_messages
from app.ui.sidebar import conversation_list
from tests.ui.test_render import conversation, message


@pytest.mark.parametrize(
    ("text", "thoughts", "answer", "thinking"),
    [
        ("Plain.", "", "Plain.", False),
        ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes.", False),
        ("Hm.\n</think>\n\nYes.", "Hm.", "Yes.", False),  # the template wrote the opening tag
        ("<think>Hm", "Hm", "", True),
        ("<thi", "", "", True),
        ("", "", "", False),
        ("Use `<think>` and `</think>`.", "", "Use `<think>` and `</think>`.", False),
        ("Write `</think>` to end.", "", "Write `</think>` to end.", False),
        ("<think></think>Yes.", "", "Yes.", False),
    ],
)
def test_thoughts_are_parted(text: str, thoughts: str, answer: str, thinking: bool) -> None:
    parted = part(text)
    assert (parted.thoughts, parted.answer, parted.thinking) == (thoughts, answer, thinking)


@given(st.text(alphabet=st.sampled_from("<>/think ab\n{$"), max_size=60))
def test_thoughts_show_as_written_and_are_never_markup(text: str) -> None:
    html = thoughts_html(part(f"<think>{text}"), live=False)
    if html:
        body = html.partition("<div>")[2].removesuffix("</div></details>")
        assert not set(body) & set("<>{$")
        assert unescape(body) == part(f"<think>{text}").thoughts


def test_what_is_still_thought_is_open_and_folds_when_it_ends() -> None:
    assert '<details class="tc-thoughts" open>' in thoughts_html(part("<think>Hm"), live=True)
    assert " open" not in thoughts_html(part("<think>Hm</think>"), live=True)
    assert " open" not in thoughts_html(part("<think>Hm"), live=False)


@pytest.mark.parametrize(
    ("position", "words"),
    [(None, "Waiting for the engine"), (1, "Next in the queue"), (7, "Number 7 in the queue")],
)
def test_the_place_in_the_queue_is_told(position: int | None, words: str) -> None:
    assert words in reply_footer(message(status="pending"), position=position)
    assert words not in reply_footer(message(status="streaming"), position=position)


def test_the_place_comes_with_the_events() -> None:
    waiting = Progress().after(Event("queued", "", "pending", 0, position=3))
    assert waiting.position == 3
    assert waiting.after(Event("queued", "", "pending", 0, position=2)).position == 2
    assert waiting.after(Event("delta", "a", "streaming", 1)).position is None


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ({"status": "stopped"}, True),
        ({"status": "interrupted"}, True),
        ({"status": "complete", "finish_reason": "length"}, True),
        ({"status": "complete", "finish_reason": "stop"}, False),
        ({"status": "streaming"}, False),
    ],
)
def test_only_the_last_reply_that_was_cut_short_can_go_on(changes: dict[str, Any], offered: bool) -> None:
    assert ("continue_reply" in reply_footer(message(**changes))) is offered
    assert "continue_reply" not in reply_footer(message(**changes), last=False)
    path = [message(**changes), message(id="m2", role="user", parent_id="m1")]
    assert "continue_reply" not in str(chat_messages(path))


def test_ratings_are_shown() -> None:
    for rating, pressed in ((None, []), (1, ["1"]), (-1, ["-1"])):
        html = reply_footer(message(rating=rating))
        assert re.findall(r'data-rating="(-?1)" aria-pressed="true"', html) == pressed
    assert "data-rating" not in reply_footer(message(content="", status="error"))


def test_turns_that_left_the_context_are_told() -> None:
    html = reply_footer(message(stats={"left_out": 4, "cut": True}))
    assert "The 4 oldest messages" in html
    assert "oldest messages" not in reply_footer(message(stats={"left_out": 4}))


def test_the_meter() -> None:
    assert meter(None) == meter(ContextMeter(0, 100, None, None, 0, None)) == ""
    assert meter(ContextMeter(5, 0, None, None, 0, None)) == ""
    html = meter(ContextMeter(2048, 8192, 0.5, 1024, 0, None))
    assert "2,048 of 8,192 tokens" in html
    assert "1,024 of them kept after compression (50%)" in html
    assert "no longer shown" not in html
    assert "<span>25%</span>" in html
    assert "tc-warn" in meter(ContextMeter(8000, 8192, None, None, 1, "m"))
    assert "The oldest 1 message is no longer shown" in meter(ContextMeter(8000, 8192, None, None, 1, "m"))
    assert "&lt;1%" in meter(ContextMeter(1, 8192, None, None, 0, None))


def test_the_archive_is_folded_unless_something_in_it_is_wanted() -> None:
    put_away = [conversation(id="a", title="Old", archived_at=1)]
    assert '<details class="tc-archive">' in conversation_list([], "", archived=put_away)
    assert "tc-archive" not in conversation_list([], "")
    for html in (
        conversation_list([], "a", archived=put_away),
        conversation_list([], "", "ol", archived=put_away),
    ):
        assert '<details class="tc-archive" open>' in html
    assert "Nothing found" not in conversation_list([], "", "ol", archived=put_away)
    assert "Search finds the older ones" in conversation_list(put_away, "", more=True)

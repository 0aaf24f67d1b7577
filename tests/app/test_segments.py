"""Messages without ids get them once, and the prompt is what it would be without that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.segments import Segments
from app.templating import Templating
from app.tokenizer import load_model_text
from db.views import MessageView


def thread(count: int, model: str | None = None) -> list[MessageView]:
    path: list[MessageView] = []
    for place in range(count):
        path.append(
            MessageView(
                id=f"m{place}",
                user_id="u",
                conversation_id="c",
                parent_id=f"m{place - 1}" if place else None,
                role="assistant" if place % 2 else "user",
                content=f"Words, number {place}.",
                token_ids=(),
                status="complete",
                finish_reason=None,
                error=None,
                stats={},
                model=model if place % 2 else None,
                created_at=0,
                updated_at=place,
                sibling_index=0,
                sibling_count=1,
            )
        )
    return path


@pytest.fixture(scope="module")
def templating(bundled_model_dir: Path) -> Templating:
    return Templating("mine", load_model_text(str(bundled_model_dir)))


@pytest.mark.parametrize("model", [None, "another"])
def test_a_filled_path_makes_the_same_prompt(templating: Templating, model: str | None) -> None:
    path = thread(9, model)
    path[3] = replace(path[3], content="", status="error")  # its question goes with the next one
    segments = Segments()
    for prompt in ("", "Be brief."):
        filled = segments.filled(templating, path, prompt)
        assert all(message.token_ids for message in filled if message.content)
        assert templating.prompt(filled, prompt) == templating.prompt(path, prompt)


def test_each_segment_is_made_once(templating: Templating, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    segment = templating.segment

    def counted(path: Any, *rest: Any) -> list[int]:
        if not path[-1].token_ids:
            made.append(path[-1].id)
        return segment(path, *rest)

    monkeypatch.setattr(templating, "segment", counted)
    segments, path = Segments(), thread(6)
    for _ in range(3):
        segments.filled(templating, path, "")
    assert made == [message.id for message in path]
    path[2] = replace(path[2], updated_at=99)  # it and what follows it: a reply may have become longer
    segments.filled(templating, path, "")
    assert made[6:] == ["m2", "m3"]


def test_it_forgets_what_is_too_much(templating: Templating) -> None:
    segments = Segments(max_tokens=30)
    segments.filled(templating, thread(40), "")
    assert sum(map(len, segments._kept.values())) == segments._tokens <= 30

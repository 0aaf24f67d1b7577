"""What the model is shown of a conversation, and what the user is told about it.

A conversation that no longer fits the model's context loses its oldest turns, never its system prompt. So
many leave at once that half the context is free again: a prompt that begins elsewhere shares nothing with
what the engine holds, so the start must not move at every turn. Where it lies is kept in the reply's stats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.errors import ContextTooLong
from app.templating import Templating, shown_starts, split_unanswered
from db.views import MessageView
from tangram.geometry import Geometry

LEFT_OUT, STARTS_AT, CUT = "left_out", "starts_at", "cut"


@dataclass(frozen=True, slots=True)
class ContextMeter:
    """How full the context of a branch is.

    tokens: what the next turn builds on. limit: what the model reads at most, 0 when not known yet.
    kept_fraction: mean over heads of the share of these tokens that a head still sees.
    kept_tokens: the same in tokens. Both None while no engine tells its geometry.
    left_out: how many of the oldest messages the model is not shown any more.
    starts_at: the id of the first one that it is shown, None for all.
    """

    tokens: int
    limit: int
    kept_fraction: float | None
    kept_tokens: int | None
    left_out: int
    starts_at: str | None


@dataclass(frozen=True, slots=True)
class Window:
    """A prompt that fits, and which messages it begins with.

    left_out: messages before its start. cut: it starts later than the branch's last reply did.
    """

    prompt: list[int]
    left_out: int = 0
    starts_at: str | None = None
    cut: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """What to keep in the reply's stats; empty when nothing was left out."""
        if not self.left_out:
            return {}
        return {LEFT_OUT: self.left_out, STARTS_AT: self.starts_at} | ({CUT: True} if self.cut else {})


@dataclass(frozen=True, slots=True)
class Branch:
    """Messages from the root to the one to answer or to continue.

    sibling: another reply to the last message, whose start of the prompt counts too.
    """

    path: Sequence[MessageView]
    system_prompt: str
    sibling: MessageView | None = None


def fit(templating: Templating, branch: Branch, limit: int, room: int) -> Window:
    """The prompt of a branch, without its oldest turns where the whole would not leave `room` for a reply.

    limit: tokens that the model reads at most; 0: not known, all fits.
    Raises ContextTooLong when the last turn alone does not fit.
    """
    system_prompt = branch.system_prompt
    path = templating.segments.filled(templating, branch.path, system_prompt)
    branch = replace(branch, path=path)
    most = limit - min(room, limit // 4)
    prompt = templating.prompt(path, system_prompt)
    if not limit or len(prompt) <= most:
        return Window(prompt)
    starts = shown_starts(path)
    earlier = _earlier_start(branch, starts)
    if earlier:
        prompt = templating.prompt(path, system_prompt, earlier)
        if len(prompt) <= most:
            same = branch.sibling or path[-1]  # the reply that this one goes on with, or stands beside
            return _window(prompt, path, earlier, cut=same.role == "assistant" and bool(same.stats.get(CUT)))
    fits: Window | None = None  # the longest prompt that fits at all
    for start in starts:
        if start <= earlier or (start != starts[-1] and stored_tokens(path[start + 1 :]) > most):
            continue
        prompt = templating.prompt(path, system_prompt, start)
        if len(prompt) <= limit // 2:
            return _window(prompt, path, start, cut=True)
        if fits is None and len(prompt) <= most:
            fits = _window(prompt, path, start, cut=True)
    if fits is not None:  # more than half of the context is the last turn's
        return fits
    if len(prompt) >= limit:
        alone = len(templating.first_segment(system_prompt, ("",))) if system_prompt else 0
        if alone >= limit:
            raise ContextTooLong(alone + 1, limit, what="system prompt")
        raise ContextTooLong(len(prompt) + 1, limit, what="message")
    return _window(prompt, path, starts[-1], cut=starts[-1] > earlier)


def meter(
    templating: Templating, branch: Branch, limit: int, geometry: Geometry | None, *, unsaved: int = 0
) -> ContextMeter:
    """How full the context is after the last message of a branch.

    unsaved: tokens of a running reply, the branch's last message, that its stored ids do not hold yet.
    """
    path = templating.segments.filled(templating, branch.path, branch.system_prompt)
    branch = replace(branch, path=path)
    starts = shown_starts(path)
    start = _earlier_start(branch, starts)
    tokens = (len(templating.prompt(path, branch.system_prompt, start)) if path else 0) + unsaved
    window = _window([], path, start, cut=False)
    return measured(tokens, limit, geometry, window.left_out, window.starts_at)


def measured(
    tokens: int, limit: int, geometry: Geometry | None, left_out: int = 0, starts_at: str | None = None
) -> ContextMeter:
    """The meter of so many tokens. Arguments as the fields of `ContextMeter`."""
    kept = round(geometry.kept_fraction(tokens), 4) if geometry is not None else None
    return ContextMeter(
        tokens=tokens,
        limit=limit,
        kept_fraction=kept,
        kept_tokens=round(tokens * kept) if kept is not None else None,
        left_out=left_out,
        starts_at=starts_at,
    )


def notice(message: MessageView) -> str | None:
    """The sentence under a reply for which turns newly left the context; None where none did."""
    count = message.stats.get(LEFT_OUT)
    if not message.stats.get(CUT) or not isinstance(count, int):
        return None
    return (
        f"The {count} oldest messages do not fit the model's context any more: from here on the model does "
        "not see them. They are kept in the conversation."
    )


def can_continue(message: MessageView) -> bool:
    """Whether a reply ended before the model had finished it, so that it can go on."""
    if message.role != "assistant":
        return False
    if message.status == "complete":
        return message.finish_reason == "length"
    return message.is_final


def stored_tokens(path: Sequence[MessageView]) -> int:
    """Tokens of messages as they were stored."""
    return sum(len(message.token_ids) for message in path)


def _earlier_start(branch: Branch, starts: Sequence[int]) -> int:
    """Where the prompt of the branch's latest reply began; 0: at the root."""
    latest = branch.sibling or next(
        (message for message in reversed(branch.path) if message.role == "assistant" and message.stats), None
    )
    named = latest.stats.get(STARTS_AT) if latest is not None else None
    return next((start for start in starts if named and branch.path[start].id == named), 0)


def _window(prompt: list[int], path: Sequence[MessageView], start: int, *, cut: bool) -> Window:
    left_out = len(split_unanswered(path[:start])[1])  # questions without an answer go with the next one
    return Window(prompt, left_out, path[start].id, cut) if left_out else Window(prompt)

"""Parting what a model thought from what it answered."""

from dataclasses import dataclass
from html import escape

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Parted:
    """A reply's two parts. `thinking`: the thoughts have not ended yet, so there is no answer."""

    thoughts: str
    answer: str
    thinking: bool = False


def part(text: str) -> Parted:
    """Thoughts stand at the start, between tags; templates that open them leave only the closing tag."""
    start = text.lstrip()
    if start.startswith(_OPEN):
        thoughts, closed, answer = start[len(_OPEN) :].partition(_CLOSE)
        return Parted(thoughts.strip(), answer.lstrip(), not closed)
    # Half of the opening tag has arrived.
    if start and _OPEN.startswith(start):
        return Parted("", "", True)
    thoughts, closed, answer = text.partition(_CLOSE)
    if closed and _OPEN not in thoughts and "`" not in thoughts.rpartition("\n")[2]:
        return Parted(thoughts.strip(), answer.lstrip())
    return Parted("", text)


def thoughts_html(parted: Parted, live: bool) -> str:
    """The thoughts, to be unfolded; empty without any. They show as they were written, not as Markdown."""
    if not parted.thoughts:
        return ""
    thinking = parted.thinking and live
    # The page's template language must find nothing in it either.
    body = escape(parted.thoughts, quote=True).replace("{", "&#123;").replace("$", "&#36;")
    return (
        f'<details class="tc-thoughts"{" open" if thinking else ""}>'
        f"<summary>{'Thinking' if thinking else 'Thoughts'}</summary><div>{body}</div></details>"
    )

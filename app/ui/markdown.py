"""Making untrusted text safe to show as Markdown.

Model output and user messages reach the browser as Markdown and are sanitised there. These functions are the
layer before that: no raw HTML, no image that the browser would fetch, no diagram that runs code. Code spans
and fenced code are left alone: Markdown itself shows them literally, and copying code must give the code.
"""

import re
from collections.abc import Callable, Iterator

# Zero-width space: breaks a construct without a visible change. Used where the text comes back (editing).
_BREAK = "\u200b"

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([^\n]*)$")
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_IMAGE = re.compile(r"!(?=\[)")
_TICKS = re.compile(r"`+")
_HEADING = re.compile(r"^( {0,3})(?=#{1,6}(?:\s|$))")


def _segments(text: str) -> Iterator[tuple[bool, str]]:
    """Yield ``(is_fenced_code, lines)`` pieces that concatenate to ``text``."""
    prose: list[str] = []
    code: list[str] = []
    fence = ""
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line.rstrip("\r\n"))
        if fence:
            code.append(line)
            if found and found[1].startswith(fence) and not found[2].strip():
                yield True, "".join(code)
                code, fence = [], ""
        elif found and not (found[1][0] == "`" and "`" in found[2]):
            if prose:
                yield False, "".join(prose)
                prose = []
            fence = found[1]
            code.append(line)
        else:
            prose.append(line)
    if code:
        yield True, "".join(code)
    if prose:
        yield False, "".join(prose)


def _outside_code_spans(text: str, change: Callable[[str], str]) -> str:
    """Apply ``change`` to the parts of one prose segment that are not in a code span."""
    out: list[str] = []
    position = 0
    while opening := _TICKS.search(text, position):
        out.append(change(text[position : opening.start()]))
        closing = next((run for run in _TICKS.finditer(text, opening.end()) if run[0] == opening[0]), None)
        # A code span never crosses a blank line; a lone run of backticks is just text.
        if closing is None or "\n\n" in text[opening.end() : closing.start()]:
            out.append(opening[0])
            position = opening.end()
        else:
            out.append(text[opening.start() : closing.end()])
            position = closing.end()
    out.append(change(text[position:]))
    return "".join(out)


def _plain_fence(code: str) -> str:
    """Turn a fence that the renderer would execute as a diagram into plain code."""
    first, newline, rest = code.partition("\n")
    return re.sub(r"mermaid", "text", first, flags=re.IGNORECASE) + newline + rest


def safe_reply(text: str) -> str:
    """Return model output without live HTML, images or diagrams; links stay links.

    An image ``![alt](address)`` becomes the link ``[alt](address)``: nothing is fetched until it is clicked.
    """

    def change(prose: str) -> str:
        return _TAG.sub("&lt;", _IMAGE.sub("", prose))

    return "".join(
        _plain_fence(piece) if fenced else _outside_code_spans(piece, change)
        for fenced, piece in _segments(text)
    )


def safe_message(text: str) -> str:
    """Return a user's message so that it shows as typed; `typed_message` gives the original back.

    The browser's edit box holds the shown text, so what is inserted here is invisible and removable.
    """

    def change(prose: str) -> str:
        return _TAG.sub(f"<{_BREAK}", _IMAGE.sub(f"!{_BREAK}", prose))

    def shown(piece: str) -> str:
        lines = [_HEADING.sub(rf"\1{_BREAK}", line) for line in piece.splitlines(keepends=True)]
        return _outside_code_spans("".join(lines), change)

    def code(piece: str) -> str:
        return f"{_BREAK}{piece}" if "mermaid" in piece.partition("\n")[0].lower() else piece

    pieces = _segments(text.replace(_BREAK, ""))
    return "".join(code(piece) if fenced else shown(piece) for fenced, piece in pieces)


def typed_message(shown: str) -> str:
    """Undo `safe_message` on text that comes back from the edit box."""
    return shown.replace(_BREAK, "")

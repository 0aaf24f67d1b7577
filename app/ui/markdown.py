"""Making untrusted text safe to show as Markdown.

Model output and user messages reach the browser as Markdown and are sanitised there. These functions are the
layer before that: no raw HTML, no image that the browser would fetch, no diagram that runs code. What is code
for certain is left alone: Markdown itself shows it literally, and copying it must give the code. Where that
is in doubt, constructs are broken invisibly, which looks right in both cases.
"""

import re
from collections.abc import Callable, Iterator
from enum import Enum, auto
from html import unescape

# Zero-width space: breaks a construct without a visible change. Used where the text comes back (editing).
_BREAK = "\u200b"

# Markdown ends lines here only, unlike str.splitlines.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
# What may be a fence: at the start, or after the marks of quotes, list items and tasks.
_FENCE = re.compile(r"([ \t>*+\-\d.)\[\]xX]*)(`{3,}|~{3,})(.*)", re.DOTALL)
_CLOSING = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*")
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_IMAGE = re.compile(r"!+(?=\[)")
_TICKS = re.compile(r"`+")
_HEADING = re.compile(r"^( {0,3})(?=#{1,6}(?:\s|$))")
# Before a run of backticks: an escape or a bare address, either of which may swallow it.
_SWALLOWING = re.compile(r"(?:\\|(?:://|www\.)\S*)$", re.IGNORECASE)
# A link whose address or label is not plainly over: backticks in it are not those of code.
_OPEN_LINK = re.compile(r"\](?:\((?![^\s`()<>\\]*\))|\[(?![^\s`\[\]\\]*\]))")
# The row under a table's head. Cells are split before code is looked for.
_TABLE = re.compile(r"^(?=[^\r\n]*-)(?=[^\r\n]*[|:])[ \t>|:*+\-\d.)]+\r?$", re.MULTILINE)


class _Kind(Enum):
    PROSE = auto()
    CODE = auto()
    DOUBT = auto()


def _lines(text: str) -> Iterator[tuple[_Kind, str]]:
    """Yield the lines of ``text``, which they concatenate to: fenced code, prose, or not certainly either.

    A fence that is not at the margin may be in a list item, and then ends with it. Only lines at least as
    far in as the fence are code in any case.
    """
    fence, margin = "", 0
    in_container = lost = False
    for line in _LINE.findall(text):
        body = line.rstrip("\r\n")
        columns = body.expandtabs(4)
        blank = not body.strip(" \t")
        indent = len(columns) - len(columns.lstrip(" "))
        if fence and (blank or indent >= margin):
            closing = _CLOSING.fullmatch(body)
            if closing and closing[1].startswith(fence) and indent <= margin + 3:
                # Further in than a closing fence may be, it closes only if it is in a list item.
                lost = lost or indent > 3
                fence = ""
            yield _Kind.CODE, line
            continue
        if fence:
            fence, lost = "", True
        if in_container and indent == 0 and not blank and not body.startswith(">"):
            in_container = False
        if not (lost or in_container) and (found := _FENCE.fullmatch(body)) and _opens(found):
            if indent <= 3 and not found[1].strip(" \t"):
                fence, margin = found[2], indent
                yield _Kind.CODE, line
                continue
            in_container = True
        yield _Kind.DOUBT if lost or in_container else _Kind.PROSE, line


def _opens(fence: re.Match[str]) -> bool:
    return fence[2][0] == "~" or "`" not in fence[3]


def _spans(line: str, in_table: bool) -> Iterator[tuple[_Kind, str]]:
    """Yield the parts of a line of prose: text, code spans, and from the first unclear place on, doubt."""
    position = 0
    while opening := _TICKS.search(line, position):
        before = line[position : opening.start()]
        closing = next((run for run in _TICKS.finditer(line, opening.end()) if run[0] == opening[0]), None)
        swallowed = _SWALLOWING.search(line[: opening.start()]) or _OPEN_LINK.search(before)
        if closing is None or swallowed or (in_table and "|" in line[opening.end() : closing.start()]):
            yield _Kind.PROSE, before
            yield _Kind.DOUBT, line[opening.start() :]
            return
        yield _Kind.PROSE, before
        yield _Kind.CODE, line[opening.start() : closing.end()]
        position = closing.end()
    yield _Kind.PROSE, line[position:]
    if _OPEN_LINK.search(line, position):
        yield _Kind.DOUBT, ""  # it may go on in the next line


def _rewrite(text: str, prose: Callable[[str], str], diagram: str, start: Callable[[str], str]) -> str:
    """Apply ``prose`` to what is prose, ``start`` to its lines first. Diagrams become ``diagram``."""
    out: list[str] = []
    changes = {_Kind.PROSE: prose, _Kind.CODE: _same, _Kind.DOUBT: _broken}
    in_table = bool(_TABLE.search(text))
    doubt = False  # in this paragraph: code spans can go on in later lines of it
    for kind, line in _lines(text):
        shown = _no_diagram(line, diagram)
        if kind is _Kind.CODE or not line.strip(" \t\r\n"):
            doubt = False
            out.append(shown)
        elif kind is _Kind.DOUBT or doubt:
            out.append(_broken(shown))
        else:
            for part, piece in _spans(start(shown), in_table):
                doubt = doubt or part is _Kind.DOUBT
                out.append(changes[part](piece))
    return "".join(out)


def _same(text: str) -> str:
    return text


def _broken(text: str) -> str:
    """Break tags and images invisibly."""
    return _TAG.sub(f"<{_BREAK}", _IMAGE.sub(rf"\g<0>{_BREAK}", text))


def _no_diagram(line: str, diagram: str) -> str:
    """Turn a fence that the renderer would execute as a diagram into one of plain code."""
    fence = _FENCE.fullmatch(line)
    if fence is None or "mermaid" not in unescape(fence[3]).lower():
        return line
    info = re.sub(r"mermaid", diagram, fence[3], flags=re.IGNORECASE)
    if "mermaid" in unescape(info).lower():  # spelled with character references
        info = info.replace("&", f"&{_BREAK}")
    return fence[1] + fence[2] + info


def safe_reply(text: str) -> str:
    """Return model output without live HTML, images or diagrams; links stay links.

    An image ``![alt](address)`` becomes the link ``[alt](address)``: nothing is fetched until it is clicked.
    """
    return _rewrite(text, lambda prose: _TAG.sub("&lt;", _IMAGE.sub("", prose)), "text", _same)


def safe_message(text: str) -> str:
    """Return a user's message so that it shows as typed; `typed_message` gives the original back.

    The browser's edit box holds the shown text, so what is inserted here is invisible and removable.
    """

    def no_heading(line: str) -> str:
        return _HEADING.sub(rf"\1{_BREAK}", line)

    return _rewrite(text.replace(_BREAK, ""), _broken, rf"mer{_BREAK}maid", no_heading)


def typed_message(shown: str) -> str:
    """Undo `safe_message` on text that comes back from the edit box."""
    return shown.replace(_BREAK, "")

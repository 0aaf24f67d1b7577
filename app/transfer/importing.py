"""Reading a file of conversations, whatever program wrote it: all of it is understood, or none."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.transfer import own
from app.transfer.foreign import Reader
from app.transfer.reading import MAX_CONVERSATIONS, BadImport, Item
from app.transfer.tree import Budget
from db.maintenance import EXPORT_FORMAT
from db.transfer import NewConversation

_EXPECTED = (
    "an export of this program, ShareGPT (“conversations”), OpenAI messages (“messages”) or an export of "
    "ChatGPT (“mapping”)"
)


@dataclass(frozen=True, slots=True)
class Understood:
    """What a file holds. `skipped`: messages that cannot be shown here, such as calls of tools."""

    conversations: tuple[NewConversation, ...]
    skipped: int


def understand(data: bytes) -> Understood:
    """The conversations of a file: JSON, or one JSON object on each line. Raises BadImport."""
    budget = Budget(len(data))
    reader = Reader(budget)
    found: list[NewConversation] = []
    for number, source, is_own in _sources(_parse(data)):
        if number > MAX_CONVERSATIONS:
            raise BadImport(f"The file holds more than {MAX_CONVERSATIONS} conversations.")
        found.append(_read(reader, budget, number, source, is_own))
    if not found:
        raise BadImport("The file holds no conversations.")
    return Understood(tuple(found), reader.skipped)


def _read(reader: Reader, budget: Budget, number: int, source: Any, is_own: bool) -> NewConversation:
    if not isinstance(source, dict):
        raise Item(number).refuse("must be a JSON object")
    item = Item(number, source.get("title"))
    if is_own:
        return own.read(item, source, budget)
    for name, read in (
        ("mapping", reader.chatgpt),
        ("conversations", reader.sharegpt),
        ("messages", reader.messages),
    ):
        if name in source:
            return read(item, source)
    raise item.refuse(f"is not one of: {_EXPECTED}")


def _sources(content: Any) -> Iterator[tuple[int, Any, bool]]:
    """(number, conversation, whether it is in our own format)."""
    is_own = False
    if isinstance(content, dict):
        form = content.get("format")
        if form is not None and form != EXPORT_FORMAT:
            raise BadImport(f"The file's format is {json.dumps(form)[:60]}, not “{EXPORT_FORMAT}”.")
        is_own = form == EXPORT_FORMAT
        if is_own or _holds_conversations(content):
            content = content.get("conversations")
        else:
            content = [content]
    if not isinstance(content, list):
        raise BadImport(f"The file must hold {_EXPECTED}.")
    for number, source in enumerate(content, start=1):
        yield number, source, is_own


def _holds_conversations(content: Mapping[str, Any]) -> bool:
    """Whether “conversations” are whole ones, and not the turns of a single ShareGPT conversation."""
    inner = content.get("conversations")
    return (
        isinstance(inner, list)
        and bool(inner)
        and isinstance(inner[0], dict)
        and any(name in inner[0] for name in ("mapping", "conversations", "messages"))
    )


def _parse(data: bytes) -> Any:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadImport("The file is not UTF-8 text.") from error
    if not text.strip():
        raise BadImport("The file is empty.")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise BadImport("The file is nested too deeply.") from error
    except ValueError as error:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        if len(lines) < 2 or not lines[0][1].lstrip().startswith("{"):
            raise BadImport(f"The file is not JSON: {error}.") from error
        return [_parse_line(number, line) for number, line in lines]


def _parse_line(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadImport(f"Line {number} is not JSON: {error}.") from error

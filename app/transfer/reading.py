"""Looking at untrusted JSON: each look either gives a value of the right kind or says where it went wrong."""

import math
from collections.abc import Mapping
from typing import Any

from app.errors import BadRequest

MAX_FILE = 32 * 1024 * 1024
MAX_CONVERSATIONS = 10_000
MAX_MESSAGES = 20_000
MAX_TITLE_SHOWN = 60
_LATEST = 253_402_300_800_000  # the year 10000, in milliseconds


class BadImport(BadRequest):
    """The file cannot be taken in; the message names the conversation and the message."""

    code = "invalid_import"

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} Nothing was imported.", param="file")


class Item:
    """Where in the file we are: conversation 3 “Title”, message 5."""

    def __init__(self, number: int, title: Any = "") -> None:
        shown = " ".join(title.split())[:MAX_TITLE_SHOWN] if isinstance(title, str) else ""
        self.place = f"Conversation {number}" + (f" “{shown}”" if shown else "")

    def refuse(self, problem: str, message: int | None = None) -> BadImport:
        """The error to raise. `message`: its number, from 1."""
        where = self.place if message is None else f"{self.place}, message {message}"
        return BadImport(f"{where}: {problem}.")

    def text(self, value: Any, name: str, most: int, message: int | None = None) -> str:
        """A string of at most `most` characters; a missing one is empty."""
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.refuse(f"“{name}” must be text", message)
        if len(value) > most:
            raise self.refuse(f"“{name}” is longer than {most} characters", message)
        return value

    def list_of_objects(self, value: Any, name: str, most: int = MAX_MESSAGES) -> list[Mapping[str, Any]]:
        """A list of JSON objects."""
        if not isinstance(value, list):
            raise self.refuse(f"“{name}” must be a list")
        if len(value) > most:
            raise self.refuse(f"“{name}” has more than {most} entries")
        for number, entry in enumerate(value, start=1):
            if not isinstance(entry, dict):
                raise self.refuse("must be a JSON object", number)
        return value


def milliseconds(value: Any, unit: float) -> int | None:
    """A time in milliseconds since 1970, or None for what is none. `unit`: milliseconds in one of `value`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    time = value * unit
    return int(time) if 0 < time < _LATEST else None

"""How the app logs: lines for a terminal, or JSON objects for a collector. No text of anybody's messages.

Log calls of ours name ids and numbers only. What is left is the text of exceptions, which may quote what they
failed on: it is kept for errors whose words are ours or the system's, and dropped for all others.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
import time
import traceback
from types import TracebackType
from typing import Any, Literal

from app.errors import AppError
from app.redaction import redact
from app.request_context import CURRENT
from db.errors import DbError
from tangram.errors import TangramError

ACCESS = logging.getLogger("app.access")
"""One line a request: where, how it ended, how long it took; `extra={"fields": {...}}`."""

_SAID_SAFELY = (AppError, DbError, TangramError, OSError, sqlite3.Error)
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def configure(kind: Literal["text", "json"]) -> None:
    """Set the process's logging up; requests are logged in JSON only, which nobody reads in a terminal."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for chatty in ("httpx", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    ACCESS.setLevel(logging.INFO if kind == "json" else logging.WARNING)


class TextFormatter(logging.Formatter):
    """`LEVEL logger: message`, with the request's id when there is one."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        info = CURRENT.get()
        record.exc_text = None  # made by another formatter, it may say too much
        return redact(super().format(record)) + (f" [request {info.id}]" if info is not None else "")

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        return "\n".join(describe(ei))


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and the request's and the user's id."""

    def format(self, record: logging.LogRecord) -> str:
        info = CURRENT.get()
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        if info is not None:
            entry["request_id"] = info.id
            if info.user_id is not None:
                entry["user_id"] = info.user_id
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            entry |= fields
        if record.exc_info:
            entry["exception"] = [redact(line) for line in describe(record.exc_info)]
        return json.dumps(entry, ensure_ascii=False, default=str)


def describe(exc_info: _ExcInfo) -> list[str]:
    """The lines of a traceback, without source lines, values, and words that may quote a user."""
    kind, error, trace = exc_info
    if kind is None:
        return []
    lines = [
        f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(trace, limit=-30)
    ]
    words = f": {error}" if isinstance(error, _SAID_SAFELY) else ""
    lines.append(f"{kind.__module__}.{kind.__qualname__}{words}")
    cause = error.__cause__ if error is not None else None
    return (
        lines
        if cause is None
        else [*lines, "caused by", *describe((type(cause), cause, cause.__traceback__))]
    )

"""`python -m app conversations`: the conversations whose people allow it, as texts to calibrate on.

JSON objects with a `text`, one a line, on standard output; a text has one person's conversations only. Meant
for `tangram calibrate --data conversations`, which reads them from a pipe. What is printed is private: it
must not go into a log or leave the machine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import TextIO

from app.database import open_database
from app.settings import Settings
from db.store import Store

CHARACTERS = 24_000
"""A text of several short conversations ends after so many: no sample of the usual length needs more."""


def write_texts(settings: Settings, out: TextIO) -> int:
    """Write them to `out`; how many. Raises DbError. Only reads: the product may be running."""

    async def read() -> list[list[str]]:
        if settings.postgres is None and not settings.database_path.exists():
            return []
        database = open_database(settings)
        database.migrate()  # has nothing to do where the product has been started with this version
        try:
            return await Store(database).calibration_texts()
        finally:
            await database.aclose()

    count = 0
    for texts in asyncio.run(read()):
        for text in packed(texts):
            out.write(json.dumps({"text": text}) + "\n")
            count += 1
    return count


def packed(texts: Sequence[str]) -> Iterator[str]:
    """One person's conversations, short ones joined: a few lines alone fill no chunk."""
    joined: list[str] = []
    length = 0
    for text in texts:
        joined.append(text)
        length += len(text)
        if length >= CHARACTERS:
            yield "\n\n".join(joined)
            joined, length = [], 0
    if joined:
        yield "\n\n".join(joined)

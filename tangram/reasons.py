"""Why an engine did not start, carried from the process that found out to the one that the user watches.

vLLM's engine runs in processes of its own. When one of them refuses to start, its stack lies somewhere in the
log, and what the API server prints last is that something failed elsewhere. So whoever refuses also writes
the sentence to a file that the API server's process named, and that process prints it as its last words.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tangram.errors import TangramError

VARIABLE = "TANGRAM_REASON_FILE"


@contextmanager
def told() -> Iterator[None]:
    """Errors of ours that pass through here are also written where the API server's process looks."""
    try:
        yield
    except TangramError as error:
        if name := os.environ.get(VARIABLE):
            Path(name).write_text(str(error), encoding="utf-8")
        raise


def reason(path: Path) -> str:
    """What was written there, "" when nothing was."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""

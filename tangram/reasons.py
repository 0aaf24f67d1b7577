"""Why an engine did not start, carried from the process that found out to the one that the user watches.

vLLM's engine runs in processes of its own. When one of them does not start, its stack lies somewhere in the
log, and what the API server prints last is that something failed elsewhere. So whoever refuses also writes
the sentence to a file that the API server's process named, and that process prints it as its last words. What
vLLM itself refuses there is overheard: it logs the exception before the process ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tangram.errors import TangramError

VARIABLE = "TANGRAM_REASON_FILE"
STARTERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
"""vLLM's loggers that tell of a process that "failed to start": the engine's, and its workers'."""
TOO_SMALL = ("KV cache memory", "memory for the cache blocks")
"""What vLLM's sentences about a cache that is too small have in common."""

MOMENTARY = ("is less than desired", "is less than requested memory")
"""What vLLM says while others, perhaps the engine before, still hold the memory: another try may do."""
FAILED = "vLLM failed"
"""How a reason begins that is no refusal: the same may work the next time."""


@contextmanager
def told() -> Iterator[None]:
    """Errors of ours that pass through here are also written where the API server's process looks."""
    try:
        yield
    except TangramError as error:
        _write(str(error), "w")
        raise


def reason(path: Path) -> str:
    """What was written there, "" when nothing was."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def listen() -> None:
    """Have what keeps vLLM's own processes from starting written there too. The first reason stays: those who
    wait for the process that failed then fail as well, and know less. Safe to call again."""
    for name in STARTERS:
        # No handler: each time vLLM configures its logging, it takes the handlers of these loggers away.
        logging.getLogger(name).addFilter(_overhear)


def _overhear(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and "failed to start" in record.getMessage():
        _write(why(error), "x")
    return True


def _write(text: str, mode: str) -> None:
    if name := os.environ.get(VARIABLE):
        try:
            with Path(name).open(mode, encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            pass  # somebody knew before


def why(error: BaseException) -> str:
    """One line for the user about an exception: ours as it is, vLLM's with who it was that refused."""
    if isinstance(error, TangramError):
        return str(error)
    said = plain(error)
    momentary = any(words in said for words in MOMENTARY)
    if momentary or not isinstance(error, ValueError | NotImplementedError):
        return f"{FAILED}: {type(error).__name__}: {said}"
    if any(words in said for words in TOO_SMALL):
        said += (
            " Instead: raise --kv-cache-memory-bytes (on a GPU also --gpu-memory-utilization), or "
            "lower --max-model-len."
        )
    return f"vLLM refuses this: {said}"


def plain(error: BaseException) -> str:
    """What an exception says, in one line. Of pydantic's (vLLM checks its configuration with it) the first
    complaint, without the value that was complained about."""
    text = str(error)
    if callable(complaints := getattr(error, "errors", None)) and (found := _first(complaints())):
        text = found
    return " ".join(text.split()) or type(error).__name__


def _first(complaints: Any) -> str:
    for complaint in complaints:
        said = str(complaint.get("msg", ""))
        if said.startswith("Value error, "):
            return said.removeprefix("Value error, ")
        where = ".".join(str(part) for part in complaint.get("loc", ()))
        return f"{where}: {said}" if where else said
    return ""

"""The engine's output: kept in a bounded, redacted log file, and watched for what the engine is doing."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from app.redaction import redact

_MAX_BYTES = 8 * 1024 * 1024
_MAX_LINE = 4000
_TAIL = 1000

_PHASES = (
    (re.compile(r"Initializing a V1 LLM engine"), "starting its core"),
    (re.compile(r"(?i)starting to load model|loading safetensors|loading weights"), "loading the model"),
    (re.compile(r"(?i)KV cache size"), "sizing the cache"),
    (re.compile(r"(?i)capturing CUDA graph|warming up|warmup|compiling a graph"), "warming up"),
    (re.compile(r"(?i)starting vllm|uvicorn running|application startup"), "opening its port"),
)
_FAILURE = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Interrupt)\b:?[^\n]*|\b(?:error|fatal):[^\n]*")
_CONSEQUENCE = "See root cause above"


class EngineLog:
    """One log for all lives of the engine. `on_phase` is called when a line tells of a new phase."""

    def __init__(self, path: Path, on_phase: Callable[[str], None]) -> None:
        self._path = path
        self._on_phase = on_phase
        self._file: IO[str] | None = None
        self._size = 0
        self._tail: deque[str] = deque(maxlen=_TAIL)

    async def pump(self, stream: asyncio.StreamReader) -> None:
        """Copy everything from the engine until it closes its end."""
        rest = b""
        while block := await stream.read(65536):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self.write(line.decode("utf-8", "replace"))
            if len(rest) > _MAX_LINE:
                self.write(rest.decode("utf-8", "replace"))
                rest = b""
        if rest:
            self.write(rest.decode("utf-8", "replace"))

    def write(self, line: str) -> None:
        """Keep one line. A full disk loses log lines, not the engine."""
        line = redact(line.rstrip("\r")[:_MAX_LINE])
        self._tail.append(line)
        for pattern, phase in _PHASES:
            if pattern.search(line):
                self._on_phase(phase)
                break
        try:
            self._rotate_if_full()
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
                self._size = self._path.stat().st_size
            self._file.write(line + "\n")
            self._file.flush()
            self._size += len(line) + 1
        except OSError:
            self.close()

    def tail(self, lines: int = 100) -> list[str]:
        """The last lines, oldest first."""
        return list(self._tail)[-lines:]

    def failure(self) -> str:
        """Why the engine died: the last error it printed that is no mere consequence, or its last line."""
        for line in reversed(self._tail):
            if (found := _FAILURE.search(line)) and _CONSEQUENCE not in line:
                return found[0].strip()[:500]
        return next((line.strip()[:500] for line in reversed(self._tail) if line.strip()), "")

    def mark(self, text: str) -> None:
        """Begin a new life of the engine: forget the old lines, note the new start in the file."""
        self._tail.clear()
        self.write(f"==== {text}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rotate_if_full(self) -> None:
        if self._size < _MAX_BYTES:
            return
        self.close()
        self._path.replace(self._path.with_suffix(".log.1"))
        self._size = 0

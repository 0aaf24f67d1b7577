"""How `tangram-chat` commands reach the running app: a Unix socket that only the app's own user can open.

One JSON line each way: {"command", "arguments"}, then {"result"} or {"error"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from app.errors import AppError
from app.operator_commands import sentence
from db.errors import DbError

log = logging.getLogger(__name__)

SOCKET = "control.sock"
_MOST_BYTES = 64 * 1024


class Runs(Protocol):
    """What carries commands out."""

    async def run(self, command: str, arguments: Mapping[str, Any]) -> Any: ...


class NotRunning(Exception):
    """No app listens there."""


class Refused(Exception):
    """The app says in words why not."""


class ControlServer:
    """Listens in `folder` from `start` to `stop`."""

    def __init__(self, folder: Path, operator: Runs) -> None:
        self._folder = folder
        self._operator = operator
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. A socket that a killed app left behind is replaced."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        (self._folder / SOCKET).unlink(missing_ok=True)
        with _short(self._folder) as address:
            self._server = await asyncio.start_unix_server(self._serve, address, limit=_MOST_BYTES)
        (self._folder / SOCKET).chmod(0o600)

    async def stop(self) -> None:
        """Listen no more; a command that is being carried out is finished."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            (self._folder / SOCKET).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(await reader.readline())
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError) as error:
            log.warning("a command was not answered: %s", type(error).__name__)
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            asked = json.loads(line)
            log.info("command: %s", asked["command"])
            return {"result": await self._operator.run(asked["command"], asked["arguments"])}
        except (AppError, DbError) as error:
            return {"error": sentence(error)}
        except (ValueError, KeyError, TypeError):
            return {"error": "The app that runs does not understand this. Is it of another version?"}
        except Exception:
            log.exception("a command failed")
            return {"error": "The command failed. The app's log has the details."}


def ask(folder: Path, command: str, arguments: Mapping[str, Any]) -> Any:
    """Have the running app carry a command out. Raises NotRunning, Refused."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            with _short(folder) as address:
                connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotRunning from error
        except OSError as error:
            raise Refused(f"cannot reach the app at {folder / SOCKET}: {error.strerror or error}") from error
        request = {"command": command, "arguments": dict(arguments)}
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as answers:
            line = answers.readline()
    if not line:
        raise Refused("the app ended before it answered")
    answer = json.loads(line)
    if "error" in answer:
        raise Refused(str(answer["error"]))
    return answer["result"]


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """The socket's address through an open folder: it has 107 bytes at most, and a path may have more."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)

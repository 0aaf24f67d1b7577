"""A way for the API server to look into the scheduler and the worker, which live in other processes.

vLLM's own calls reach workers only, between steps. So the scheduler answers on a Unix socket inside a
directory that only this user can enter: one JSON object a line in, one out. So does the worker, on another.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tangram.errors import ConfigError, EngineUnavailable

Handler = Callable[[dict[str, Any]], dict[str, Any]]
TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.1
"""How long closing may take at most."""
PROBE_SECONDS = 0.2
"""How long a socket that was found may take to let us in; one whose queue is full is somebody's."""
WORKER = "-worker"
LONGEST = 107
"""Bytes of a Unix socket's path, by the size of the kernel's ``sun_path``."""
SHORT_FOLDER = "/tmp"  # noqa: S108 - the folder inside it is this user's only, which is checked


def socket_path(instance: str) -> Path:
    """Where the scheduler of that vLLM instance id answers: in the folder for temporary files, or in /tmp
    where that one's name is too long for a socket's path."""
    inside = Path(f"tangram-{os.getuid()}") / f"{instance}.sock"
    # The scheduler's socket and the first worker's are judged by the longer one.
    longer = tempfile.gettempdir() / inside.with_stem(inside.stem.removesuffix(WORKER) + WORKER)
    return (SHORT_FOLDER if len(os.fsencode(longer)) > LONGEST else tempfile.gettempdir()) / inside


def worker_socket(instance: str, rank: int = 0) -> Path:
    """Where its worker of that rank answers."""
    return socket_path(f"{instance}-{rank}{WORKER}" if rank else f"{instance}{WORKER}")


class ControlServer:
    """Answers calls from a thread of its own. Handlers must be quick and must only read, or queue work."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        if len(os.fsencode(path)) > LONGEST:
            raise ConfigError("TMPDIR", f"{path} is too long for a socket, set a shorter directory")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid != os.getuid() or path.parent.is_symlink():
            raise PermissionError(f"{path.parent} belongs to somebody else: remove it or set TMPDIR")
        path.parent.chmod(0o700)
        _remove_dead(path.parent)
        path.unlink(missing_ok=True)

        class Connection(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    self.wfile.write(_answer(handlers, line) + b"\n")

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            request_queue_size = 128  # callers beyond it would be turned away, not made to wait
            block_on_close = False

        # Until it listens it looks dead to others that start now, and they remove what is dead: so it gets
        # its name only then.
        early = path.with_suffix(".new")
        early.unlink(missing_ok=True)
        self._server = Server(str(early), Connection)
        early.rename(path)
        self._path = path
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), name="tangram-control", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering and remove the socket."""
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)
        self._thread.join()


def _remove_dead(directory: Path) -> None:
    """Sockets of engines that were killed stay behind; nobody listens there."""
    for path in directory.glob("*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_SECONDS)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # gone already, too busy to let us in, or somebody's that we cannot judge
                continue


def _answer(handlers: Mapping[str, Handler], line: bytes) -> bytes:
    try:
        call = json.loads(line)
        return json.dumps({"ok": handlers[call["call"]](call)}).encode()
    except Exception as error:  # the caller gets to see it; the scheduler must live on
        return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()


def call(path: Path, name: str, *, timeout: float = TIMEOUT_SECONDS, **arguments: Any) -> dict[str, Any]:
    """Ask the scheduler, or whoever answers there. Blocks until nothing has come for ``timeout`` seconds.

    Raises:
        EngineUnavailable: nobody answers there, or the answer is an error.
    """
    who = "worker" if path.stem.endswith(WORKER) else "scheduler"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            connection.sendall(json.dumps(arguments | {"call": name}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline() or b"{}")
    except (OSError, ValueError) as error:
        raise EngineUnavailable(f"the engine's {who} does not answer: {error}") from None
    if "ok" not in answer:
        raise EngineUnavailable(f"the engine's {who} failed: {answer.get('error', 'no answer')}")
    result: dict[str, Any] = answer["ok"]
    return result

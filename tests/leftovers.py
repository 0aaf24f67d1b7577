"""Nothing that tests start outlives pytest, however that ends.

A test ends what it started; when pytest is killed, no test gets to that. So pytest marks its environment,
which everything started in it inherits, and a process of its own waits for pytest's end and then ends what
bears the mark. Only the standard library is imported: the waiting process starts at once and is small.

    python leftovers.py PID MARK        wait for the parent PID, then end what bears MARK
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_SECONDS = 5.0
"""For those that are asked to end."""
KILLED_SECONDS = 30.0
"""A busy machine may take its time over those that are killed."""


def alive(pid: int) -> bool:
    """Whether it runs; not one that has ended and that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def bearing(mark: str) -> list[int]:
    """Processes with NAME=VALUE in their environment, without this one; none where there is no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def session_of(leader: int) -> list[int]:
    """Processes of the session that `leader` began; it may have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name, which may hold anything: state, parent, group, session.
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


def kill_session(leader: int) -> None:
    """Kill a process that was started in a session of its own, and all that it started since."""
    end = time.monotonic() + KILLED_SECONDS
    while (left := session_of(leader)) and time.monotonic() < end:
        for pid in left:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.02)


def end_all(mark: str) -> None:
    """Ask what bears the mark to end, then make it."""
    for pid in bearing(mark):
        _signal(pid, signal.SIGTERM)
    end = time.monotonic() + GRACE_SECONDS
    while (left := bearing(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in left:
        _signal(pid, signal.SIGKILL)


def watch() -> tuple[subprocess.Popen[bytes], str]:
    """Mark this process's environment and start the one that waits for its end; returns it and the mark."""
    name = f"TANGRAM_TESTS_OF_{os.getpid()}"
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), f"{name}=1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.environ[name] = "1"
    # Engines and workers give themselves titles, which would be written over their marks.
    os.environ["SPT_NOENV"] = "1"
    return watcher, f"{name}=1"


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    while os.getppid() == int(sys.argv[1]):
        time.sleep(0.2)
    end_all(sys.argv[2])

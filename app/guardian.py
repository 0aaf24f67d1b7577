"""Runs one command and makes sure that nothing of it outlives whoever started the guardian.

    python guardian.py GRACE_SECONDS PARENT_PID COMMAND [ARGUMENT ...]

The command gets its own process group. On SIGTERM, on SIGINT, and when the guardian's parent dies in any way
(the kernel then sends SIGTERM), the group gets SIGTERM, and SIGKILL after the grace time. When the command
ends, what is left of its group is killed and the guardian exits with the command's code (128 + signal if it
was killed). Nothing of ours is imported: it starts in milliseconds and holds almost no memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import types

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel send us SIGTERM when our parent ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main(arguments: list[str]) -> int:
    grace, parent, command = float(arguments[0]), int(arguments[1]), arguments[2:]
    stopping = False
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: types.FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        if child is not None:
            kill_group(child.pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    die_with_parent()
    if os.getppid() != parent:  # it ended before we asked
        return 128 + signal.SIGTERM
    try:
        child = subprocess.Popen(
            command, process_group=0, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
        )
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error}\n")
        return 127
    if stopping:
        kill_group(child.pid, signal.SIGTERM)
    while True:
        try:
            code = child.wait(timeout=0.2 if not stopping else grace)
            break
        except subprocess.TimeoutExpired:
            if stopping:
                kill_group(child.pid, signal.SIGKILL)
    kill_group(child.pid, signal.SIGKILL)  # helpers that the command left behind
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

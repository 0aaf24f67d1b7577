"""Conversations whose people let them be used to calibrate, as the product hands them out.

The product knows who allowed it and how they are stored, so it is asked: its command writes them to a pipe.
No file is made, and no text of them is printed or kept.
"""

from __future__ import annotations

import subprocess
import sys

from tangram.errors import ConfigError

COMMAND = (sys.executable, "-m", "app", "conversations")


def conversation_lines() -> list[str]:
    """JSON objects with a ``text``, one a line.

    Raises:
        ConfigError: the product is not installed here, cannot read its database, or nobody allowed it.
    """
    done = subprocess.run(COMMAND, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it gave no reason"]
        raise ConfigError("data", f"the conversations cannot be read: {said[-1]}")
    lines = [line for line in done.stdout.decode("utf-8").splitlines() if line.strip()]
    if not lines:
        raise ConfigError(
            "data",
            "nobody has allowed their conversations to be used, or those who did have none: people allow it "
            "by PUT /api/calibration-consent; or use --data builtin",
        )
    return lines

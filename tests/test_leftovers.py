"""What tests start ends with pytest, also when that is killed; a session is killed with all that is in it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.leftovers import alive, bearing, kill_session, session_of
from tests.tree import ROOT

STARTS = """
import subprocess, sys, time

def test_it():
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(left.pid, file=open({pids!r}, "w"), flush=True)
    {then}
"""


def wait(check: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.02)


def nested(folder: Path, then: str, *options: str) -> tuple[subprocess.Popen[bytes], Path]:
    """A pytest that runs one test, which starts a process and leaves it; and where its id is written."""
    pids, test = folder / "pids", folder / "test_nested.py"
    test.write_text(STARTS.format(pids=str(pids), then=then))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    process = subprocess.Popen(
        [*command, *options, "--rootdir", str(folder), str(test)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    return process, pids


@pytest.mark.parametrize("options", [[], ["-n", "1", "--dist", "loadfile"]], ids=["alone", "worker"])
def test_a_killed_pytest_leaves_nothing(tmp_path: Path, options: list[str]) -> None:
    process, pids = nested(tmp_path, "time.sleep(600)", *options)
    try:
        wait(lambda: pids.exists() and pids.read_text().endswith("\n"))
        left = int(pids.read_text())
        assert alive(left)
    finally:
        process.kill()
        process.wait()
    wait(lambda: not alive(left) and not bearing(f"TANGRAM_TESTS_OF_{process.pid}=1"))


def test_a_test_that_leaves_something_leaves_it_until_pytest_ends(tmp_path: Path) -> None:
    process, pids = nested(tmp_path, "left.returncode = 0  # forgets it")
    assert process.wait(120) == 0
    assert not alive(int(pids.read_text()))


def test_a_session_is_killed_with_what_left_its_group_and_its_parent() -> None:
    script = "import os, time\nfor _ in range(2):\n    os.fork() or os.setpgid(0, 0)\ntime.sleep(600)"
    leader = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        wait(lambda: len(session_of(leader.pid)) == 4)
        found = session_of(leader.pid)
        leader.kill()
        leader.wait()
        assert len(session_of(leader.pid)) == 3
    finally:
        kill_session(leader.pid)
        leader.wait()
    assert not any(map(alive, found))

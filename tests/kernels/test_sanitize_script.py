"""The script that runs the CUDA kernels under compute-sanitizer, with stand-ins for that and for nvcc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Finds what is planted, unless BLIND; says of the tests what SAID names, and ends with STATUS.
SANITIZER = """#!/bin/bash
case "$*" in
    *pytest*) echo "$SAID"; exit "$STATUS" ;;
    *"kernel_substring=tangram"*planted*) [ -z "$BLIND" ] && exit 9; exit 0 ;;
esac
exit 77
"""
RIGHT = "16 passed in 3 s\n========= ERROR SUMMARY: 0 errors"


@pytest.mark.parametrize(
    ("said", "status", "blind", "verdict"),
    [
        (RIGHT, "0", "", "nothing found"),
        (RIGHT, "0", "yes", "memcheck: did not find the planted fault"),
        (RIGHT.replace("0 errors", "3 errors"), "9", "", "found something or did not run: memcheck"),
        (RIGHT.replace("16 passed", "16 skipped"), "0", "", "found something or did not run: memcheck"),
        ("16 passed in 3 s", "0", "", "found something or did not run: memcheck"),
    ],
)
def test_the_verdict(said: str, status: str, blind: str, verdict: str, tmp_path: Path) -> None:
    for name, text in (("compute-sanitizer", SANITIZER), ("nvcc", "#!/bin/sh\n")):
        tmp_path.joinpath(name).write_text(text, encoding="utf-8")
        tmp_path.joinpath(name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    stand_ins = {"PATH": path, "NVCC": str(tmp_path / "nvcc"), "SAID": said, "STATUS": status, "BLIND": blind}
    done = subprocess.run(
        [sys.executable, "scripts/sanitize_kernels.py", "--tools", "memcheck"],
        cwd=ROOT,
        env={**os.environ, **stand_ins},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert verdict in done.stdout, done.stdout + done.stderr
    assert done.returncode == (verdict != "nothing found")

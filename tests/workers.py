"""How `make test` shares the tests out among pytest-xdist's workers, one file at a time.

Starting engines and browsers is mostly waiting, so two files at once take little more than half the time of
one after the other. What takes longest begins first, so that the workers end together. A run of a few files
stays in one process, as does one without pytest-xdist's options.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

MOST_WORKERS = 4
MEMORY_OF_WORKER = 6 << 30
"""Bytes; two took 12 GiB at most, of which the engines took the larger part because it was free."""
FEW_FILES = 3
"""As many are collected, imported and run by one process in less time than others take to start."""

TOGETHER = ("tests/e2e/",)
"""Folders whose files share what takes long to start, and rely on their order: one worker runs them all."""

FIRST = (
    "tests/e2e/",
    "tests/engine/test_features.py",
    "tests/engine/test_engine.py",
    "tests/engine/",
    "tests/admin/test_browser.py",
    "tests/admin/test_browser_console.py",
    "tests/ui/",
    "tests/kernels/test_kernel_build.py",
    "tests/kernels/test_cuda_build.py",
    "tests/docker/",
    "tests/app/",
)
"""What the queue begins with: what takes minutes, then what waits for engines, browsers and processes."""


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means here; 0 is none beside pytest itself."""
    return workers(len(files_of(config.args, config.invocation_params.dir)), cores(), free_memory())


def workers(files: int, cores: int, memory: int) -> int:
    """How many to start for so many files of tests. memory: bytes that are free."""
    if files <= FEW_FILES:
        return 0
    return max(1, min(cores, MOST_WORKERS, memory // MEMORY_OF_WORKER, files))


def files_of(arguments: Sequence[str], folder: Path) -> set[Path]:
    """The files of tests that the arguments of pytest name, themselves or by their folder."""
    named = [folder / argument.partition("::")[0] for argument in arguments]
    return {file for path in named for file in (path.rglob("test_*.py") if path.is_dir() else [path])}


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def free_memory() -> int:
    """Bytes that can be had without taking them from others."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_setupnodes() -> None:
    """Threads of one worker's computations would only wait for those of another's."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For workers; elsewhere the order stays as it is."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: place(item.nodeid))


def place(nodeid: str) -> int:
    """Where a test's unit stands in the queue."""
    return next((index for index, folder in enumerate(FIRST) if nodeid.startswith(folder)), len(FIRST))


def unit(nodeid: str) -> str:
    """What a worker is given as a whole: a file, or a folder of TOGETHER."""
    folder = next((folder for folder in TOGETHER if nodeid.startswith(folder)), None)
    return folder or nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files one by one, save those that belong together. None: as the command line asks for."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.scheduling import UnitScheduling  # not everybody who runs a few tests has pytest-xdist

    return UnitScheduling(config, log)

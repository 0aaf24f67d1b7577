"""How the tests are shared out among workers: how many there are, in what order, and what stays together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.tree import ROOT
from tests.workers import FEW_FILES, FIRST, MEMORY_OF_WORKER, MOST_WORKERS, files_of, place, unit, workers

SIDE_BY_SIDE = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
ENOUGH = 64 * MEMORY_OF_WORKER
NOTES = """
import os
import pytest

@pytest.mark.parametrize("number", range(4))
def test_notes_where_it_runs(number):
    line = f"{os.environ.get('PYTEST_XDIST_WORKER', 'alone')} {__file__} {os.environ.get('OMP_NUM_THREADS')}"
    with open(os.environ["NOTES"], "a") as notes:
        print(line, file=notes)
    if f"{os.path.basename(__file__)}::{number}" == os.environ.get("DIES_IN"):
        os._exit(1)
"""


@pytest.mark.parametrize(
    ("files", "cores", "memory", "expected"),
    [
        (FEW_FILES, 8, ENOUGH, 0),
        (FEW_FILES + 1, 2, ENOUGH, 2),
        (300, 2, ENOUGH, 2),
        (300, 64, ENOUGH, MOST_WORKERS),
        (300, 1, ENOUGH, 1),
        (300, 4, 3 * MEMORY_OF_WORKER - 1, 2),
        (300, 4, 0, 1),
    ],
)
def test_as_many_workers_as_there_are_cores_and_memory_for(
    files: int, cores: int, memory: int, expected: int
) -> None:
    assert workers(files, cores, memory) == expected


def test_files_are_those_that_the_arguments_name(tmp_path: Path) -> None:
    for name in ("a/test_one.py", "a/b/test_two.py", "a/helper.py", "test_three.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def found(*arguments: str) -> set[str]:
        return {str(path.relative_to(tmp_path)) for path in files_of(arguments, tmp_path)}

    assert found("a") == {"a/test_one.py", "a/b/test_two.py"}
    assert found("a/b", "test_three.py::test_it", "test_three.py") == {"a/b/test_two.py", "test_three.py"}
    assert found(str(tmp_path / "a" / "b")) == {"a/b/test_two.py"}


def test_what_the_queue_begins_with_is_there() -> None:
    assert [name for name in FIRST if not (ROOT / name).exists()] == []
    assert len(set(FIRST)) == len(FIRST)


def test_the_queue_begins_with_what_takes_long() -> None:
    files = ["tests/db/test_a.py", FIRST[1], "tests/tangram/test_b.py", FIRST[0]]
    assert sorted(files, key=lambda file: place(f"{file}::test_it")) == [
        FIRST[0],
        FIRST[1],
        files[0],
        files[2],
    ]


def test_a_unit_is_a_file_or_what_belongs_together() -> None:
    assert unit("tests/db/test_a.py::test_it[::x]") == "tests/db/test_a.py"
    assert unit("tests/e2e/test_chat.py::test_it") == unit("tests/e2e/test_console.py::test_that")
    assert unit("tests/ui/test_door.py::test_it") != unit("tests/ui/test_threads.py::test_it")


def run(tmp_path: Path, *options: str, files: int, dies_in: str = "") -> subprocess.CompletedProcess[str]:
    """A pytest of its own on files of four tests each, which note where they run. dies_in: file::number."""
    for number in range(files):
        (tmp_path / f"test_{number}.py").write_text(NOTES)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist.plugin"]
    command += ["-p", "tests.workers"]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST_") and name != "OMP_NUM_THREADS"
    }
    environment |= {"PYTHONPATH": str(ROOT), "NOTES": str(tmp_path / "notes"), "DIES_IN": dies_in}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # loading all of them takes seconds
    return subprocess.run(
        [*command, "--rootdir", str(tmp_path), *options, *(f"test_{number}.py" for number in range(files))],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_file_runs_in_one_worker_and_each_engine_has_one_thread(
    tmp_path: Path,
) -> None:
    files = FEW_FILES + 2
    done = run(tmp_path, *SIDE_BY_SIDE, files=files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(rf"=+ {4 * files} passed in [0-9.]+s =+", done.stdout.splitlines()[-1])
    where = defaultdict(list)
    for line in (tmp_path / "notes").read_text().splitlines():
        worker, file, threads = line.split()
        where[file].append(worker)
        assert threads == "1"
    assert {len(runs) for runs in where.values()} == {4}
    assert {len(set(runs)) for runs in where.values()} == {1}
    assert all(worker.startswith("gw") for runs in where.values() for worker in runs)


@pytest.mark.parametrize(
    ("options", "files"),
    [(SIDE_BY_SIDE, FEW_FILES), ([*SIDE_BY_SIDE, "-n", "0"], FEW_FILES + 2), ([], FEW_FILES + 2)],
)
def test_a_few_files_and_who_asks_for_it_have_one_process(
    tmp_path: Path, options: list[str], files: int
) -> None:
    done = run(tmp_path, *options, files=files)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "notes").read_text().splitlines()
    assert len(lines) == 4 * files
    assert {line.split()[0] for line in lines} == {"alone"}


@pytest.mark.parametrize(("files", "place"), [(2, "test_1.py::2"), (2, "test_0.py::3"), (5, "test_0.py::0")])
def test_a_test_that_ends_its_worker_fails_once_and_the_others_go_on(
    tmp_path: Path, files: int, place: str
) -> None:
    done = run(tmp_path, "-n", "2", *SIDE_BY_SIDE[2:], files=files, dies_in=place)
    name, number = place.split("::")
    assert done.returncode == 1, done.stdout + done.stderr
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert [line.split()[1] for line in failures] == [f"{name}::test_notes_where_it_runs[{number}]"]
    assert f"1 failed, {4 * files - 1} passed" in done.stdout.splitlines()[-1]
    assert len((tmp_path / "notes").read_text().splitlines()) == 4 * files

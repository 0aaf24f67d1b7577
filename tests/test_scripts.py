"""The shell scripts behind `make up`, `make test` and `.ci/run`, in trees with a stand-in for Python."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.leftovers import alive, kill_session
from tests.tree import ROOT

# Stands in for a Python: notes what it is asked, makes a venv that holds itself, and finds nothing missing.
STAND_IN = """\
#!/bin/bash
case "$*" in
    *"version_info < (3, 11)"*) exit ${TOO_OLD:-0} ;;
esac
printf '%s\\n' "$*" >>"$NOTES"
case "$*" in
    "-m venv --clear .venv")
        mkdir -p .venv/bin && cp "$0" .venv/bin/python
        echo "command = $0 -m venv $PWD/.venv" >.venv/pyvenv.cfg
        ;;
    *"-r requirements.lock"*)
        for place in 1 2 3; do
            printf 'Collecting one%s==1.0 (from -r requirements.lock (line %s))\n' $place $place
            printf '  Downloading one%s-1.0-py3-none-any.whl (%s.5 MB)\n' $place $place
            sleep "${PAUSE:-0}"
        done
        echo "Installing collected packages: one1, one2, one3"
        sleep "${PAUSE:-0}"
        [ -z "${INSTALL_FAILS:-}" ] || echo "ERROR: it is not there" >&2
        exit ${INSTALL_FAILS:-0}
        ;;
esac
"""


class Tree:
    """A copy of the scripts, with a stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        for name in ("Makefile", "pyproject.toml", "requirements.lock"):
            shutil.copy(ROOT / name, self.root)
        self.python = folder / "stand-in-python"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)
        self.notes = folder / "notes"

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": str(self.python), "NOTES": str(self.notes), **variables}
        environment.pop("TORCH_INDEX", None) if "TORCH_INDEX" not in variables else None
        self.notes.write_text("")
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )

    def setup(self, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("scripts/setup.sh", **variables)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_setup_makes_the_venv_and_installs_the_lock_without_dependencies(tree: Tree) -> None:
    result = tree.setup()
    assert result.returncode == 0, result.stderr
    notes = tree.notes.read_text().splitlines()
    assert notes[:2] == ["-V", "-m venv --clear .venv"]
    assert any("--no-deps" in note and "-r requirements.lock" in note for note in notes)
    assert "--editable ." in notes[-1]
    assert result.stdout == ""


def test_setup_does_nothing_the_second_time(tree: Tree) -> None:
    tree.setup()
    result = tree.setup()
    assert (result.returncode, result.stderr, tree.notes.read_text()) == (0, "", "")


def test_setup_follows_the_lock_and_keeps_the_venv(tree: Tree) -> None:
    tree.setup()
    with (tree.root / "requirements.lock").open("a") as lock:
        lock.write("# changed\n")
    assert tree.setup().returncode == 0
    notes = tree.notes.read_text()
    assert "-r requirements.lock" in notes
    assert "-m venv" not in notes


def test_setup_starts_anew_where_the_tree_was_moved(tree: Tree) -> None:
    tree.setup()
    tree.root = tree.root.rename(tree.root.parent / "moved")
    assert tree.setup().returncode == 0
    assert "-m venv --clear .venv" in tree.notes.read_text()


def test_setup_passes_the_torch_index_on(tree: Tree) -> None:
    assert tree.setup(TORCH_INDEX="http://127.0.0.1:9/cpu").returncode == 0
    assert "--extra-index-url http://127.0.0.1:9/cpu" in tree.notes.read_text()


def test_a_failed_install_says_so_and_is_done_again(tree: Tree) -> None:
    result = tree.setup(INSTALL_FAILS="1")
    assert result.returncode == 1
    assert "Is the network there" in result.stderr
    assert "ERROR: it is not there\n" in result.stderr, "the end of pip's words is shown"
    assert "The end of .venv/set-up.log" in result.stderr
    assert tree.setup().returncode == 0
    assert "-r requirements.lock" in tree.notes.read_text()


def test_pip_s_words_go_to_a_file_and_the_terminal_gets_a_line_a_step(tree: Tree) -> None:
    result = tree.setup()
    lines = result.stderr.splitlines()
    assert [line.split()[1] for line in lines] == ["Creating", "Installing", "Installing", ".venv"], lines
    log = (tree.root / ".venv" / "set-up.log").read_text()
    assert "Collecting one3==1.0" in log
    assert "--editable ." in log


def test_a_long_install_tells_how_far_it_is(tree: Tree) -> None:
    result = tree.setup(PAUSE="0.6", TICK="0.2")
    assert result.returncode == 0, result.stderr
    count = len(re.findall(r"^\w", (tree.root / "requirements.lock").read_text(), flags=re.M))
    told = [line for line in result.stderr.splitlines() if "==>   " in line]
    assert f"==>   2 of {count} packages fetched, now one2 (2.5 MB)" in told
    assert told[-1] == "==>   all packages are there, and are being installed"
    assert len(told) == len(set(told)), "what is as before is not said again"


def test_an_old_python_is_refused(tree: Tree) -> None:
    result = tree.setup(TOO_OLD="1")
    assert result.returncode == 1
    assert "not a Python 3.11 or newer" in result.stderr


def test_a_path_that_torch_cannot_compile_in_is_refused(tree: Tree) -> None:
    tree.root = tree.root.rename(tree.root.parent / "a tree")
    result = tree.setup()
    assert result.returncode == 1
    assert "move the tree" in result.stderr


def test_a_missing_compiler_is_named(tree: Tree, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "cp", "cut", "dirname", "grep", "mkdir", "rm", "sha256sum", "uname"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    result = tree.setup(PATH=str(tools))
    assert result.returncode == 1
    assert "C++ compiler" in result.stderr


@pytest.mark.parametrize("browser", ["chromium", "chromium-browser", "google-chrome", ""])
@pytest.mark.parametrize("root", [True, False])
def test_the_tests_get_a_browser_where_there_is_none(
    tree: Tree, tmp_path: Path, browser: str, root: bool
) -> None:
    tools, asked = tmp_path / "tools", tmp_path / "asked"
    tools.mkdir()
    tool = "#!/bin/bash\n"
    bodies = {
        "id": f"{tool}echo {0 if root else 1000}\n",
        "apt-get": f'{tool}printf "%s\\n" "$*" >>"{asked}"\n',
    }
    for name in filter(None, ["docker-compose", "tini", "caddy", "promtool", "initdb", browser]):
        bodies[name] = tool
    for name, body in bodies.items():
        (tools / name).write_text(body)
        (tools / name).chmod(0o755)
    done = tree.run("/bin/bash", "scripts/test_tools.sh", PATH=str(tools))
    installed = asked.read_text() if asked.exists() else ""
    if browser or root:
        assert done.returncode == 0, done.stderr
        assert ("install -y -qq --no-install-recommends chromium" in installed) == (not browser)
    else:
        assert done.returncode == 1
        assert "apt-get install chromium" in done.stderr
        assert not installed


def test_make_up_ends_with_the_app_in_the_place_of_the_shell(tree: Tree) -> None:
    result = tree.run("make", "up")
    assert result.returncode == 0, result.stderr
    assert tree.notes.read_text().splitlines()[-1] == "-m app"


SIDE_BY_SIDE = "-n auto --dist loadfile --no-loadscope-reorder"
"""What the test runner asks of pytest-xdist. Of options that are given twice the last counts."""


def stand_in_for_pytest(tree: Tree, body: str) -> None:
    python = tree.root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/bash\n{body}\n")
    python.chmod(0o755)


def test_the_test_runner_ends_what_the_tests_left_running(tree: Tree) -> None:
    leave = "setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $! >left"
    stand_in_for_pytest(tree, f"{leave}; printf '%s' \"$TANGRAM_HOME\" >home; exit 3")
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        result = tree.run("scripts/run_tests.sh")
        assert (result.returncode, result.stderr) == (3, "")
        assert not alive(int((tree.root / "left").read_text()))
        assert bystander.poll() is None
    finally:
        bystander.send_signal(signal.SIGKILL)
        bystander.wait()
    home = Path((tree.root / "home").read_text())
    assert home != Path.home() / ".local" / "share" / "tangram-chat"
    assert not home.parent.exists()


def test_the_test_runner_passes_an_interrupt_on(tree: Tree) -> None:
    stand_in_for_pytest(tree, "trap 'echo torn down; exit 2' INT; echo running; while :; do sleep 0.1; done")
    runner = subprocess.Popen(
        ["scripts/run_tests.sh"], cwd=tree.root, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert runner.stdout is not None
        assert runner.stdout.readline() == "running\n"
        os.killpg(runner.pid, signal.SIGINT)  # what Ctrl-C in a terminal does
        assert runner.communicate(timeout=120)[0] == "torn down\n"
    finally:
        kill_session(runner.pid)
        runner.wait()
    assert runner.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], f"-m pytest -m not slow {SIDE_BY_SIDE}"),
        (["tests/db"], f"-m pytest -m not slow {SIDE_BY_SIDE} tests/db"),
        (["-m", "slow"], f"-m pytest {SIDE_BY_SIDE} -m slow"),
        (["-n", "0"], f"-m pytest -m not slow {SIDE_BY_SIDE} -n 0"),
    ],
)
def test_the_test_runner_leaves_slow_tests_out(tree: Tree, arguments: list[str], passed: str) -> None:
    stand_in_for_pytest(tree, 'echo "$*"')
    assert tree.run("scripts/run_tests.sh", *arguments).stdout.strip() == passed


@pytest.mark.parametrize(
    ("output", "status", "last", "returned"),
    [
        ("x\n=== 3 passed in 0.01s ===\nlate word", 0, "=== 3 passed in 0.01s ===", 0),
        (
            "=== 1 failed, 3 passed in 62.01s (0:01:02) ===",
            2,
            "=== 1 failed, 3 passed in 62.01s (0:01:02) ===",
            2,
        ),
        ("\x1b[32m=== \x1b[1m3 passed\x1b[0m in 0.01s ===\x1b[0m", 0, "=== 3 passed in 0.01s ===", 0),
        ("mypy: error", 2, "mypy: error", 2),
        ("nothing", 0, "nothing", 1),
    ],
)
def test_ci_prints_the_closing_line_last(
    tmp_path: Path, output: str, status: int, last: str, returned: int
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "output").write_text(output + "\n")
    (tmp_path / "Makefile").write_text(f"test:\n\t@cat output; exit {status}\n")
    # As CI starts it, not as a make inside the make that may run this test.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    result = subprocess.run(
        ["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == returned, result.stderr
    lines = [line for line in result.stdout.splitlines() if not line.startswith("make:")]
    assert lines[-1] == last


def test_complete_torch_knows_when_nothing_is_missing() -> None:
    command = [sys.executable, "scripts/complete_torch.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def gpu_tree(tree: Tree, tools: Path, answer: str) -> dict[str, str]:
    """The tree with the CUDA lock, and an nvidia-smi that answers so."""
    shutil.copy(ROOT / "requirements-cuda.lock", tree.root)
    stand_in = tree.python.read_text().replace('"-m venv --clear .venv")', '"-m venv --clear "*)')
    tree.python.write_text(stand_in.replace(".venv/", '"$4"/').replace("$PWD/.venv", "$PWD/$4"))
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    (tools / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}"}


def test_make_up_uses_the_cuda_lock_where_there_is_a_gpu(tree: Tree, tmp_path: Path) -> None:
    path = gpu_tree(tree, tmp_path / "tools", "echo 'GPU 0: NVIDIA A100 (UUID: GPU-1)'")
    result = tree.run("make", "up", **path)
    assert result.returncode == 0, result.stderr
    notes = tree.notes.read_text()
    assert "-r requirements-cuda.lock" in notes
    assert "-m venv --clear .venv-cuda" in notes
    assert notes.splitlines()[-1] == "-m app"
    assert not (tree.root / ".venv").exists()
    again = tree.run("make", "up", **path)
    assert tree.notes.read_text() == "-m app\n", again.stderr
    assert "-r requirements.lock" in _notes_of(tree, "make", "up", **path, TANGRAM_BUILD="cpu")


def _notes_of(tree: Tree, *command: str, **variables: str) -> str:
    tree.run(*command, **variables)
    return tree.notes.read_text()


def test_make_up_without_a_gpu_or_with_a_driver_that_has_none(tree: Tree, tmp_path: Path) -> None:
    path = gpu_tree(tree, tmp_path / "tools", "echo 'No devices were found'; exit 6")
    assert "-r requirements.lock" in _notes_of(tree, "make", "up", **path)
    result = tree.run("make", "up", **path, TANGRAM_BUILD="rocm")
    assert "TANGRAM_BUILD must be cpu or cuda" in result.stderr

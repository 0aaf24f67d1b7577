"""What the images are built from and run: Dockerfiles, entrypoint, health check, install script."""

import fnmatch
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tree import ROOT

DOCKER = ROOT / "docker"
FILES = ["Dockerfile", "Dockerfile.cpu"]


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continued lines joined, comments left out."""
    lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line]


def arguments_of(name: str, instruction: str) -> list[str]:
    return [rest for found, rest in instructions(name) if found == instruction]


@pytest.mark.parametrize("name", FILES)
def test_the_base_image_is_pinned(name: str) -> None:
    (image,) = [rest for rest in arguments_of(name, "ARG") if "_IMAGE=" in rest]
    tag = image.rpartition(":")[2]
    assert re.fullmatch(r"\d+\.\d+[\w.-]*", tag), image
    variable = image.partition("=")[0]
    assert arguments_of(name, "FROM") == [f"${{{variable}}} AS build", f"${{{variable}}}"]


def test_the_gpu_image_is_cuda_13_and_python_3_12() -> None:
    assert "nvidia/cuda:13." in arguments_of("Dockerfile", "ARG")[0]
    assert any("PYTHON=python3.12" in rest for rest in arguments_of("Dockerfile", "RUN"))


@pytest.mark.parametrize("name", FILES)
def test_it_runs_as_an_own_user_under_an_init(name: str) -> None:
    found = instructions(name)
    (user,) = arguments_of(name, "USER")
    assert user not in ("root", "0")
    assert found[-1] == ("ENTRYPOINT", '["tini", "--", "/opt/entrypoint.sh"]')
    assert [rest for rest in arguments_of(name, "RUN") if f" {user}" in rest and "useradd" in rest]


@pytest.mark.parametrize("name", FILES)
def test_it_has_a_health_check_and_one_port(name: str) -> None:
    (check,) = arguments_of(name, "HEALTHCHECK")
    assert check.endswith('CMD ["python", "/opt/healthcheck.py"]')
    assert "--start-period=" in check
    assert arguments_of(name, "EXPOSE") == ["8000"]


@pytest.mark.parametrize("name", FILES)
def test_volumes_belong_to_the_user(name: str) -> None:
    (made,) = re.findall(r"install -d -o tangram -g tangram ([/\w ]+)", "\n".join(arguments_of(name, "RUN")))
    assert made.split() == ["/data", "/data/cache", "/data/models"]


def included(path: str) -> bool:
    """Whether .dockerignore lets a path of the tree through to the builder."""
    let_through = False
    for rule in (ROOT / ".dockerignore").read_text().splitlines():
        if rule and not rule.startswith("#"):
            pattern = rule.removeprefix("!").removeprefix("**/")
            parts = path.split("/")
            if any(fnmatch.fnmatch(part, pattern) for part in (parts if "**/" in rule else parts[:1])):
                let_through = rule.startswith("!")
    return let_through


@pytest.mark.parametrize("name", FILES)
def test_what_it_copies_is_there_and_reaches_the_builder(name: str) -> None:
    for rest in arguments_of(name, "COPY"):
        if not rest.startswith("--from="):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source == "." or included(source), source
    for source in ("requirements.lock", "requirements-cuda.lock", "docker/install.sh", "app/factory.py"):
        assert included(source), source


def test_what_does_not_belong_into_the_image_stays_away() -> None:
    for path in (".git/config", ".env", ".venv/bin/python", "tests/tree.py", "app/__pycache__/x.pyc"):
        assert not included(path), path


@pytest.mark.parametrize("name", FILES)
def test_it_installs_with_the_script_and_an_existing_lock(name: str) -> None:
    (install,) = [rest for rest in arguments_of(name, "RUN") if "docker/install.sh" in rest]
    lock = install.split("docker/install.sh ")[1].split()[0]
    assert (ROOT / lock).exists()


def run_entrypoint(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "TANGRAM_HOME": str(home),
        **variables,
    }
    command = ["sh", str(DOCKER / "entrypoint.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_entrypoint_runs_the_command_it_is_given(tmp_path: Path) -> None:
    result = run_entrypoint(tmp_path, "sh", "-c", 'echo "$1"; exit 7', "sh", "two words")
    assert (result.returncode, result.stdout) == (7, "two words\n")


def test_the_entrypoint_runs_the_product_by_default(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    assert run_entrypoint(tmp_path, PATH=f"{tmp_path}:/usr/bin:/bin").stdout == "-m app\n"


def test_the_entrypoint_names_a_volume_that_it_cannot_write(tmp_path: Path) -> None:
    result = run_entrypoint(tmp_path / "missing", "true")
    assert result.returncode == 1
    assert "not writable" in result.stderr


@pytest.mark.skipif(Path("/usr/bin/nvidia-smi").exists(), reason="there is a GPU here")
def test_the_entrypoint_names_a_missing_gpu(tmp_path: Path) -> None:
    result = run_entrypoint(tmp_path, "true", TANGRAM_EXPECT_GPU="1")
    assert result.returncode == 1
    assert "NVIDIA Container Toolkit" in result.stderr


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server that answers /health/ready with `status`; yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/ready" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            del args

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def health(port: int) -> int:
    command = [sys.executable, str(DOCKER / "healthcheck.py")]
    environment = {"TANGRAM_PORT": str(port)}
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


def test_the_health_check_follows_readiness() -> None:
    with answering(200) as port:
        assert health(port) == 0
    assert health(port) == 1
    with answering(503) as port:
        assert health(port) == 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_install_script_makes_a_product_that_starts(tmp_path: Path) -> None:
    """What Dockerfile.cpu does, on this machine: a whole new virtual environment from the lock."""
    venv = tmp_path / "product"
    command = [str(DOCKER / "install.sh"), "requirements.lock", str(venv)]
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    version = subprocess.run(
        [str(venv / "bin" / "tangram"), "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"tangram \d+\.\d+\.\d+\n", version.stdout)
    where = "import app, app.factory; print(app.__file__)"
    found = subprocess.run(
        [str(venv / "bin" / "python"), "-c", where], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith(str(venv))

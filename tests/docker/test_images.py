"""What the images are built from and run: Dockerfiles, entrypoint, health check, install script."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.preflight.start import LIBRARY
from tests.docker.dockerfile import included, read
from tests.http_answers import answering
from tests.tree import PROJECT, ROOT

DOCKER = ROOT / "docker"
FILES = ["Dockerfile", "Dockerfile.cpu"]
ELSEWHERE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""An environment in which this tree is not found, only what was installed."""


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments with their flags) of a Dockerfile."""
    return [
        (one.name, " ".join([*(f"--{flag}={value}" for flag, value in one.flags.items()), one.rest]))
        for one in read(DOCKER / name)
    ]


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
    assert any("kernels.sh" in rest for rest in arguments_of("Dockerfile", "RUN"))


@pytest.mark.parametrize("name", FILES)
def test_every_step_is_a_script_that_the_builder_gets_before_it_runs(name: str) -> None:
    copied: list[str] = []
    for instruction, rest in instructions(name):
        if instruction == "COPY":
            copied.append(rest)
        if instruction == "RUN":
            for command in rest.split(" && "):
                words = [word for word in command.split() if "=" not in word.split("/")[0]]
                script = re.fullmatch(r"(?:/src/docker|docker|/opt)/(steps/[a-z]+\.sh)", words[0])
                assert script, f"{command}: not a script under docker/steps"
                assert os.access(DOCKER / script[1], os.X_OK)
                assert any(script[1] in rest or "docker/steps docker/steps" in rest for rest in copied)


@pytest.mark.parametrize("name", FILES)
def test_layers_go_from_what_changes_least_to_what_changes_most(name: str) -> None:
    copies = [rest.split()[-1] for rest in arguments_of(name, "COPY") if rest.startswith("--from=")]
    order = ["/opt/venv", "/opt/kernels", "/opt/product"]
    assert copies == [part for part in order if part in copies]
    assert {"/opt/venv", "/opt/product"} <= set(copies)
    assert any("org.opencontainers.image.version" in rest for rest in arguments_of(name, "LABEL"))
    assert f"VERSION={PROJECT['version']}" in arguments_of(name, "ARG")


@pytest.mark.parametrize("name", FILES)
def test_it_runs_as_an_own_user_under_an_init(name: str) -> None:
    found = instructions(name)
    (user,) = arguments_of(name, "USER")
    assert user == "10001"  # a number: the host then knows that it is not root
    assert "--uid 10001" in (DOCKER / "steps" / "user.sh").read_text()
    assert found[-1] == ("ENTRYPOINT", '["tini", "--", "/opt/entrypoint.sh"]')
    assert any("steps/user.sh" in rest for rest in arguments_of(name, "RUN"))


@pytest.mark.parametrize("name", FILES)
def test_it_has_a_health_check_and_one_port(name: str) -> None:
    (check,) = arguments_of(name, "HEALTHCHECK")
    assert check.endswith('CMD ["python", "/opt/healthcheck.py"]')
    assert "--start-period=" in check
    assert arguments_of(name, "EXPOSE") == ["8000"]


def test_the_cpu_image_has_the_library_that_the_preflight_looks_for() -> None:
    packages = arguments_of("Dockerfile.cpu", "RUN")[-1].split(" && ")[0].split()
    assert LIBRARY[1] in packages


def test_the_folders_of_the_volumes_are_made(tmp_path: Path) -> None:
    subprocess.run([DOCKER / "steps" / "user.sh", tmp_path], check=True)
    made = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert made == {"data", "data/cache", "data/models"}
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("name", FILES)
def test_what_it_copies_is_there_and_reaches_the_builder(name: str) -> None:
    for rest in arguments_of(name, "COPY"):
        if not rest.startswith("--from="):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source == "." or included(source), source
    for source in ("requirements.lock", "requirements-cuda.lock", "docker/steps/venv.sh", "app/factory.py"):
        assert included(source), source


def test_what_does_not_belong_into_the_image_stays_away() -> None:
    for path in (".git/config", ".env", ".venv/bin/python", "tests/tree.py", "app/__pycache__/x.pyc"):
        assert not included(path), path


@pytest.mark.parametrize("name", FILES)
def test_it_installs_an_existing_lock(name: str) -> None:
    (install,) = [rest for rest in arguments_of(name, "RUN") if "venv.sh" in rest]
    lock = install.split("docker/steps/venv.sh ")[1].split()[0]
    assert (ROOT / lock).exists()
    assert any(rest.startswith(f"{lock} ") for rest in arguments_of(name, "COPY"))


@pytest.mark.parametrize("script", sorted((DOCKER / "steps").glob("*.sh")), ids=lambda path: path.name)
def test_a_step_without_arguments_says_what_it_wants(script: Path, tmp_path: Path) -> None:
    if script.name == "user.sh":
        return  # it would make the user
    result = subprocess.run([script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert script.name in result.stderr


def test_the_product_goes_beside_the_packages(tmp_path: Path) -> None:
    """Steps link.sh and product.sh on a bare virtual environment, without the packages."""
    venv, product = tmp_path / "venv", tmp_path / "product"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    subprocess.run([DOCKER / "steps" / "link.sh", venv, product], check=True)
    (product / "app").mkdir(parents=True)
    (product / "app" / "__init__.py").write_text("__version__ = 'here'\n")
    code = "import app; print(app.__version__, app.__file__)"
    command = [venv / "bin" / "python", "-c", code]
    found = subprocess.run(command, cwd=tmp_path, env=ELSEWHERE, capture_output=True, text=True, check=True)
    assert found.stdout == f"here {product}/app/__init__.py\n"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
@pytest.mark.timeout(240)
def test_the_kernels_are_built_ahead_without_a_gpu(tmp_path: Path) -> None:
    """Step kernels.sh as in the image, for one variant."""
    step = [DOCKER / "steps" / "kernels.sh", Path(sys.executable).parent.parent, tmp_path / "kernels"]
    options = ["--arch", "sm_80", "--dtype", "bfloat16", "--head-size", "64"]
    subprocess.run([*step, *options], cwd=tmp_path, check=True)
    (built,) = (tmp_path / "kernels").glob("*.so")
    assert built.name.startswith("tangram-cuda-sm_80-bfloat16-64-")


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


def health(port: int) -> int:
    command = [sys.executable, str(DOCKER / "healthcheck.py")]
    environment = {"TANGRAM_PORT": str(port)}
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


def test_the_health_check_follows_readiness() -> None:
    with answering(200, path="/health/ready") as port:
        assert health(port) == 0
    assert health(port) == 1
    with answering(503, path="/health/ready") as port:
        assert health(port) == 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_install_script_makes_a_product_that_starts(tmp_path: Path) -> None:
    """What Dockerfile.cpu does, on this machine: a whole new virtual environment from the lock."""
    venv = tmp_path / "product"
    command = [str(DOCKER / "install.sh"), "requirements.lock", str(venv)]
    environment = {**ELSEWHERE, "PYTHON": sys.executable}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    version = subprocess.run(
        [str(venv / "product" / "bin" / "tangram"), "--version"],
        cwd=tmp_path,
        env=ELSEWHERE,
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(r"tangram \d+\.\d+\.\d+\n", version.stdout)
    where = "import app, app.factory; print(app.__file__)"
    command = [str(venv / "bin" / "python"), "-c", where]
    found = subprocess.run(command, cwd=tmp_path, env=ELSEWHERE, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(venv))

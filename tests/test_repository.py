"""The repository itself: nothing of one machine is in it, and what is built from it is whole."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata

import pytest

from tests.tree import PACKAGES, ROOT, repository_files, texts


def test_nothing_of_one_machine_or_registry_is_in_the_tree() -> None:
    # In pieces, so that this file does not hold what it looks for.
    places = ["/wo" + r"rk/(?:main|shared)", "/ro" + "ot/", "/ho" + r"me/\w", "/opt/" + r"(?:wheels|pypi)"]
    hosts = ["pypi" + r"\.org", "python" + r"hosted\.org", "download" + r"\.pytorch\.org", "npm" + r"js\.org"]
    hosts += ["deb" + r"\.debian\.org", "security" + r"\.debian\.org"]
    pattern = re.compile("|".join(places + hosts))
    found = [
        f"{path.relative_to(ROOT)}: {hit[0]}"
        for path, text in texts(repository_files())
        if (hit := pattern.search(text))
    ]
    assert found == []


def test_no_weights_or_databases_are_in_the_tree() -> None:
    for path in repository_files():
        assert path.suffix not in {".gguf", ".safetensors", ".sqlite3", ".bin", ".pt"}, path
        assert path.stat().st_size < 2_000_000, path


def test_every_package_is_typed() -> None:
    for name in PACKAGES:
        assert (ROOT / name / "py.typed").exists(), name
        for folder in {path.parent for path in (ROOT / name).rglob("*.py")}:
            assert (folder / "__init__.py").exists(), folder


def test_scripts_are_executable_and_parse() -> None:
    scripts = [path for path, text in texts(repository_files()) if text.startswith("#!")]
    assert ROOT / ".ci" / "run" in scripts
    for script in scripts:
        assert script.stat().st_mode & 0o111, script
        if "sh" in script.read_text().splitlines()[0]:
            subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in the wheel, built from a copy of the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in repository_files():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(out), str(source)], check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_all_of_the_packages(wheel: set[str]) -> None:
    wanted = {
        str(path.relative_to(ROOT))
        for path in repository_files()
        if path.relative_to(ROOT).parts[0] in PACKAGES and path.suffix != ".md"
    }
    assert wanted - wheel == set()
    assert not [name for name in wheel if name.startswith(("tests/", "benchmarks/", "scripts/"))]


def test_the_entry_points_can_be_loaded() -> None:
    points = metadata.distribution("tangram-chat").entry_points
    assert {(point.group, point.name) for point in points} == {
        ("console_scripts", "tangram"),
        ("console_scripts", "tangram-chat"),
        ("vllm.general_plugins", "tangram"),
        ("vllm.endpoint_plugins", "tangram"),
    }
    for point in points:
        assert callable(point.load()), point

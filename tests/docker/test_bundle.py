"""The bundle for hosts without a network: packed, carried, installed; and what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from tests.docker.test_chroot import can_unshare
from tests.tree import ROOT

BUNDLE = ROOT / "docker" / "bundle.sh"
PIP = ("PIP_", "PYTHONPATH")
DOCKER = """\
#!/bin/sh
echo "$PWD: $*" >>"$NOTES"
case "$1 $2" in
    "image inspect") [ "$3" = known-cpu:1 ] ;;
    "save --output") echo the image >"$3" ;;
esac
"""


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(PIP)}
    environment = {**plain, "PYTHON": sys.executable, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def wheel(folder: Path, name: str, metadata: str = "") -> Path:
    """A package of one module, as an index would give it."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "here = __file__\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{metadata}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a hub's cache has it: links to files elsewhere."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "blob").write_text("{}")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").symlink_to(folder / "blob")
    return folder / "model"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A bundle of a lock with one package, of the product, a model and a profile."""
    folder = tmp_path_factory.mktemp("bundle")
    wheel(folder / "index", "tiny")
    (folder / "lock").write_text("tiny==1.0\n")
    (folder / "profile.json").write_text("{}")
    # The product's own build asks for setuptools, which is taken from this environment.
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "index"), "PIP_NO_BUILD_ISOLATION": "0"}
    names = {"MODEL": str(model), "PROFILE": str(folder / "profile.json")}
    done = run(BUNDLE, "wheels", folder / "lock", folder / "out.tar", **offline, **names)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["index", "lock", "out.tar", "profile.json"]
    return folder / "out.tar"


def unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / "tangram-chat"


def test_wheels_are_installed_without_an_index_and_started(packed: Path, tmp_path: Path) -> None:
    bundle = unpack(packed, tmp_path)
    target = tmp_path / "installed"
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    done = run(bundle / "install.sh", target, **nowhere)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(bundle)
    code = "import tiny, app, tangram.shipped; print(tiny.here, app.__file__, len(tangram.shipped.index()))"
    found = run(target / "venv" / "bin" / "python", "-I", "-c", code).stdout.split()
    assert all(path.startswith(str(target)) for path in found[:2])
    assert int(found[2]) > 0, "the profiles of the release are in it"
    assert (target / "venv" / "bin" / "tangram-chat").exists()
    assert (target / "model" / "config.json").read_text() == "{}"
    python = target / "venv" / "bin" / "python"
    python.unlink()
    python.write_text('#!/bin/sh\necho "$@ $MODEL $TANGRAM_PROFILE $TANGRAM_HOME $HF_HUB_OFFLINE"\n')
    python.chmod(0o755)
    said = run(target / "start", "backup", TANGRAM_HOME="/elsewhere").stdout.split()
    assert said == ["-m", "app", "backup", f"{target}/model", f"{target}/profile.json", "/elsewhere", "1"]


def test_what_cannot_be_installed_changes_nothing(packed: Path, tmp_path: Path) -> None:
    bundle = unpack(packed, tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    done = run(bundle / "install.sh", tmp_path / "full")
    assert (done.returncode, "is not empty" in done.stderr) == (2, True)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    (tmp_path / "python").write_text("#!/bin/sh\necho 3.99 linux-other\n")
    (tmp_path / "python").chmod(0o755)
    done = run(bundle / "install.sh", tmp_path / "new", PYTHON=str(tmp_path / "python"))
    assert (done.returncode, "the bundle is for Python 3." in done.stderr) == (2, True)
    with (bundle / "model" / "config.json").open("a") as file:
        file.write(" ")
    done = run(bundle / "install.sh", tmp_path / "new")
    assert (done.returncode, "is damaged or not whole" in done.stderr) == (2, True)
    assert not (tmp_path / "new").exists()


def test_mistakes_in_packing_are_named(packed: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ([], "usage: "),
        (["wheels", tmp_path / "lock", tmp_path / "o.tar"], "there is no lock"),
        (["other", "x", tmp_path / "o.tar"], "wheels or image"),
        (["wheels", "x", packed], "is there already"),
    ):
        done = run(BUNDLE, *arguments)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    for variable in ("MODEL", "PROFILE"):
        done = run(BUNDLE, "wheels", "x", tmp_path / "o.tar", **{variable: str(tmp_path / "none")})
        assert (done.returncode, f"{variable}=" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_build_of_torch_that_the_lock_does_not_fit_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "bundle_facts.py", tmp_path / "wheels", "the-lock"]
    wheel(
        tmp_path / "wheels", "torch", "Requires-Dist: nvidia-cublas (==13.*) ; platform_system == 'Linux'\n"
    )
    done = run(*command)
    assert (done.returncode, "nvidia-cublas" in done.stderr and "TORCH_INDEX" in done.stderr) == (1, True)
    wheel(tmp_path / "wheels", "nvidia_cublas")
    assert run(*command).stdout.startswith(f"3.{sys.version_info[1]} linux-")


def test_an_image_is_carried_with_compose(tmp_path: Path, model: Path) -> None:
    """With a stand-in for Docker, which notes what it is asked: what Docker makes of it is not seen here."""
    tools, notes = tmp_path / "tools", tmp_path / "notes"
    tools.mkdir()
    (tools / "docker").write_text(DOCKER)
    (tools / "docker").chmod(0o755)
    (tmp_path / "profile.json").write_text("{}")
    stand_in = {"PATH": f"{tools}:/usr/bin:/bin", "NOTES": str(notes)}
    done = run(BUNDLE, "image", "unknown:1", tmp_path / "o.tar", **stand_in)
    assert (done.returncode, "there is no image unknown:1" in done.stderr) == (2, True)
    carried = {"MODEL": str(model), "PROFILE": str(tmp_path / "profile.json")}
    done = run(BUNDLE, "image", "known-cpu:1", tmp_path / "o.tar", **stand_in, **carried)
    assert done.returncode == 0, done.stderr
    bundle = unpack(tmp_path / "o.tar", tmp_path)
    assert (bundle / "image.tar").read_text() == "the image\n"
    notes.unlink()
    done = run(bundle / "install.sh", **stand_in)
    assert done.returncode == 0, done.stderr
    compose = bundle / "compose"
    copying = (
        f"{compose}: compose run --rm --no-deps -T -v {bundle}:/bundle:ro --entrypoint cp cpu -RT /bundle"
    )
    assert notes.read_text().splitlines()[1:] == [
        f"{copying}/model /data/models/carried",
        f"{copying}/profile.json /data/models/profile.json",
    ]
    settings = dict(
        line.split("=", 1) for line in (compose / ".env").read_text().splitlines() if "=" in line[:25]
    )
    assert settings["MODEL"] == "/data/models/carried"
    assert settings["TANGRAM_PROFILE"] == "/data/models/profile.json"
    assert (settings["HF_HUB_OFFLINE"], settings["TANGRAM_GPU"]) == ("1", "0")
    assert (compose / "docker" / "caddy" / "Caddyfile").exists()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not can_unshare(), reason="no namespaces here: they want root")
def test_the_whole_product_is_carried_and_answers_without_a_network(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHON"] = sys.executable
    command = [str(BUNDLE), "wheels", "requirements.lock", str(tmp_path / "out.tar")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    bundle, target = unpack(tmp_path / "out.tar", tmp_path), tmp_path / "installed"
    apart = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "unshare",
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    script = f"""
        set -e
        ip link set lo up
        {bundle}/install.sh {target}
        {target}/start & app=$!
        for _ in $(seq 200); do
            {target}/venv/bin/python {ROOT}/docker/healthcheck.py 2>/dev/null && break
            sleep 1
        done
        {target}/venv/bin/python {ROOT}/docker/healthcheck.py
        kill $app
        wait $app
    """
    begun = time.monotonic()
    subprocess.run([*apart, "bash", "-c", script], cwd=tmp_path, env=environment, check=True)
    assert time.monotonic() - begun < 900
    assert (target / "data" / "models").exists()

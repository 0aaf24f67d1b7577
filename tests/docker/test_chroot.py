"""The command that carries a Dockerfile out in chroots, on a small one; the images' own take minutes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.docker.chroot import Builder, Container, Image
from tests.leftovers import alive
from tests.patience import PATIENCE
from tests.tree import ROOT

DOCKERFILE = """\
ARG BASE_IMAGE=debian:12.1
FROM ${BASE_IMAGE} AS build
ARG WORDS
WORKDIR /src
COPY kept ./kept
RUN echo "$WORDS" >said \\
    && test ! -e kept/away.pyc
FROM ${BASE_IMAGE}
COPY user.sh /opt/steps/
RUN /opt/steps/user.sh
COPY --from=build /src /opt/src
COPY entry.sh other.sh /opt/
ENV PATH=/opt:$PATH \\
    GREETING="two words"
USER 10001
WORKDIR /data
VOLUME /data
HEALTHCHECK --interval=1s CMD ["test", "-e", "/data/up"]
ENTRYPOINT ["entry.sh"]
"""
ENTRY = """\
#!/bin/sh
trap 'echo bye >/data/bye; exit 0' TERM
echo "$GREETING" >/data/up
while :; do sleep 0.05; done
"""
HOST = [Path("/usr")]
"""The tools of this machine stand in for those of a base image."""


def can_unshare() -> bool:
    command = ["unshare", "--mount", "--pid", "--net", "--fork", "true"]
    try:
        return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not can_unshare(), reason="no namespaces here: they want root")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    folder = tmp_path_factory.mktemp("chroot")
    base, context, work = folder / "base", folder / "context", folder / "work"
    for name in ("etc", "usr", "proc", "dev", "sys", "tmp"):
        (base / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (base / name).symlink_to(f"usr/{name}")
    (base / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\n")
    (base / "etc" / "group").write_text("root:x:0:\n")
    (context / "kept").mkdir(parents=True)
    for name, text in {
        ".dockerignore": "*\n!kept\n!user.sh\n!entry.sh\n!other.sh\n**/*.pyc\n",
        "Dockerfile": DOCKERFILE,
        "kept/here": "",
        "kept/away.pyc": "",
        "user.sh": (ROOT / "docker" / "steps" / "user.sh").read_text(),
        "entry.sh": ENTRY,
        "other.sh": "",
    }.items():
        (context / name).write_text(text)
        (context / name).chmod(0o755)
    work.mkdir()
    return Builder(work, base, HOST).build(context / "Dockerfile", context, WORDS="a word")


def test_every_instruction_is_carried_out(image: Image) -> None:
    assert image.at("/opt/src/said").read_text() == "a word\n"
    assert image.at("/opt/src/kept/here").exists()
    assert image.at("/opt/other.sh").exists()
    assert image.ids() == "10001:10001"
    assert image.at("/data").stat().st_uid == 10001
    assert image.environment["PATH"].startswith("/opt:/usr/local/sbin:")


def test_the_entrypoint_runs_as_in_a_container(image: Image, tmp_path: Path) -> None:
    data = tmp_path / "data"
    subprocess.run(["cp", "-a", str(image.at("/data")), str(data)], check=True)
    with Container(image, data, HOST, MORE="x") as container:
        assert container.healthy()
        assert (data / "up").read_text() == "two words\n"
        assert (
            container.run("sh", "-c", "id -u; pwd; echo $MORE; cat", stdin="in").stdout
            == "10001\n/data\nx\nin"
        )
        assert "Read-only file system" in container.run("touch", "/opt/x").stderr
        assert container.run("touch", "/tmp/x").returncode == 0
        networks = container.run("cat", "/proc/net/dev").stdout.splitlines()[2:]
        assert [line.split(":")[0].strip() for line in networks] == ["lo"]
        assert container.stop() == 0
    assert (data / "bye").read_text() == "bye\n"
    assert not image.at("/data/up").exists(), "it went to the volume"


def test_nothing_is_left_of_one_that_is_not_stopped(image: Image, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with Container(image, tmp_path, HOST) as container:
        assert container.healthy()
        first = container.first
    end = time.monotonic() + PATIENCE
    while alive(first) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(first)


def test_a_step_that_fails_ends_the_build(image: Image, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\nRUN false\n")
    with pytest.raises(subprocess.CalledProcessError):
        Builder(tmp_path, image.root.parent.parent / "base", HOST).build(tmp_path / "Dockerfile", tmp_path)

"""Carries a Dockerfile out without Docker, in chroots, and starts what comes of it as in docker-compose.yml.

    python -m tests.docker.chroot docker/Dockerfile.cpu WORK [--base DIRECTORY] [--bind PATH ...]

Wants root, Linux, util-linux, and without --base debootstrap: the base image cannot be had without Docker, so
a plain Debian with its own Python stands in for it. Every RUN is run, every COPY copied as .dockerignore lets
through. Then the entrypoint runs as the image's user, in namespaces of its own for processes, mounts and
network (so without any network), on a read-only root with a volume: it must get healthy, answer, and stop
with its replies settled. docs/docker-checks.md says what only Docker itself can show.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.docker.dockerfile import Instruction, expand, included, read
from tests.tree import ROOT

DEBIAN = "bookworm"
STOP_SECONDS = 30
HEALTHY_SECONDS = 600


@dataclass
class Image:
    """A stage: its files, and what its instructions say of how it is run."""

    root: Path
    values: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    folder: PurePosixPath = field(default_factory=lambda: PurePosixPath("/"))
    user: str = ""
    health: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)

    def at(self, path: str | PurePosixPath) -> Path:
        """A path of the image as one of this machine."""
        return self.root / str(self.folder / path).lstrip("/")

    def ids(self) -> str:
        """The user's number and that of its group, as chroot takes them."""
        for line in (self.root / "etc" / "passwd").read_text().splitlines() if self.user else ():
            _, _, user, group, *_ = line.split(":")
            if user == self.user:
                return f"{user}:{group}"
        return f"{self.user}:{self.user}" if self.user else "0:0"


def enter(image: Image, command: Sequence[str]) -> list[str]:
    """A command in an image's root, as its user, with its environment and in its directory.

    It is killed with its parent: what `unshare` arranges for that is undone by the change of user.
    """
    pairs = [f"{name}={value}" for name, value in image.environment.items()]
    where = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(image.folder)]
    bound = ["/usr/bin/setpriv", "--pdeathsig", "KILL"]
    start = ["chroot", f"--userspec={image.ids()}", str(image.root), *bound, "/usr/bin/env", "-i"]
    return [*start, *pairs, *where, *command]


class Builder:
    """Builds the stages of a Dockerfile, each in a directory of its own.

    binds: paths of this machine that are there, read-only, while RUN runs: a package index, certificates.
    build: variables that RUN gets besides those of the file, such as those of a proxy.
    """

    def __init__(
        self, work: Path, base: Path, binds: Sequence[Path] = (), build: dict[str, str] | None = None
    ):
        self.work, self.base, self.binds, self.extra = work, base, binds, build or {}
        self.stages: dict[str, Image] = {}

    def build(self, file: Path, context: Path = ROOT, **arguments: str) -> Image:
        """Carry all instructions out; returns the last stage."""
        values: dict[str, str] = {}
        image: Image | None = None
        for one in read(file):
            print(f"==> {one.name} {one.rest}", file=sys.stderr, flush=True)
            if one.name == "FROM":
                image = self._from(one, values)
            elif one.name == "ARG":
                name, _, default = one.rest.partition("=")
                scope = values if image is None else image.values
                scope[name] = arguments.get(name, default or values.get(name, ""))
            elif image is None:
                raise ValueError(f"line {one.line}: {one.name} before FROM")
            else:
                self._carry_out(one, image, context)
        if image is None:
            raise ValueError("no FROM")
        return image

    def _from(self, one: Instruction, values: dict[str, str]) -> Image:
        source, *named = one.words()
        name = named[1] if named else "final"
        root = self.work / name
        subprocess.run(["cp", "-a", "--reflink=auto", str(self.base), str(root)], check=True)
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        image = Image(root, {}, {"PATH": path})
        self.stages[name] = image
        print(f"    {self.base} stands in for {expand(source, values)}", file=sys.stderr)
        return image

    def _carry_out(self, one: Instruction, image: Image, context: Path) -> None:
        text = expand(one.rest, {**image.values, **image.environment})
        if one.name == "ENV":
            image.environment |= Instruction(one.name, {}, text, one.line).pairs()
        elif one.name == "WORKDIR":
            image.folder /= text
            image.at(".").mkdir(parents=True, exist_ok=True)
        elif one.name == "USER":
            image.user = text
        elif one.name == "VOLUME":
            image.volumes += text.split()
        elif one.name == "HEALTHCHECK":
            image.health = json.loads(text.removeprefix("CMD "))
        elif one.name == "ENTRYPOINT":
            image.entrypoint = json.loads(text)
        elif one.name == "COPY":
            self._copy(one, image, context)
        elif one.name == "RUN":
            self._run(one.rest, image)
        # LABEL, EXPOSE, STOPSIGNAL and CMD say what only Docker needs.

    def _copy(self, one: Instruction, image: Image, context: Path) -> None:
        *sources, target = one.words()
        stage = one.flags.get("from")
        for source in sources:
            into = image.at(target)
            if stage:
                origin = self.stages[stage].at(f"/{source.lstrip('/')}")
            else:
                origin = context / source
                if not included(source, context):
                    raise ValueError(f"line {one.line}: .dockerignore keeps {source} away")
            if origin.is_file() and (target.endswith("/") or into.is_dir() or len(sources) > 1):
                into /= origin.name
            into.parent.mkdir(parents=True, exist_ok=True)
            if stage:  # no second copy of gigabytes: nothing writes to the files of a stage that is done
                subprocess.run(["cp", "-alT", str(origin), str(into)], check=True)
            elif origin.is_dir():
                keep_away = lambda folder, names: [  # noqa: E731
                    name
                    for name in names
                    if not included(str((Path(folder) / name).relative_to(context)), context)
                ]
                shutil.copytree(origin, into, dirs_exist_ok=True, ignore=keep_away)
            else:
                shutil.copy(origin, into)

    def _run(self, command: str, image: Image) -> None:
        inside = Image(**{**vars(image), "environment": {**self.extra, **image.environment, **image.values}})
        words = enter(inside, ["/bin/sh", "-c", command])
        subprocess.run(in_namespaces(image.root, words, self.binds), check=True)


def in_namespaces(
    root: Path,
    command: Sequence[str],
    binds: Sequence[Path] = (),
    volumes: Sequence[tuple[Path, str]] = (),
    *,
    sealed: bool = False,
) -> list[str]:
    """A command with /proc, /dev and /sys in `root`, which ends with whoever starts it.

    volumes: (directory of this machine, where it is in the root).
    sealed: without a network, on a read-only root with an empty /tmp.
    """
    mounts = [f"mount --rbind {root} {root}"]
    for path in binds:
        made = (
            f"mkdir -p {root}{path}" if path.is_dir() else f"mkdir -p {root}{path.parent}; touch {root}{path}"
        )
        mounts += [made, f"mount --bind {path} {root}{path}", f"mount -o remount,bind,ro {root}{path}"]
    mounts += [f"mount --bind {source} {root}{target}" for source, target in volumes]
    if sealed:
        mounts += [
            f"mount -o remount,bind,ro {root}",
            f"mount -t tmpfs tmpfs {root}/tmp",
            "ip link set lo up",
        ]
    mounts += [f"mount --rbind /dev {root}/dev", f"mount -t proc proc {root}/proc"]
    mounts += [f"mount --bind -o ro /sys {root}/sys"]
    script = f'set -e; {"; ".join(mounts)}; exec "$@"'
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *(["--net"] if sealed else [])]
    return ["setpriv", "--pdeathsig", "KILL", *apart, "/bin/sh", "-c", script, "sh", *command]


class Container:
    """The image's entrypoint, running; ended with the `with` block."""

    def __init__(self, image: Image, data: Path, binds: Sequence[Path] = (), **environment: str) -> None:
        self.image = Image(**{**vars(image), "environment": {**image.environment, **environment}})
        command = enter(self.image, image.entrypoint)
        volumes = [(data, image.volumes[0])]
        self.process = subprocess.Popen(in_namespaces(image.root, command, binds, volumes, sealed=True))

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # the first process of its namespace goes with it, and so all the others
        self.process.wait()

    @property
    def first(self) -> int:
        """The process that is the first one inside. Raises TimeoutError where there is none."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for _ in range(300):
            if self.process.poll() is not None:
                break
            if found := children.read_text().split():
                return int(found[0])
            time.sleep(0.1)
        raise TimeoutError("nothing started inside")

    def run(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """What `docker exec` does."""
        inside = ["nsenter", "-t", str(self.first), "--mount", "--pid", "--net"]
        return subprocess.run(
            [*inside, *enter(self.image, command)], input=stdin, capture_output=True, text=True, check=False
        )

    def healthy(self) -> bool:
        """Whether the image's health check passes in time."""
        end = time.monotonic() + HEALTHY_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            time.sleep(1)
            if self.run(*self.image.health).returncode == 0:
                return True
        return False

    def stop(self) -> int:
        """What `docker stop` does; returns the exit status."""
        os.kill(self.first, 15)
        return self.process.wait(STOP_SECONDS)


KEY = "key of the first account of this check"
TALK = """
import httpx, sys
with httpx.Client(base_url="http://127.0.0.1:8000", trust_env=False, timeout=300) as http:
    form = {"name": "ann", "password": "correct horse battery", "key": sys.argv[1]}
    assert http.post("/setup", data=form).status_code == 303
    path = "/api/conversations/" + http.post("/api/conversations", json={}).json()["id"] + "/messages"
    question = {"content": "What is the capital of France?", "stream": False}
    reply = http.post(path, json=question).json()["reply"]
    assert reply["status"] == "complete", reply
    print(reply["content"])
    with http.stream("POST", path, json={"content": "Tell a very long story."}) as answer:
        for number, line in enumerate(answer.iter_lines()):
            if number > 60:
                break
"""
LAST = """
import sqlite3
query = "SELECT status, length(content) FROM messages ORDER BY created_at DESC, seq DESC"
print(*sqlite3.connect("file:/data/db/chat.sqlite3?mode=ro", uri=True).execute(query).fetchone())
"""


def check(image: Image, data: Path) -> None:
    """Start it, talk to it, stop it. Raises AssertionError."""
    begun = time.monotonic()
    with Container(image, data, TANGRAM_SETUP_KEY=KEY) as container:
        assert container.healthy(), "it did not get healthy"
        print(f"healthy after {time.monotonic() - begun:.0f} s")
        assert container.run("id", "-u").stdout.strip() == image.user
        assert "Read-only file system" in container.run("touch", "/x").stderr
        talked = container.run("python", "-", KEY, stdin=TALK)
        assert talked.returncode == 0, talked.stderr
        print(f"answered: {talked.stdout.strip()!r}")
        begun = time.monotonic()
        assert container.stop() == 0
        print(f"stopped after {time.monotonic() - begun:.1f} s")
    query = enter(image, ["python", "-c", LAST])
    command = in_namespaces(image.root, query, volumes=[(data, image.volumes[0])], sealed=True)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    status, length = done.stdout.split()
    assert status == "interrupted", done.stdout
    print(f"the reply that was being written is kept: {status}, {length} characters")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, and check what was built."""
    parser = argparse.ArgumentParser(prog="python -m tests.docker.chroot", description=__doc__)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("work", type=Path, help="a directory that is not there yet; 12 GB")
    parser.add_argument("--base", type=Path, help="a root file system to use instead of a new Debian")
    parser.add_argument("--bind", type=Path, action="append", default=[], help="a path that RUN sees")
    parser.add_argument("--torch-index", default="", help="as TORCH_INDEX of the build")
    chosen = parser.parse_args(arguments)
    work = chosen.work.absolute()
    work.mkdir(parents=True)
    base = chosen.base.absolute() if chosen.base else work / "base"
    if not chosen.base:
        include = "--include=ca-certificates,python3,python3-venv"
        subprocess.run(["debootstrap", "--variant=minbase", include, DEBIAN, str(base)], check=True)
    variables = {
        name: value for name, value in os.environ.items() if re.match(r"PIP_|\w+_proxy$", name, re.I)
    }
    shutil.copy("/etc/resolv.conf", base / "etc" / "resolv.conf")
    begun = time.monotonic()
    image = Builder(work, base, chosen.bind, variables).build(
        chosen.dockerfile, TORCH_INDEX=chosen.torch_index
    )
    print(f"built in {time.monotonic() - begun:.0f} s")
    data = work / "volume"
    subprocess.run(["cp", "-a", str(image.at(image.volumes[0])), str(data)], check=True)
    check(image, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())

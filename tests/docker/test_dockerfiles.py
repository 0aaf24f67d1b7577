"""The rules of a Dockerfile linter that matter here, each with a file that breaks it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.dockerfile import Instruction, expand, read
from tests.tree import ROOT

PREDEFINED = {"PATH"}
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL")
GOOD = """\
ARG BASE=debian:12.1
FROM ${BASE} AS build
WORKDIR /src
COPY one two ./
FROM ${BASE}
COPY --from=build /src /src
USER 10001
ENTRYPOINT ["sh"]
"""


def findings(path: Path) -> Iterator[str]:
    """What is wrong, one sentence each with its line. A step's own commands are in scripts, not looked at."""
    try:
        instructions = read(path)
    except ValueError as error:  # ADD, MAINTAINER, ONBUILD and SHELL are not used here
        yield str(error)
        return
    stages: list[str] = []
    outer: dict[str, str] = {}
    values: dict[str, str] = {}
    seen: dict[str, int] = {}
    user, folder = "root", ""
    for one in instructions:

        def wrong(words: str, one: Instruction = one) -> str:
            return f"line {one.line}: {words}"

        name, words = one.name, one.words()
        for used in re.findall(r"\$\{?(\w+)", one.rest):
            if used not in (values if stages and name != "FROM" else outer) and used not in PREDEFINED:
                yield wrong(f"{used} has no value in this stage")
        if name == "FROM":
            image = expand(words[0], outer)
            if not re.search(r"(:[\w.-]*\d[\w.-]*|@sha256:\w{64})$", image) and image not in stages:
                yield wrong(f"{image} is not pinned to a version")
            alias = words[2] if len(words) == 3 and words[1] == "AS" else f"stage {len(stages)}"
            if alias in stages:
                yield wrong(f"there are two stages {alias}")
            stages.append(alias)
            values, seen, user, folder = {}, {}, "root", ""
        elif name in ("ARG", "ENV"):
            given = one.pairs() if name == "ENV" else {words[0].split("=")[0]: one.rest.partition("=")[2]}
            for variable, value in given.items():
                if SECRET.search(variable):
                    yield wrong(f"{variable} would stay in the image for all to read")
                if name == "ENV" and any(
                    re.search(rf"\$\{{?{other}\b", value) for other in given if other != "PATH"
                ):
                    yield wrong(f"{variable} uses a variable of the same instruction, which has no value yet")
            (values if stages else outer).update(
                {key: value or outer.get(key, "") for key, value in given.items()}
            )
        elif name == "COPY":
            *sources, target = words
            if (len(sources) > 1 or any("*" in source for source in sources)) and not target.endswith("/"):
                yield wrong(f"several files go to {target}, which must end with /")
            if not target.startswith("/") and not folder:
                yield wrong(f"{target} is relative, and there is no WORKDIR")
            if one.flags.get("from", stages[0]) not in stages[:-1] + (
                [stages[0]] if "from" not in one.flags else []
            ):
                yield wrong(f"there is no earlier stage {one.flags['from']}")
        elif name == "RUN":
            if re.search(r"\bsudo\b|(^|&&|;)\s*cd\s|\bapt(-get)?\s|\bpip\s|\bcurl\b|\bwget\b", one.rest):
                yield wrong("commands belong into a script under docker/steps")
        elif name == "WORKDIR":
            folder = one.rest
            if not folder.startswith("/"):
                yield wrong(f"WORKDIR {folder} is relative")
        elif name == "EXPOSE":
            if any(not port.isdigit() or not 0 < int(port) < 65536 for port in words):
                yield wrong(f"{one.rest} is no port")
        elif name == "USER":
            user = one.rest
        if name in ("CMD", "ENTRYPOINT", "HEALTHCHECK"):
            if not one.rest.removeprefix("CMD ").startswith("["):
                yield wrong(f"{name} is not a list: a shell would stand before it and keep signals to itself")
            if name in seen:
                yield wrong(f"{name} again: only the last one counts")
            seen[name] = one.line
    if not user.isdigit() or user == "0":
        yield f"the last user is {user}, not the number of one without rights"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_ours_keep_them(name: str) -> None:
    assert list(findings(ROOT / "docker" / name)) == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", None),
        ("debian:12.1", "debian", "is not pinned"),
        ("debian:12.1", "debian:latest", "is not pinned"),
        ("FROM ${BASE}\n", "FROM ${OTHER}\n", "OTHER has no value"),
        ("USER 10001", "USER 10001\nARG X\nLABEL a=${BASE}", "BASE has no value in this stage"),
        ("FROM ${BASE}\n", "FROM ${BASE} AS build\n", "two stages build"),
        ("WORKDIR /src", "WORKDIR src", "is relative"),
        ("WORKDIR /src\n", "", "there is no WORKDIR"),
        ("two ./", "two .", "must end with /"),
        ("--from=build", "--from=other", "no earlier stage other"),
        ("--from=build", "--from=stage 1".replace(" ", "-"), "no earlier stage"),
        ("COPY one", "ADD one", "ADD is not known"),
        ("USER 10001", "MAINTAINER me", "MAINTAINER is not known"),
        ("USER 10001\n", "", "the last user is root"),
        ("USER 10001", "USER 0", "the last user is 0"),
        ("USER 10001", "RUN apt-get install x\nUSER 10001", "into a script"),
        ("USER 10001", "RUN a && cd /b\nUSER 10001", "into a script"),
        ("USER 10001", "ENV HF_TOKEN=x\nUSER 10001", "for all to read"),
        ("USER 10001", "ARG DB_PASSWORD\nUSER 10001", "for all to read"),
        ("USER 10001", "ENV A=1 B=$A\nUSER 10001", "of the same instruction"),
        ("USER 10001", "EXPOSE 80000\nUSER 10001", "is no port"),
        ('["sh"]', "sh", "is not a list"),
        ('["sh"]', '["sh"]\nENTRYPOINT ["b"]', "only the last one counts"),
        ('["sh"]', '["sh"] \\', "goes on after the end"),
    ],
)
def test_each_rule_finds_what_breaks_it(tmp_path: Path, old: str, new: str, found: str | None) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(GOOD.replace(old, new, 1) if old else GOOD)
    said = list(findings(path))
    assert bool(said) == (found is not None), said
    assert not found or any(found in line for line in said), said


@pytest.mark.parametrize("path", sorted((ROOT / "docker").rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_end_at_the_first_failure(path: Path) -> None:
    text = path.read_text()
    strict = "set -euo pipefail" if text.startswith("#!/usr/bin/env bash\n") else "set -eu"
    assert text.startswith(("#!/usr/bin/env bash\n", "#!/bin/sh\n"))
    assert f"\n{strict}\n" in text


def test_packages_leave_nothing_behind() -> None:
    step = (ROOT / "docker" / "steps" / "packages.sh").read_text()
    assert "apt-get install -y --no-install-recommends" in step
    assert "rm -rf /var/lib/apt/lists/*" in step
    for name in ("Dockerfile", "Dockerfile.cpu"):
        first = next(one for one in read(ROOT / "docker" / name) if one.name == "ENV")
        assert first.pairs() == {"PIP_NO_CACHE_DIR": "1"}

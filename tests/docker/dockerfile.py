"""Reads Dockerfiles: the part of their language that ours use. An instruction of another kind is an error."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.tree import ROOT

KNOWN = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "STOPSIGNAL",
    "USER", "VOLUME", "WORKDIR",
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, the flags before its arguments (--from=build), the rest, its first line."""

    name: str
    flags: dict[str, str]
    rest: str
    line: int

    def words(self) -> list[str]:
        """The arguments apart."""
        return self.rest.split()

    def pairs(self) -> dict[str, str]:
        """NAME=VALUE arguments, as of ENV and LABEL."""
        found = re.findall(r'([\w.-]+)=(?:"([^"]*)"|(\S*))', self.rest)
        return {name: quoted or plain for name, quoted, plain in found}


def read(path: Path) -> list[Instruction]:
    """The instructions of a file: continued lines joined, comments left out. Raises ValueError."""
    found: list[Instruction] = []
    joined, first = "", 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        first = first or number
        joined += line.strip().removesuffix("\\").rstrip() + " "
        if not line.rstrip().endswith("\\"):
            found.append(_instruction(joined.strip(), first))
            joined, first = "", 0
    if joined:
        raise ValueError(f"line {first} goes on after the end")
    return found


def _instruction(text: str, line: int) -> Instruction:
    name, _, rest = text.partition(" ")
    if name not in KNOWN:
        raise ValueError(f"line {line}: {name} is not known here")
    flags = {}
    while match := re.match(r"--([\w-]+)(?:=(\S+))?\s+", rest):
        flags[match[1]] = match[2] or ""
        rest = rest[match.end() :]
    return Instruction(name, flags, rest.strip(), line)


def expand(text: str, values: Mapping[str, str]) -> str:
    """Fill in ${NAME} and $NAME; what has no value is empty."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: values.get(match[1] or match[2], ""), text)


def included(path: str, context: Path = ROOT) -> bool:
    """Whether .dockerignore lets a path of the tree through to the builder."""
    let_through = True
    for rule in (context / ".dockerignore").read_text().splitlines():
        if rule and not rule.startswith("#"):
            pattern = rule.removeprefix("!").removeprefix("**/")
            parts = path.split("/")
            if any(fnmatch.fnmatch(part, pattern) for part in (parts if "**/" in rule else parts[:1])):
                let_through = rule.startswith("!")
    return let_through

"""The words, sentences and pieces of code that built-in samples are composed of, all of our own writing.

A file is cut into sections by lines ``== name``, whose items are lines, or into blocks by lines ``%%``.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def _text(name: str) -> str:
    return (files("tangram.calibration") / "texts" / name).read_text(encoding="utf-8")


@cache
def section(file: str, name: str) -> tuple[str, ...]:
    """The lines of a section."""
    _, _, rest = _text(file).partition(f"== {name}\n")
    return tuple(line for line in rest.partition("\n== ")[0].splitlines() if line)


@cache
def blocks(file: str) -> tuple[str, ...]:
    """The blocks of a file, without the line breaks around them."""
    return tuple(block.strip("\n") for block in _text(file).split("\n%%\n"))


def words(name: str) -> tuple[str, ...]:
    """A list of words or names."""
    return section("words.txt", name)


def sentences(name: str) -> tuple[str, ...]:
    """A list of sentences with places to fill."""
    return section("sentences.txt", name)

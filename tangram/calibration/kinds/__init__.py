"""Texts of five kinds, composed from sentences of our own by a seeded generator.

Each module has ``write(draw)``, an endless iterator of passages (a paragraph, a turn, a function ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from tangram.calibration.kinds import code, dialogue, facts, prose, tables

KINDS: dict[str, Callable[[Random], Iterator[str]]] = {
    "prose": prose.write,
    "dialogue": dialogue.write,
    "code": code.write,
    "tables": tables.write,
    "facts": facts.write,
}

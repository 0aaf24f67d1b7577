"""What an evaluation of profiles found: its figures, and what may be said of them.

The result of ``tangram evaluate`` is one JSON object: ``everything`` (the whole cache) and each of
``profiles`` have ``right`` of ``asked`` answers, ``answer_loss`` (nats an answer, mean) and ``text_loss``
(nats a token). Each of ``profiles`` has the ``scorer`` in force with it, which the setting ``auto`` leaves to
the profile. ``difference`` compares the first profile with the second. Without torch: the console reads it
too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tangram.calibration.statistics import interval_of_mean, sign_test

FORMAT, VERSION = "tangram-evaluation", 1
CHANCE = 0.05
"""A difference that chance would make more often than this is none that could be told."""


@dataclass(frozen=True)
class Figures:
    """One way to keep the cache.

    Attributes:
        right: of each question, whether its answer would have been said.
        answers: loss of each answer, nats.
        blocks: mean loss of each block of text, nats a token.
    """

    right: tuple[bool, ...]
    answers: tuple[float, ...]
    blocks: tuple[float, ...]

    @classmethod
    def joined(cls, parts: Sequence[Figures]) -> Figures:
        """Those of several passages."""
        return cls(
            tuple(one for part in parts for one in part.right),
            tuple(one for part in parts for one in part.answers),
            tuple(one for part in parts for one in part.blocks),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "right": sum(self.right),
            "asked": len(self.right),
            "answer_loss": sum(self.answers) / len(self.answers),
            "text_loss": sum(self.blocks) / len(self.blocks),
        }


@dataclass(frozen=True)
class Interval:
    """A mean difference, first less second, and its 95% interval."""

    mean: float
    low: float
    high: float

    @property
    def told(self) -> bool:
        """Whether it lies on one side of zero."""
        return self.low > 0 or self.high < 0


def file_hash(path: Path) -> str:
    """Of a profile's file: what was found holds for this file only."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def difference(first: Figures, second: Figures) -> dict[str, Any]:
    """Pair by pair, as both were asked the same."""
    pairs = list(zip(first.right, second.right, strict=True))
    only = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    return {
        "first_only": only[0],
        "second_only": only[1],
        "chance": sign_test(*only),
        "answer_loss": asdict(_interval(first.answers, second.answers)),
        "text_loss": asdict(_interval(first.blocks, second.blocks)),
    }


def sentences(found: Mapping[str, Any], first: str, second: str) -> list[str]:
    """What may be said of the first of two profiles against the second, by the names that they go by."""
    apart = found["difference"]
    whole, asked = found["everything"], found["everything"]["asked"]
    said = []
    if not whole["right"]:
        said.append(
            f"This model cannot answer the probe even with everything kept (0 of {asked}); loss is compared "
            "instead."
        )
    elif apart["chance"] >= CHANCE:
        said.append(f"No difference can be told from {asked} answers.")
    else:
        better = first if apart["first_only"] > apart["second_only"] else second
        few, many = sorted((apart["first_only"], apart["second_only"]))
        said.append(
            f"More answers are right with {better}: {many} that the other misses, {few} the other way round, "
            f"of {asked}."
        )
    for name, what, unit in (
        ("answer_loss", "The loss of the answers", "nats an answer"),
        ("text_loss", "The loss of other text", "nats a token"),
    ):
        one = Interval(**apart[name])
        reach = f"{one.mean:+.3f} {unit} with {first} (95% interval {one.low:+.3f} to {one.high:+.3f})"
        lower = first if one.mean < 0 else second
        told = f"lower with {lower}" if one.told else "no difference can be told"
        said.append(f"{what}: {reach}: {told}.")
    return said


def _interval(first: Sequence[float], second: Sequence[float]) -> Interval:
    return Interval(*interval_of_mean([a - b for a, b in zip(first, second, strict=True)]))

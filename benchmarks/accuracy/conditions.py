"""What is compared: how much is kept, by which budgets, ranked by which score, run by what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.accuracy.samples import DIALOGUE
from benchmarks.accuracy.tasks import TASKS

METHODS = ("keydiff", "expected_attention", "snapkv")
"""Scorers whose static budgets are compared with dynamic ones."""
PRESSES = ("KVzip", "AdaKV-KeyDiff", "AdaKV-SnapKV", "KeyDiff", "SnapKV")
LOSS = "loss"
RETRIEVAL = ("single", "multi_key", "multi_value")
MAIN = ("multi_key", "single", LOSS, "multi_value", DIALOGUE, "people", "tracking", "common_words")
"""The cells of most conditions, the most telling ones first."""
PEER = ("multi_key", "single", "multi_value", "people")
OFFLINE = (*PEER, LOSS)
"""Those of what runs one sample at a time."""


@dataclass(frozen=True)
class Condition:
    """One row of the tables.

    Attributes:
        runs: ``engine``: the real one; ``replay``: offline, by :mod:`benchmarks.accuracy.replay`; ``kvpress``.
        budgets: full, profile, uniform, shuffled (the profile's heads permuted), dynamic (found per input
            by the scorer's own scores), or own (a profile calibrated with the scorer itself as the oracle).
        scorer: one of the engine's, or a name of :data:`PRESSES`.
    """

    runs: str
    budgets: str
    retention: float
    scorer: str = "keydiff"

    @property
    def name(self) -> str:
        """As tables and files have it."""
        if self.budgets == "full":
            return "full"
        parts = [] if self.runs == "engine" else [self.runs]
        parts += [self.budgets] if self.runs != "kvpress" else []
        return " ".join([*parts, self.scorer, f"{self.retention:g}"])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


FULL = Condition("engine", "full", 1.0)


@dataclass(frozen=True)
class Cell:
    """One task at one length: so many samples are one number of a table."""

    task: str
    length: int

    @property
    def name(self) -> str:
        """As tables and files have it."""
        return f"{self.task}@{self.length}"


@dataclass(frozen=True)
class Job:
    """What one child process runs: one condition on one model.

    Attributes:
        rank: the lower, the earlier.
    """

    rank: int
    condition: Condition
    cells: tuple[Cell, ...]


def quarter(own: Sequence[str]) -> Iterator[tuple[Condition, tuple[str, ...]]]:
    """At retention 0.25, what the bars are about first."""
    yield FULL, MAIN
    for budgets in ("profile", "uniform", "shuffled"):
        yield Condition("engine", budgets, 0.25), MAIN
    for method in METHODS:
        yield Condition("replay", "dynamic", 0.25, method), OFFLINE
    for method in METHODS[1:]:
        yield Condition("engine", "profile", 0.25, method), MAIN
    for press in PRESSES:
        yield Condition("kvpress", "press", 0.25, press), PEER
    for method in METHODS[1:]:
        yield Condition("engine", "uniform", 0.25, method), MAIN
    for method in own:
        yield Condition("engine", "own", 0.25, method), MAIN
    yield Condition("replay", "profile", 0.25), ("multi_key",)


def others() -> Iterator[tuple[Condition, tuple[str, ...]]]:
    """Other retentions."""
    for retention in (0.125, 0.5):
        for budgets in ("profile", "uniform"):
            yield Condition("engine", budgets, retention), MAIN
    for method in METHODS[1:]:
        yield Condition("engine", "profile", 0.125, method), RETRIEVAL
    for method in METHODS:
        yield Condition("replay", "dynamic", 0.125, method), RETRIEVAL


def plan(length: int, long: Sequence[int], own: Sequence[str] = ()) -> list[Job]:
    """All jobs of a model, the most important ones first.

    Args:
        length: of most cells.
        long: further lengths, of some.
        own: methods that have a profile of their own.
    """
    first, second = list(quarter(own)), list(others())
    four = first[:4]
    longer = [(condition, RETRIEVAL) for condition, _ in four if condition.budgets != "shuffled"]
    jobs = [
        (condition, tuple(Cell(task, length) for task in tasks)) for condition, tasks in [*first, *second]
    ]
    if long:
        extra = [(c, tuple(Cell(task, size) for size in long for task in tasks)) for c, tasks in longer]
        at = len(four) + len(METHODS) + 2
        jobs[at:at] = extra
    return [Job(rank, *job) for rank, job in enumerate(jobs)]


def every_task() -> tuple[str, ...]:
    """All names that a cell can have."""
    return (*TASKS, DIALOGUE, LOSS)

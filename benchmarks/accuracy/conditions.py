"""What is compared: how much is kept, by which budgets, ranked by which score, run by what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.accuracy.samples import DIALOGUE
from benchmarks.accuracy.tasks import TASKS
from tangram.config import WITH_QUERIES, WITHOUT_QUERIES

DEFAULT = WITH_QUERIES
"""The engine's default with a profile of the release."""
METHODS = (DEFAULT, WITHOUT_QUERIES, "keydiff", "expected_attention", "snapkv")
"""Scorers that are measured with budgets of the profile."""
DYNAMIC = ("keydiff", "expected_attention", "snapkv")
"""Those whose static budgets are compared with dynamic ones: their scores can be compared between heads, as
places within a head cannot."""
PRESSES = ("KVzip", "AdaKV-KeyDiff", "AdaKV-SnapKV", "KeyDiff", "SnapKV")
LOSS = "loss"
RETRIEVAL = ("single", "multi_key", "multi_value")
MAIN = (
    "multi_key",
    "single",
    "many_keys",
    "multi_value",
    "near_keys",
    DIALOGUE,
    "people",
    "tracking",
    "common_words",
    LOSS,
)
"""The cells of most conditions, the most telling ones first."""
FEWER = ("multi_key", "single", "many_keys", "multi_value", "people", LOSS)
"""Those of other scorers than the default."""
FIRST, THEN = ("multi_key", "single"), ("multi_value", "people")
"""Those of what runs one sample at a time: in two jobs, so that the first ones do not wait for the others."""


@dataclass(frozen=True)
class Condition:
    """One row of the tables.

    Attributes:
        runs: ``engine``: the real one; ``replay``: offline, by :mod:`tangram.calibration.replay`;
        ``kvpress``. budgets: full, profile, uniform, shuffled (the profile's heads permuted), dynamic
        (found per input by the scorer's own scores), or own (a profile calibrated with the scorer itself as
        the oracle).
        scorer: one of the engine's, or a name of :data:`PRESSES`.
    """

    runs: str
    budgets: str
    retention: float
    scorer: str = DEFAULT

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


Row = tuple[Condition, tuple[str, ...]]


def budgets_at(retention: float, *names: str) -> list[Row]:
    """The default scorer with these budgets."""
    return [(Condition("engine", name, retention), MAIN) for name in names]


def methods(own: Sequence[str]) -> Iterator[Row]:
    """At 0.25: each scorer with budgets of the profile, found for each input, and equal ones; and kvpress."""
    dynamic = [Condition("replay", "dynamic", 0.25, method) for method in DYNAMIC]
    presses = [Condition("kvpress", "press", 0.25, press) for press in PRESSES]
    yield from ((condition, FIRST) for condition in dynamic)
    for method in METHODS[1:]:
        yield Condition("engine", "profile", 0.25, method), MAIN if method == WITHOUT_QUERIES else FEWER
    yield from ((condition, FIRST) for condition in presses)
    yield from ((Condition("engine", "uniform", 0.25, method), FEWER) for method in METHODS[1:])
    yield from ((Condition("engine", "own", 0.25, method), FEWER) for method in own)
    yield from ((condition, (*THEN, LOSS)) for condition in dynamic)
    yield from ((condition, THEN) for condition in presses)
    yield Condition("replay", "profile", 0.25), FIRST[:1]


def eighth() -> Iterator[Row]:
    """Other scorers at 0.125."""
    yield from ((Condition("engine", "profile", 0.125, method), RETRIEVAL) for method in METHODS[1:])
    yield from ((Condition("replay", "dynamic", 0.125, method), FIRST) for method in DYNAMIC)


def plan(length: int, long: Sequence[int], own: Sequence[str] = (), whole: bool = True) -> list[Job]:
    """All jobs of a model, the most important ones first.

    Args:
        length: of most cells.
        long: further lengths, of some.
        own: methods that have a profile of their own.
        whole: also what shows no more than that another model behaves alike: scorers, lengths, kvpress.
    """
    rows: list[Row] = [(FULL, MAIN), *budgets_at(0.25, "profile", "uniform", "shuffled")]
    rows += budgets_at(0.125, "profile", "uniform")
    scorers = list(methods(own)) if whole else []
    first = len(DYNAMIC) + len(METHODS) - 1 + len(PRESSES)
    rows += scorers[:first]
    jobs = [(condition, tuple(Cell(task, length) for task in tasks)) for condition, tasks in rows]
    if long and whole:
        # A job for each length: the longest one takes as long as all else.
        for size in sorted(long):
            cells = tuple(Cell(task, size) for task in RETRIEVAL)
            jobs += [(condition, cells) for condition, _ in rows[:3]]
    rows = [*budgets_at(0.5, "profile", "uniform"), *scorers[first:]]
    rows += list(eighth()) if whole else []
    jobs += [(condition, tuple(Cell(task, length) for task in tasks)) for condition, tasks in rows]
    return [Job(rank, *job) for rank, job in enumerate(jobs)]


def every_task() -> tuple[str, ...]:
    """All names that a cell can have."""
    return (*TASKS, DIALOGUE, LOSS)

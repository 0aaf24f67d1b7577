"""From answers to numbers: one for each model, condition and cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.accuracy.answers import Row
from benchmarks.accuracy.scoring import wilson
from tangram.calibration.statistics import interval_of_mean


@dataclass(frozen=True)
class Figure:
    """One number of a table.

    Attributes:
        value: a mean score from 0 to 1, or a loss in nats.
        low, high: its 95% interval: Wilson's for scores, of the mean for losses.
        count: conversations (or texts).
        kept: the share of the history that is kept.
        resumed: the share of the questions' prompts that was still in the cache.
    """

    model: str
    condition: str
    cell: str
    value: float
    low: float
    high: float
    count: int
    kept: float
    seconds: float
    resumed: float | None = None

    @property
    def is_loss(self) -> bool:
        """Whether it is a loss rather than a score."""
        return self.cell.startswith("loss@")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def latest(rows: Iterable[Row]) -> list[Row]:
    """One row for each cell: that of the most samples, of equal ones the last."""
    best: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = (row["model"], row["condition"], row["cell"])
        if key not in best or row["samples"] >= best[key]["samples"]:
            best[key] = row
    return list(best.values())


def figure_of(row: Row) -> Figure:
    """The mean over conversations; of a dialogue each counts once, with the mean of its answers, since the
    answers of one conversation are not independent."""
    answers = row["answers"]
    common = (row["model"], row["condition"], row["cell"])
    if row["cell"].startswith("loss@"):
        mean, low, high = interval_of_mean([answer["loss"] for answer in answers])
        return Figure(*common, mean, low, high, len(answers), row["kept"], row["seconds"])
    scores = list(by_seed(answers).values())
    mean = sum(scores) / len(scores)
    low, high = wilson(mean, len(scores))
    prompts = sum(answer["prompt"] for answer in answers)
    resumed = sum(answer["cached"] for answer in answers) / prompts if prompts else None
    return Figure(*common, mean, low, high, len(scores), row["kept"], row["seconds"], resumed)


def by_seed(answers: Sequence[Row]) -> dict[int, float]:
    """Mean score, or loss, of each conversation."""
    found: dict[int, list[float]] = {}
    for answer in answers:
        found.setdefault(answer["seed"], []).append(answer["score"] if "score" in answer else answer["loss"])
    return {seed: sum(values) / len(values) for seed, values in found.items()}


def paired(one: Row, base: Row) -> tuple[float, float, float]:
    """Mean difference ``one - base`` over the samples that both have, and its 95% interval: both answered
    the same questions, so the interval is narrower than that of either."""
    a, b = by_seed(one["answers"]), by_seed(base["answers"])
    return interval_of_mean([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])


def by_turn(row: Row) -> dict[tuple[int, str], list[float]]:
    """Scores of a dialogue by turn and whose fact was asked for."""
    found: dict[tuple[int, str], list[float]] = {}
    for answer in row["answers"]:
        found.setdefault((answer["turn"], answer["about"]), []).append(answer["score"])
    return found

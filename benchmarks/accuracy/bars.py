"""The bars that the issue sets, judged by the figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.accuracy.answers import Row
from benchmarks.accuracy.cells import figure_of, paired
from benchmarks.accuracy.conditions import DEFAULT, DYNAMIC

LEAST_SAMPLES = 50


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        met: None where its figures are missing.
    """

    name: str
    figures: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """In a word."""
        return {True: "met", False: "MISSED", None: "not measured"}[self.met]


class Judge:
    """The bars of one model at one length.

    Args:
        rows: the latest rows of all models.
    """

    def __init__(self, rows: list[Row], model: str, length: int) -> None:
        self.model, self.length = model, length
        self.rows = {(row["condition"], row["cell"]): row for row in rows if row["model"] == model}

    def row(self, condition: str, task: str) -> Row | None:
        """None where it was not measured."""
        return self.rows.get((condition, f"{task}@{self.length}"))

    def value(self, condition: str, task: str) -> float | None:
        """The mean score or loss."""
        row = self.row(condition, task)
        return None if row is None else figure_of(row).value

    def _bar(
        self, name: str, needs: dict[str, float | None], met: Callable[..., bool], note: str = ""
    ) -> Bar:
        figures = ", ".join(f"{what} {'-' if v is None else f'{v:.3f}'}" for what, v in needs.items())
        missing = any(value is None for value in needs.values())
        verdict = None if missing else bool(met(*needs.values()))
        return Bar(name, figures + note, verdict)

    def share_of_full(self, condition: str, task: str, share: float) -> Bar:
        """A score that is at least so much of the full cache's."""
        needs = {condition: self.value(condition, task), "full": self.value("full", task)}
        return self._bar(
            f"{task}: {condition} at least {share:.0%} of full", needs, lambda one, full: one >= share * full
        )

    def times_uniform(self, task: str, times: float) -> Bar:
        """Calibrated budgets beside equal ones."""
        names = (f"profile {DEFAULT} 0.25", f"uniform {DEFAULT} 0.25")
        needs = {name: self.value(name, task) for name in names}
        return self._bar(
            f"{task}: {names[0]} at least {times:g} times uniform",
            needs,
            lambda a, b: a > 0 and a >= times * b,
        )

    def loss(self, most: float) -> Bar:
        """The mean difference on the same texts."""
        one, full = self.row(f"profile {DEFAULT} 0.25", "loss"), self.row("full", "loss")
        name = f"loss: profile {DEFAULT} 0.25 within {most:g} nats of full"
        if one is None or full is None:
            return Bar(name, "-", None)
        mean, low, high = paired(one, full)
        return Bar(name, f"difference {mean:+.4f} ({low:+.4f} to {high:+.4f})", mean <= most)

    def static(self, method: str, task: str, points: float, retention: float = 0.25) -> Bar:
        """Budgets of the profile beside budgets found for each input."""
        names = (f"profile {method} {retention:g}", f"replay dynamic {method} {retention:g}")
        needs = {name: self.value(name, task) for name in names}
        return self._bar(
            f"{task}: static {method} at most {100 * points:g} points below dynamic",
            needs,
            lambda a, b: a >= b - points - 1e-9,
        )

    def shuffled(self, task: str) -> Bar:
        """The control: the same budgets for other heads must fail, that is, fall below half of the
        profile's."""
        names = (f"shuffled {DEFAULT} 0.25", f"profile {DEFAULT} 0.25")
        needs = {name: self.value(name, task) for name in names}
        return self._bar(
            f"{task}: shuffled budgets fail (under half of the profile's)", needs, lambda a, b: a < b / 2
        )

    def ordering(self) -> Bar:
        """Full, profile, uniform and shuffled budgets come in this order."""
        names = ("full", f"profile {DEFAULT} 0.25", f"uniform {DEFAULT} 0.25", f"shuffled {DEFAULT} 0.25")
        needs = {name: self.value(name, "multi_key") for name in names}

        def ordered(full: float, profile: float, uniform: float, shuffled: float) -> bool:
            return full >= profile - 0.03 and profile > uniform and profile > shuffled

        return self._bar("multi_key: the ordering full, profile, then uniform and shuffled", needs, ordered)

    def bars(self, main: bool) -> list[Bar]:
        """All bars; of another model than the main one the ordering only."""
        if not main:
            return [self.ordering(), self.shuffled("multi_key")]
        quarter, eighth = f"profile {DEFAULT} 0.25", f"profile {DEFAULT} 0.125"
        return [
            self.share_of_full(quarter, "single", 0.95),
            self.share_of_full(quarter, "multi_key", 0.85),
            self.times_uniform("multi_key", 4.0),
            self.loss(0.02),
            *(self.static(method, "multi_key", 0.03) for method in DYNAMIC),
            *(self.static(method, "single", 0.03) for method in DYNAMIC),
            self.share_of_full(eighth, "multi_key", 0.50),
            self.shuffled("multi_key"),
            self.ordering(),
        ]

    def enough(self) -> Bar:
        """Samples of the cells that the bars read."""
        counts = {
            f"{condition} {task}": row["samples"]
            for (condition, cell), row in self.rows.items()
            for task in [cell.partition("@")[0]]
            if condition in ("full", f"profile {DEFAULT} 0.25") and cell == f"{task}@{self.length}"
        }
        least = min(counts.values(), default=0)
        return Bar(
            f"at least {LEAST_SAMPLES} samples a cell for full and 0.25",
            f"least {least} of {len(counts)} cells",
            least >= LEAST_SAMPLES if counts else None,
        )

"""The table of ``benchmarks/cuda_decode.py`` and its bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
COLUMNS = ("ours", "even", "fa3", "fa3_even", "fa3_stock", "flashinfer", "flashinfer_plan", "flashinfer_run")
"""Keys of a row's times, in the order of the table."""
TITLES = ("ours", "even", "fa3", "fa3 even", "fa3 stock", "fi", "fi plan", "fi run")


@dataclass(frozen=True)
class Bar:
    """A figure and its bound; ``least`` says on which side of it the figure must lie."""

    name: str
    value: float
    bound: float
    least: bool

    @property
    def passed(self) -> bool:
        """Whether it holds."""
        return self.value >= self.bound if self.least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.least else "<="
        return f"{'pass' if self.passed else 'MISS'}  {self.name}: {self.value:.3f} ({sign} {self.bound:g})"


def of_copy(row: Row) -> float:
    """Our bandwidth to the copy's."""
    return row["bytes"] / row["us"]["ours"] * 1e6 / row["copy_bytes_a_second"]


def to_even(row: Row) -> float:
    """Our time a byte to that on evenly spread budgets."""
    return (row["us"]["ours"] / row["bytes"]) / (row["us"]["even"] / row["even_bytes"])


def heading() -> str:
    """The table's first line."""
    names = "".join(f"{title:>10}" for title in TITLES)
    return f"budgets  context  batch  kept    GB/s  of copy  spread/even{names}   us a layer"


def line(row: Row) -> str:
    """A row of the table."""
    times = "".join(f"{row['us'][key]:10.1f}" if key in row["us"] else f"{'-':>10}" for key in COLUMNS)
    rate = row["bytes"] / row["us"]["ours"] / 1000
    return (
        f"{row['budgets']:7} {row['context']:8d} {row['batch']:6d} {row['retention']:5.2f} {rate:7.0f}"
        f" {of_copy(row):8.2f} {to_even(row):12.3f}{times}"
    )


def has_bars(row: Row) -> bool:
    """Whether the row is one of those that are judged."""
    return bool(row["context"] == 32768 and row["retention"] == 0.25 and row["batch"] in (64, 8))


def ways(row: Row) -> str:
    """Which way of calling each peer was the fastest, and how far its output was from ours at most."""
    chosen = [f"{name}: {row['how'][name]}" for name in COLUMNS[2:] if name in row["how"]]
    errors = [f"{error:.1e}" for error in [max(row["relative_errors"].values(), default=0.0)] if error]
    differ = f"; outputs differ by at most {errors[0]}" if errors else ""
    return f"{row['budgets']} budgets, batch {row['batch']}: {'; '.join(chosen) or 'no peers'}{differ}"


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The bars of every row that has one: 32k tokens, a quarter kept, batches of 64 and 8."""
    judged: list[Bar] = []
    for row in rows:
        if not has_bars(row):
            continue
        times, where = row["us"], f"{row['budgets']} budgets, batch {row['batch']}"
        if row["batch"] == 64:
            judged.append(Bar(f"{where}: bandwidth to the copy's", of_copy(row), 0.9, least=True))
            judged.append(Bar(f"{where}: time to evenly spread budgets'", to_even(row), 1.05, least=False))
        if "fa3" in times:
            bound = 1.15 if row["batch"] == 64 else 1.2
            name = f"{where}: FlashAttention 3's time, one sequence a head, to ours"
            judged.append(Bar(name, times["fa3"] / times["ours"], bound, least=True))
        if "flashinfer" in times and row["batch"] == 64:
            name = f"{where}: FlashInfer's time, planning counted, to ours, both by the host's clock"
            judged.append(Bar(name, times["flashinfer"] / times["ours_host"], 1.0, least=True))
    return judged

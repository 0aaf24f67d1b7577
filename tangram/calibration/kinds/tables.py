"""Lists and tables: inventories, timetables, steps, results, what to bring."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tangram.calibration.texts import sentences, words


def _inventory(draw: Random) -> str:
    title = f"Stock of the {draw.choice(words('places'))}, {draw.choice(words('months'))}"
    lines = [f"## {title}", "", "| number | item | pieces | price |", "|---|---|---|---|"]
    for thing in draw.sample(words("things"), draw.randint(5, 9)):
        number, pieces, price = draw.randint(10000, 99999), draw.randint(0, 240), draw.randint(100, 9900)
        lines.append(f"| {number} | {thing} | {pieces} | {price / 100:.2f} |")
    return "\n".join(lines)


def _timetable(draw: Random) -> str:
    minutes = draw.randint(300, 600)
    lines = [f"Line {draw.randint(1, 90)}, weekdays from the {draw.choice(words('places'))}"]
    for town in draw.sample(words("towns"), draw.randint(5, 8)):
        minutes += draw.randint(7, 70)
        clock = f"{minutes // 60:02d}:{minutes % 60:02d}"
        lines.append(f"{town:<14} arr {clock}   platform {draw.randint(1, 12)}")
    return "\n".join(lines)


def _steps(draw: Random) -> str:
    lines = [f"Procedure {draw.choice('KLMNPQ')}-{draw.randint(10, 99)}:"]
    for number, step in enumerate(draw.sample(sentences("steps"), draw.randint(5, 8)), start=1):
        filled = step.format(
            p=draw.choice(words("places")),
            n=draw.randint(2, 99),
            t=draw.choice(words("trades")),
            x=draw.choice(words("things")),
            a=draw.choice(words("first")),
        )
        lines.append(f"{number}. {filled}")
    return "\n".join(lines)


def _results(draw: Random) -> str:
    lines = ["name,town,first,second,total"]
    for _ in range(draw.randint(6, 10)):
        first, second = draw.randint(10, 99), draw.randint(10, 99)
        name = f"{draw.choice(words('first'))} {draw.choice(words('last'))}"
        lines.append(f"{name},{draw.choice(words('towns'))},{first},{second},{first + second}")
    return "\n".join(lines)


def _bring(draw: Random) -> str:
    lines = [f"To bring to the {draw.choice(words('places'))}:"]
    for _ in range(draw.randint(5, 10)):
        where = f"{draw.choice(words('towns'))}, {draw.choice(words('months'))} {draw.randint(1, 28)}"
        lines.append(f"- {draw.choice(words('first'))}: {draw.choice(words('things'))} ({where})")
    return "\n".join(lines)


SHAPES = (_inventory, _timetable, _steps, _results, _bring)


def write(draw: Random) -> Iterator[str]:
    """Tables and lists, each in another shape than the one before."""
    while True:
        for shape in draw.sample(SHAPES, len(SHAPES)):
            yield shape(draw)

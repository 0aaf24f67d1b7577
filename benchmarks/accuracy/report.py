"""Tables in Markdown, bars, and a summary that the figures of the documentation are drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.accuracy.answers import Row
from benchmarks.accuracy.bars import Bar, Judge
from benchmarks.accuracy.cells import Figure, by_turn, figure_of, latest, paired
from benchmarks.accuracy.samples import DIALOGUE

MAIN_MODEL = "qwen2.5-0.5b"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    rows = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*rows, *(f"| {' | '.join(line)} |" for line in lines)])


def percent(figure: Figure | None) -> str:
    """A score and its interval."""
    if figure is None:
        return "-"
    return f"{100 * figure.value:.0f} ({100 * figure.low:.0f}-{100 * figure.high:.0f})"


def score_table(rows: Sequence[Row], model: str, length: int) -> str:
    """Conditions down, tasks across: percent right and 95% interval."""
    figures = {
        (row["condition"], row["cell"].partition("@")[0]): figure_of(row)
        for row in rows
        if row["model"] == model and row["cell"].endswith(f"@{length}")
    }
    conditions = list(dict.fromkeys(condition for condition, _ in figures))
    tasks = list(dict.fromkeys(task for _, task in figures if task != "loss"))
    losses = {
        row["condition"]: row for row in rows if row["model"] == model and row["cell"] == f"loss@{length}"
    }

    def loss(condition: str) -> str:
        if condition not in losses or "full" not in losses:
            return "-"
        if condition == "full":
            return f"{figures['full', 'loss'].value:.3f}"
        mean, low, high = paired(losses[condition], losses["full"])
        return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"

    def line(condition: str) -> list[str]:
        own = [figure for (name, _), figure in figures.items() if name == condition]
        scored = {figure.count for figure in own if not figure.is_loss}
        counts = (
            "-".join(dict.fromkeys(str(count) for count in (min(scored), max(scored)))) if scored else "-"
        )
        # A text whose loss is taken is a little longer in front: what answers' histories keep is shown.
        kept = next((f.kept for f in own if not f.is_loss), own[0].kept)
        cells = [percent(figures.get((condition, task))) for task in tasks]
        return [condition, f"{100 * kept:.0f}%", counts, *cells, loss(condition)]

    header = ["condition", "kept", "samples", *tasks, "loss against full, nats"]
    return table(header, (line(condition) for condition in conditions))


def dialogue_table(rows: Sequence[Row], model: str, length: int) -> str | None:
    """Turns across; None where no dialogue was held."""
    own = [row for row in rows if row["model"] == model and row["cell"] == f"{DIALOGUE}@{length}"]
    if not own:
        return None
    turns = sorted({key for row in own for key in by_turn(row)})
    lines = []
    for row in own:
        scores = by_turn(row)
        lines.append(
            [
                row["condition"],
                *(f"{100 * sum(s) / len(s):.0f}" if (s := scores.get(k)) else "-" for k in turns),
            ]
        )
    return table(["condition", *(f"turn {turn}, {about}'s" for turn, about in turns)], lines)


def lengths_of(rows: Sequence[Row], model: str) -> list[int]:
    """Of cells, the one with the most conditions first."""
    seen: dict[int, set[str]] = {}
    for row in rows:
        if row["model"] == model:
            seen.setdefault(int(row["cell"].partition("@")[2]), set()).add(row["condition"])
    return sorted(seen, key=lambda length: (-len(seen[length]), length))


def bars_of(rows: Sequence[Row], main: str = MAIN_MODEL) -> dict[str, list[Bar]]:
    """Bars by model."""
    every = latest(rows)
    found = {}
    for model in sorted({row["model"] for row in every}, key=lambda name: (name != main, name)):
        judge = Judge(every, model, lengths_of(every, model)[0])
        found[model] = [*judge.bars(main=model == main), judge.enough()]
    return found


def bars_text(rows: Sequence[Row], main: str = MAIN_MODEL) -> str:
    """The bars of every model, as a table each."""
    parts = []
    for model, bars in bars_of(rows, main).items():
        lines = ([bar.name, bar.figures, bar.verdict] for bar in bars)
        parts += [f"### Bars, {model}", table(["bar", "figures", ""], lines)]
    return "\n\n".join(parts)


def report(rows: Sequence[Row], regular: Sequence[dict[str, Any]] = (), main: str = MAIN_MODEL) -> str:
    """Everything, in Markdown."""
    every = latest(rows)
    parts = [bars_text(every, main)]
    for model in dict.fromkeys(row["model"] for row in every):
        for length in lengths_of(every, model):
            parts += [f"### {model}, {length:,} tokens", score_table(every, model, length)]
            talk = dialogue_table(every, model, length)
            if talk:
                parts += ["Dialogue, percent right by turn and by who said the fact:", talk]
    if regular:
        lines = [
            [
                f"{one['model']}, {one['oracle']}, {one['retention']:g}",
                str(one["samples"]),
                *(["-", "-"] if one["between"] is None else [f"{value:.3f}" for value in one["between"]]),
                "-" if one["halves"] is None else f"{one['halves']:.3f}",
                f"{one['spread_of_a_head']:.3f}",
                f"{one['spread_of_heads']:.3f}",
                "-" if one["advised_alpha"] is None else f"{one['advised_alpha']:g}",
            ]
            for one in regular
        ]
        header = ["profile", "samples", "rank correlation, mean", "least", "halves"]
        header += ["spread of a head", "spread of heads", "alpha for 95%"]
        parts += ["### Regularity", table(header, lines)]
    return "\n\n".join(parts) + "\n"


def summary(
    rows: Sequence[Row], regular: Sequence[dict[str, Any]], about: dict[str, Any], main: str = MAIN_MODEL
) -> dict[str, Any]:
    """What the documentation's figures need: no answers."""
    every = latest(rows)
    dialogues = [
        {
            "model": row["model"],
            "condition": row["condition"],
            "cell": row["cell"],
            "turns": [
                {"turn": turn, "about": who, "value": sum(s) / len(s), "count": len(s)}
                for (turn, who), s in sorted(by_turn(row).items())
            ],
        }
        for row in every
        if row["cell"].startswith(DIALOGUE)
    ]
    bars = {
        model: [{"name": bar.name, "figures": bar.figures, "met": bar.met} for bar in found]
        for model, found in bars_of(every, main).items()
    }
    return {
        "benchmark": "accuracy",
        "arguments": about,
        "figures": [figure_of(row).to_dict() for row in every],
        "dialogues": dialogues,
        "bars": bars,
        "regularity": list(regular),
    }

"""What is kept of a run: a line of JSON for each cell, with every answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.chat import Conversation
from benchmarks.accuracy.loss import LossSample
from benchmarks.accuracy.scoring import score

Row = dict[str, Any]
"""model, condition (its name), cell (its name), seconds, and answers."""


@dataclass(frozen=True)
class Answered:
    """An answer to the question of a turn (from 1).

    Attributes:
        prompt: tokens of the prompt; ``cached`` of them were still in the cache.
    """

    turn: int
    text: str
    prompt: int
    cached: int


@dataclass(frozen=True)
class Read:
    """Loss of a text, nats a token."""

    loss: float


def answer_rows(conversation: Conversation, said: Sequence[Answered]) -> list[Row]:
    """One for each question, judged."""
    rows = []
    for answer in said:
        question = conversation.turns[answer.turn - 1].question
        if question is None:
            raise ValueError(f"turn {answer.turn} of {conversation} asks nothing")
        rows.append(
            {
                "seed": conversation.seed,
                "turn": answer.turn,
                "about": question.about,
                "expected": list(question.expected),
                "got": answer.text,
                "score": round(score(answer.text, question), 4),
                "prompt": answer.prompt,
                "cached": answer.cached,
            }
        )
    return rows


def loss_row(sample: LossSample, read: Read) -> Row:
    """One for each text."""
    return {"seed": sample.seed, "kind": sample.kind, "loss": round(read.loss, 5)}


class Store:
    """A file of rows that only ever grows, so that a run can be stopped and gone on with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = list(read(path)) if path.exists() else []

    def add(self, row: Row) -> None:
        """Write a row at once."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)

    def has(self, model: str, condition: str, cell: str, samples: int) -> bool:
        """Whether a cell was done, with so many samples or more."""
        return any(
            (row["model"], row["condition"], row["cell"]) == (model, condition, cell)
            and row["samples"] >= samples
            for row in self.rows
        )


def read(path: Path) -> Iterable[Row]:
    """The rows of a file. A last line that was cut off, as by a kill, is left out."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue

"""A child process: one condition on one model, all its cells.

    python -m benchmarks.accuracy.worker JOB.json

Writes a line of JSON for each finished cell to its standard output, and nothing else there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.accuracy.answers import Answered, Read, Row, answer_rows, loss_row
from benchmarks.accuracy.chat import Conversation, Template, template_of
from benchmarks.accuracy.conditions import LOSS, Cell
from benchmarks.accuracy.loss import LossSample, loss_sample
from benchmarks.accuracy.samples import Writer
from benchmarks.engines import answers_channel
from tangram.calibration.framing import encode


class Answerer(Protocol):
    """What answers: an engine, a replay, or kvpress."""

    def converse(self, conversations: Sequence[Conversation]) -> list[list[Answered]]:
        """Answers to the questions of each."""

    def losses(self, samples: Sequence[LossSample]) -> list[Read]:
        """Loss of each text."""

    def kept(self, tokens: int) -> float:
        """The share of a history of so many tokens that is kept, mean over heads."""


def stops_of(model: str) -> list[int]:
    """Tokens that end an answer, as the model's files name them."""
    path = Path(model) / "generation_config.json"
    found = json.loads(path.read_text()).get("eos_token_id", []) if path.exists() else []
    return list(found) if isinstance(found, list) else [found]


def answerer(job: dict[str, Any], template: Template, decode: Callable[[list[int]], str]) -> Answerer:
    """By what the condition runs."""
    runs = job["condition"]["runs"]
    if runs == "engine":
        from benchmarks.accuracy.engine import Engine

        return Engine(job, template, decode)
    from benchmarks.accuracy.offline import Peer, Replayed

    return (Replayed if runs == "replay" else Peer)(job, template, decode)


def run(job: dict[str, Any]) -> Iterator[Row]:
    """Rows of the cells, as they are done; none is begun behind the deadline."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    template = template_of(tokenizer, stops_of(job["model"]))
    writer = Writer(lambda text: encode(tokenizer, text), template)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    asked = None
    for cell in (Cell(**one) for one in job["cells"]):
        if time.time() > job["deadline"]:
            return
        if asked is None:
            asked = answerer(job, template, decode)
        yield cell_row(job, cell, asked, writer)


def cell_row(job: dict[str, Any], cell: Cell, asked: Answerer, writer: Writer) -> Row:
    """All samples of a cell, answered and judged."""
    started = time.monotonic()
    seeds = range(job["samples"])
    answers: list[Row] = []
    if cell.task == LOSS:
        texts = [loss_sample(seed, cell.length, writer.encode, writer.template) for seed in seeds]
        answers = [loss_row(text, read) for text, read in zip(texts, asked.losses(texts), strict=True)]
        tokens = texts[0].first
    else:
        conversations = [writer.make(cell.task, seed, cell.length) for seed in seeds]
        for one, said in zip(conversations, asked.converse(conversations), strict=True):
            answers += answer_rows(one, said)
        tokens = len(conversations[0].prompt(writer.template, len(conversations[0].turns) - 1))
    return {
        "model": job["name"],
        "condition": job["condition_name"],
        "cell": cell.name,
        "samples": job["samples"],
        "seconds": round(time.monotonic() - started, 1),
        "kept": round(asked.kept(tokens), 4),
        "answers": answers,
    }


def main() -> None:
    """Run the job that is named on the command line."""
    out = answers_channel()
    for row in run(json.loads(Path(sys.argv[1]).read_text())):
        print(json.dumps(row), file=out, flush=True)


if __name__ == "__main__":
    main()

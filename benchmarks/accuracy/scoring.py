"""Whether an answer is right, and how sure a share of right answers is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from benchmarks.accuracy.chat import Question
from tangram.calibration.statistics import Z


def _numbers(answer: str) -> list[str]:
    """Numbers of three digits or more, in their order, each once; a comma between thousands does not
    count."""
    return list(dict.fromkeys(re.findall(r"\d{3,}", re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer))))


def _named(answer: str, candidates: Sequence[str]) -> list[str]:
    """The candidates that the answer names, as whole words, in the order of their first places."""
    text = answer.lower()
    places = {
        candidate: found.start()
        for candidate in candidates
        if (found := re.search(rf"\b{re.escape(candidate.lower())}\b", text))
    }
    return sorted(places, key=lambda candidate: places[candidate])


def first_number(answer: str, question: Question) -> float:
    """1 if the first number is the expected one."""
    return float(_numbers(answer)[:1] == list(question.expected))


def first_name(answer: str, question: Question) -> float:
    """1 if, of the expected value and its rivals, the expected one is named first."""
    return float(_named(answer, [*question.expected, *question.rivals])[:1] == list(question.expected))


def all_numbers(answer: str, question: Question) -> float:
    """The share of the expected numbers among as many first ones, so that naming all earns nothing."""
    said = _numbers(answer)[: len(question.expected)]
    return len(set(said) & set(question.expected)) / len(question.expected)


def all_names(answer: str, question: Question) -> float:
    """The same for words, among those of the text."""
    said = _named(answer, [*question.expected, *question.rivals])[: len(question.expected)]
    return len(set(said) & set(question.expected)) / len(question.expected)


RULES: dict[str, Callable[[str, Question], float]] = {
    rule.__name__: rule for rule in (first_number, first_name, all_numbers, all_names)
}


def score(answer: str, question: Question) -> float:
    """From 0 to 1."""
    return RULES[question.rule](answer, question)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of ``count`` answers.

    For scores between 0 and 1 it is wide rather than narrow: no such scores vary more than right and wrong.
    """
    if count < 1:
        return 0.0, 1.0
    square = Z * Z / count
    centre = (share + square / 2) / (1 + square)
    half = Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)

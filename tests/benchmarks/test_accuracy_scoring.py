"""What counts as right, and how sure a share is."""

import math

import pytest

from benchmarks.accuracy.chat import Question
from benchmarks.accuracy.scoring import score, wilson
from tangram.calibration.statistics import interval_of_mean


def asks(rule: str, *expected: str, rivals: tuple[str, ...] = ("4711", "4712")) -> Question:
    return Question(expected, rivals, rule, 20)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (" 4713.", 1.0),
        ("The code is 4713, not 4711.", 1.0),
        ("4,713", 1.0),
        ("4711 or 4713", 0.0),
        ("47130", 0.0),
        ("4712", 0.0),
        ("in 12 places: 4713", 1.0),
        ("", 0.0),
    ],
)
def test_the_first_number_counts(answer: str, right: float) -> None:
    assert score(answer, asks("first_number", "4713")) == right


@pytest.mark.parametrize(
    ("answer", "right"),
    [("A GOAT.", 1.0), ("goat, pony", 1.0), ("pony, goat", 0.0), ("goatherd", 0.0), ("sheep", 0.0)],
)
def test_the_first_name_counts(answer: str, right: float) -> None:
    assert score(answer, asks("first_name", "goat", rivals=("pony", "ferret"))) == right


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("1234, 5678 and 9012", 1.0),
        ("9012 5678", 2 / 3),
        ("1234 1234 1234", 1 / 3),
        ("4711 4712 1234 5678 9012", 1 / 3),
        ("none", 0.0),
    ],
)
def test_naming_all_numbers_earns_nothing(answer: str, share: float) -> None:
    assert score(answer, asks("all_numbers", "1234", "5678", "9012")) == pytest.approx(share)


def test_names_of_a_list() -> None:
    question = asks("all_names", "oil", "wine", rivals=("bread", "salt"))
    assert score("wine and oil", question) == 1.0
    assert score("bread, wine, oil", question) == 0.5


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(48, 50, 0.8654, 0.9890), (0, 50, 0.0, 0.0714), (50, 50, 0.9286, 1.0), (5, 10, 0.2366, 0.7634)],
)
def test_wilson(right: int, count: int, low: float, high: float) -> None:
    """Figures from the formula, worked out apart: (p + z2/2n -+ z sqrt(p(1-p)/n + z2/4n2)) / (1 + z2/n)."""
    assert wilson(right / count, count) == pytest.approx((low, high), abs=1e-4)


def test_an_interval_shrinks_with_the_samples() -> None:
    assert wilson(0.0, 0) == (0.0, 1.0)
    mean, low, high = interval_of_mean([1.0, 3.0] * 50)
    assert mean == 2.0
    assert high - low == pytest.approx(2 * 1.959964 * math.sqrt(100 / 99) / 10, rel=1e-5)
    assert interval_of_mean([1.0]) == (1.0, -math.inf, math.inf)

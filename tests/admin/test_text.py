"""Numbers as people read them."""

from __future__ import annotations

import pytest

from admin.text import (
    byte_ticks,
    bytes_text,
    duration_text,
    latency_text,
    percent_text,
    short_id,
    times_less_text,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1024**2, "1 MiB"), (350 * 1024**2, "350 MiB"),
     (1.41 * 1024**3, "1.41 GiB"), (3 * 1024**6, "3072 PiB")],
)  # fmt: skip
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.4, "0 s"),
        (59, "59 s"),
        (75, "1 min 15 s"),
        (725, "12 min"),
        (3720, "1 h 2 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


def test_latency_changes_unit_at_a_second() -> None:
    assert (latency_text(None), latency_text(0.0504), latency_text(2.5)) == ("–", "50 ms", "2.50 s")


def test_percent_keeps_a_decimal_where_it_matters() -> None:
    assert [percent_text(value) for value in (0, 0.023, 0.5, 1)] == ["0%", "2.3%", "50%", "100%"]


def test_times_less_says_nothing_when_nothing_is_saved() -> None:
    assert times_less_text(300, 100) == "3.0× less"
    assert times_less_text(100, 100) == times_less_text(100, 0) == ""


def test_short_id_drops_what_all_ids_share() -> None:
    assert short_id("cmpl-0123456789abcdef-0") == "01234567…"
    assert short_id("req-7") == "req-7"


@pytest.mark.parametrize("ceiling", [1, 1000, 5 * 1024**2, 1024**3 + 1, 7e12])
def test_ticks_are_few_round_and_reach_the_top(ceiling: float) -> None:
    ticks = byte_ticks(ceiling)
    step = ticks[1]
    assert 2 <= len(ticks) <= 6
    assert step.hex().startswith("0x1.0000000000000p"), "a power of two"
    assert ticks[0] == 0
    assert ticks[-2] < ceiling <= ticks[-1]

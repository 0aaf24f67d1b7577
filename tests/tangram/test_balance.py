"""How evenly reading is shared out, against sums made by hand."""

from __future__ import annotations

import pytest

from tangram.balance import balance
from tangram.geometry import Geometry, Tier

UNEVEN = Geometry(2, 2, 8, 2, 16, 512, 128, 64, 2, (Tier(64, ((0, 0), (1, 1))), Tier(256, ((0, 1), (1, 0)))))


def test_equal_heads_need_no_cut() -> None:
    even = Geometry(2, 2, 8, 2, 16, 512, 128, 64, 4, (Tier(128, ((0, 0), (0, 1), (1, 0), (1, 1))),))
    assert balance(even, 1024).unsplit == 1.0
    assert balance(even, 16).cut == 2 / 8, "two units in the shortest run"


def test_a_block_a_head_waits_for_the_largest() -> None:
    """2176 tokens: 4 chunks are sealed, 128 tokens are raw; 24 and 72 units of a layer's two heads."""
    assert UNEVEN.sealed(2176) == 4
    found = balance(UNEVEN, 2176, blocks=12)
    assert found.unsplit == pytest.approx((24 + 72) / (2 * 72))
    assert found.cut == 1.0, "96 units are 12 runs of 8"
    assert balance(UNEVEN, 2176, blocks=5).cut == pytest.approx(96 / (5 * 20))

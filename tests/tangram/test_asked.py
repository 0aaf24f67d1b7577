"""Mean queries as the sealing operator takes them: by tier, by layer, and on each rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import ragged_seal
from tangram import mean_queries, runtime, shipped
from tangram.config import TangramConfig
from tangram.errors import ProfileError, UnsupportedError
from tangram.geometry import Geometry
from tangram.mean_queries import Asked, MeanQueries, scorer_in_force
from tangram.profile import Profile, load_profile_file
from tangram.ranks import ALONE, Ranks
from tangram.rotary import Rotary
from tangram.scorers import get_scorer
from tangram.sealing import seal_chunk
from tests.tangram.test_ranks import FOUR, HEADS, ROTARY, filled

WHOLE = replace(FOUR, ranks=1)
MEANS = MeanQueries(torch.randn(2, HEADS, 4, generator=torch.Generator().manual_seed(5)), ROTARY)
RANKS = [ALONE, Ranks(0, 2, object()), Ranks(1, 2, object())]


def of(ranks: Ranks) -> tuple[Geometry, Asked]:
    g = WHOLE if ranks is ALONE else FOUR.of_rank(ranks.rank)
    return g, Asked(MEANS, g, ranks)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("chunks", [[0], [2], [1, 0, 1]])
def test_the_operator_keeps_what_the_scorer_keeps(ranks: Ranks, chunks: list[int]) -> None:
    """All tiers of a rank at once, several chunks in one call."""
    g, asked = of(ranks)
    n = g.boundary(max(chunks))
    first = ranks.rank * g.kv_heads
    draw = torch.Generator().manual_seed(1)
    states = torch.randn(n, 2, HEADS, 2 * g.head_size, generator=draw)[:, :, first : first + g.kv_heads]
    pools, rows = [], []
    for chunk in chunks:
        pool, row = filled(g, g.boundary(chunk), states[: g.boundary(chunk)])
        pools.append(pool)
        rows.append(torch.nn.functional.pad(row + len(pool) * len(rows), (0, g.pages(n) - len(row))))
    pool, table = torch.cat(pools), torch.stack(rows)
    expected = pool.clone()
    for chunk, row in zip(chunks, table, strict=True):
        seal_chunk(expected, row, g, chunk, 3, get_scorer("keyvalue_query"), None, ranks, MEANS)
    due = torch.tensor(list(enumerate(chunks)), dtype=torch.int32)
    members = torch.tensor([len(tier.heads) for tier in g.tiers], dtype=torch.int32)
    how = (members, runtime.kernel_layout(g), 3)
    ragged_seal(pool, table, due, *how, values=True, asked=asked.of_tiers(chunks))
    torch.testing.assert_close(pool, expected, equal_nan=True, atol=0, rtol=0)
    if chunks == [0]:
        return  # its sink decides nearly all
    without = torch.cat(pools)
    ragged_seal(without, table, due, *how, values=True)
    assert not torch.equal(without.nan_to_num(), pool.nan_to_num()), "what heads are asked decided nothing"


@pytest.mark.parametrize("ranks", RANKS)
def test_a_layer_has_its_own_heads(ranks: Ranks) -> None:
    g, asked = of(ranks)
    first = ranks.rank * g.kv_heads
    every = asked.of_layers([3, 1])
    assert every is not None
    assert every.shape == (2, 2, g.kv_heads, 4)
    for layer in (0, 1):
        for place, chunk in enumerate((3, 1)):
            behind = MEANS.behind(g.boundary(chunk))[layer, first : first + g.kv_heads]
            assert torch.equal(every[layer, place], behind)
            assert torch.equal(asked.of_layer(layer, chunk), behind[None])


def test_a_chunk_is_asked_the_same_whatever_else_is_sealed() -> None:
    """To the bit, though sums over many positions may be added up otherwise in a larger tensor."""
    alone, among = of(ALONE)[1].of_tiers([7]), of(ALONE)[1].of_tiers([*range(40)])
    assert alone is not None
    assert among is not None
    assert torch.equal(alone[0], among[7])


def test_places_that_no_head_takes_are_filled() -> None:
    g = replace(WHOLE, group_size=6)
    asked = Asked(MEANS, g, ALONE).of_tiers([0])
    assert asked is not None
    assert asked.shape == (1, 2, 6, 4)
    assert asked.isfinite().all()


def test_no_chunks() -> None:
    _, asked = of(ALONE)
    assert asked.of_tiers([]) is None
    assert asked.of_layers([]) is None


def test_few_boundaries_stay_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean_queries, "MOST_KEPT", 2)
    _, asked = of(ALONE)
    for chunk in (0, 1, 0, 2):
        asked.of_layer(0, chunk)
    assert [*asked._behind] == [0, 2]


def test_auto_looks_at_what_heads_are_asked_where_that_is_known() -> None:
    def unknown() -> Rotary | None:
        raise UnsupportedError("how it rotates")

    known = load_profile_file(next(shipped.folder().glob("smollm2*.json")))
    auto, plain = TangramConfig(), Profile.uniform(30, 3)
    assert scorer_in_force(auto, known, lambda: None) == "keyvalue_query"
    assert scorer_in_force(auto, known, unknown) == "keyvalue"
    assert scorer_in_force(auto, plain, lambda: None) == "keyvalue"
    assert scorer_in_force(TangramConfig(scorer="knorm"), known, unknown) == "knorm"
    with pytest.raises(UnsupportedError, match="how it rotates"):
        scorer_in_force(TangramConfig(scorer="keyvalue_query", retention=0.5), known, unknown)
    with pytest.raises(UnsupportedError, match="how it rotates"):
        scorer_in_force(TangramConfig(scorer="expected_attention", retention=0.5), plain, unknown)
    with pytest.raises(ProfileError, match="no profile decides"):
        scorer_in_force(TangramConfig(scorer="keyvalue_query", retention=0.5), plain, lambda: None)
    nothing = TangramConfig(scorer="keyvalue_query", retention=1.0)
    assert scorer_in_force(nothing, plain, unknown) == "keyvalue_query", "nothing is ranked"
    assert auto.steps_wide(on_gpu=True)
    assert not auto.observed

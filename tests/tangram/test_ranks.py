"""Tensor parallelism: how heads are shared out to ranks, and what ranks do together, without an engine."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tangram import drift_sampler
from tangram.balance import balance
from tangram.config import SCORERS, TangramConfig
from tangram.control import ControlServer, worker_socket
from tangram.drift import DriftMeter
from tangram.drift_sampler import DriftSampler
from tangram.errors import ConfigError, EngineUnavailable
from tangram.geometry import Geometry, Head, Tier
from tangram.mean_queries import MeanQueries
from tangram.profile import ModelShape, Profile, build_geometry, default_group_size, in_force
from tangram.ranks import ALONE, Ranks
from tangram.rotary import Rotary
from tangram.scorers import get_scorer
from tangram.sealing import Observed, seal_chunk
from tangram.wide import Bounds
from tangram.workers import ask, merged
from tests.patience import PATIENCE
from tests.tangram.ranks_together import together

CONFIG = TangramConfig(retention=0.5, chunk=64, window=32, rewind=32)
shares = st.integers(0, 1000).map(lambda n: n / 1000)


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelShape, Profile]:
    """Models of a few layers that are shared by one to four ranks, and what their heads need."""
    ranks, layers = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    kv_heads = ranks * draw(st.integers(1, 3))
    row = st.lists(shares, min_size=kv_heads, max_size=kv_heads).map(tuple)
    mean = tuple(draw(st.lists(row, min_size=layers, max_size=layers)))
    shape = ModelShape("m", layers, kv_heads, 8, 2, "bfloat16", 4096, ranks=ranks)
    return shape, Profile(mean, ((0.0,) * kv_heads,) * layers)


def configured(draw: st.DataObject, shape: ModelShape) -> TangramConfig:
    most = shape.layers * shape.kv_heads // shape.ranks
    return replace(
        CONFIG,
        group_size=draw.draw(st.none() | st.integers(1, most).map(lambda each: each * shape.ranks)),
        scope=draw.draw(st.sampled_from(["model", "layer", "uniform"])),
        retention=draw.draw(st.floats(0.1, 1.0)),
    )


@given(models(), st.data())
def test_each_rank_has_its_own_heads_once_in_tiers_of_the_same_sizes(
    model: tuple[ModelShape, Profile], data: st.DataObject
) -> None:
    shape, profile = model
    config = configured(data, shape)
    g = build_geometry(config, shape, profile)
    each = shape.kv_heads // shape.ranks
    budgets = in_force(config, shape, profile).budgets(config.retention, 1.0)
    ranks = [g.of_rank(rank) for rank in range(shape.ranks)]  # valid ones: every local head exactly once
    for rank, own in enumerate(ranks):
        assert (own.kv_heads, own.ranks, own.group_size) == (each, 1, g.group_size // shape.ranks)
        assert own.keep == g.keep
        assert [len(tier.heads) * shape.ranks for tier in own.tiers] == [len(t.heads) for t in g.tiers]
        for layer, head in itertools.product(range(shape.layers), range(each)):
            whole = rank * each + head
            assert own.head_tier[layer][head] == g.head_tier[layer][whole], "vLLM gives a rank these heads"
        if config.scope == "model":
            order = [budgets[la][rank * each + h] for tier in own.tiers for la, h in tier.heads]
            assert order == sorted(order, reverse=True)
    for tier in g.tiers:
        mean = sum(budgets[la][h] for la, h in tier.heads) / len(tier.heads)
        assert tier.keep == max(1, min(round(mean * 4), 4)) * 16, "the mean over all ranks, in whole pages"


@given(models(), st.data())
def test_rows_are_the_same_on_all_ranks_and_bytes_add_up(
    model: tuple[ModelShape, Profile], data: st.DataObject
) -> None:
    shape, profile = model
    g = build_geometry(configured(data, shape), shape, profile)
    assert Geometry.from_dict(g.to_dict()) == g
    n = data.draw(st.integers(1, 600))
    for own in (g.of_rank(rank) for rank in range(shape.ranks)):
        for count in ("pages", "idle_pages", "row_width", "sealed"):
            assert getattr(own, count)(n) == getattr(g, count)(n)
        assert (own.state_bytes, own.page_bytes * shape.ranks) == (g.state_bytes, g.page_bytes)
        assert own.bytes(n) * shape.ranks == g.bytes(n)
        assert own.full_bytes(n) * shape.ranks == g.full_bytes(n)


@given(models(), st.data())
def test_one_rank_is_what_it_was(model: tuple[ModelShape, Profile], data: st.DataObject) -> None:
    """All heads by falling budget, cut into groups."""
    shape, profile = replace(model[0], ranks=1), model[1]
    config = replace(configured(data, shape), scope="model")
    g = build_geometry(config, shape, profile)
    budgets = profile.budgets(config.retention, 1.0)
    heads = [(layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads)]
    heads.sort(key=lambda h: -budgets[h[0]][h[1]])
    cut = [tuple(heads[i : i + g.group_size]) for i in range(0, len(heads), g.group_size)]
    assert [tier.heads for tier in g.tiers] == cut
    assert g.of_rank(0) == g
    assert default_group_size(30, 3) == 15
    assert ALONE.agreed(True)
    part = torch.zeros(2, 2)
    assert ALONE.gathered(part) is part
    assert Ranks.current(1) is ALONE


@given(st.lists(shares, min_size=8, max_size=8))
def test_no_other_assignment_comes_nearer_to_the_budgets(needs: list[float]) -> None:
    """Two ranks of four heads each, tiers of two heads of each: all ways to cut them, in squares."""
    shape = ModelShape("m", 4, 2, 8, 2, "bfloat16", 4096, ranks=2)
    profile = Profile(tuple((needs[i], needs[i + 1]) for i in range(0, 8, 2)), ((0.0, 0.0),) * 4)
    config = replace(CONFIG, group_size=4, chunk=512)
    budgets = profile.budgets(config.retention, 1.0)
    g = build_geometry(config, shape, profile)

    def apart(tiers: list[list[Head]]) -> float:
        values = [[budgets[la][h] for la, h in heads] for heads in tiers]
        return float(sum(np.var(tier) * len(tier) for tier in values))

    def cuts(rank: int) -> list[tuple[list[Head], list[Head]]]:
        heads = [(layer, rank) for layer in range(4)]
        pairs = itertools.combinations(heads, 2)
        return [(list(pair), [h for h in heads if h not in pair]) for pair in pairs]

    others = [apart([a + c, b + d]) for (a, b), (c, d) in itertools.product(cuts(0), cuts(1))]
    assert apart([list(tier.heads) for tier in g.tiers]) <= min(others) + 1e-9


def test_the_groups_hold_equally_many_heads_of_each_rank() -> None:
    shape = ModelShape("m", 4, 4, 8, 2, "bfloat16", 4096, ranks=2)
    assert build_geometry(CONFIG, shape).group_size == default_group_size(4, 4, 2) == 2
    assert default_group_size(36, 8, 4) == 48, "as on one"
    assert default_group_size(1, 4, 4) == 4
    with pytest.raises(ConfigError, match=r"group_size: must be a multiple of --tensor-parallel-size \(2\)"):
        build_geometry(replace(CONFIG, group_size=3), shape)
    capped = replace(CONFIG, group_size=5, scope="layer")
    assert build_geometry(capped, shape).group_size == 4, "a layer's heads"
    window = replace(shape, window_layers=1, window_span=64, window_state_bytes=4 * 2 * 8 * 2)
    g = build_geometry(CONFIG, replace(window, window_blocks=(16,)))
    assert g.group_size == 4, "what a window layer's block takes on each rank"
    assert g.of_rank(1).window_block_bytes * 2 == g.window_block_bytes
    assert g.of_rank(1).window_groups == g.window_groups
    assert g.of_rank(0).window_pages(500) == g.window_pages(500)


TWO = Geometry(2, 2, 4, 4, 2, 8, 4, 2, 2, (Tier(2, ((1, 0), (0, 1))), Tier(6, ((0, 0), (1, 1)))), ranks=2)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ranks": 3}, "kv_heads"),
        ({"ranks": 0}, "ranks"),
        ({"group_size": 3}, "group_size"),
        ({"window_block_bytes": 7}, "window_block_bytes"),
        ({"tiers": (Tier(2, ((0, 0), (1, 0))), Tier(6, ((0, 1), (1, 1))))}, "tiers"),
        ({"tiers": (Tier(2, ((0, 0), (1, 2))), Tier(6, ((0, 1), (1, 1))))}, "tiers"),
    ],
)
def test_what_ranks_cannot_share_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        replace(TWO, **changes)  # type: ignore[arg-type]


def test_reading_waits_for_the_rank_that_reads_most() -> None:
    """2176 tokens: 24 and 72 units, as in test_balance, but each on a rank of its own."""
    tiers = (Tier(64, ((0, 0), (1, 1))), Tier(256, ((1, 0), (0, 1))))
    uneven = Geometry(2, 2, 8, 2, 16, 512, 128, 64, 2, tiers, ranks=2)
    found = balance(uneven, 2176, blocks=3)
    assert found.cut == pytest.approx((24 + 72) / ((3 + 3) * 24)), "runs of 8 wait for runs of 24"
    assert found.unsplit == pytest.approx((24 + 72) / (2 * 72))


# ---- what ranks do together -------------------------------------------------------------------------------

WIDTH, GROUP, HEADS = 4, 2, 4
ROTARY = Rotary(torch.tensor([[1.0, 0.1], [0.0, 0.0]]))
SCALE = torch.tensor([0.5, 0.25])
FOUR = Geometry(
    2,
    HEADS,
    *(4, 4, 2, 8, 4, 2),
    4,
    (
        Tier(2, ((1, 1), (0, 0), (0, 2), (1, 2))),
        Tier(6, ((0, 1), (1, 0), (1, 3), (0, 3))),
    ),
    ranks=2,
)


def filled(g: Geometry, n: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool and a row of it that holds states [n, layers, kv_heads, 2 * D] as raw tokens."""
    pages = list(range(200))
    random.Random(n).shuffle(pages)
    row = torch.tensor(pages[: g.pages(n)], dtype=torch.int32)
    pool = torch.full((200, g.group_size, g.page_tokens, 2 * g.head_size), torch.nan)
    for position, (tier, of) in itertools.product(range(n), enumerate(g.tiers)):
        for member, (layer, head) in enumerate(of.heads):
            page = row[g.ring_index(position, tier)]
            pool[page, member, position % g.page_tokens] = states[position, layer, head]
    return pool, row


def sealed(g: Geometry, chunk: int, pool: torch.Tensor, row: torch.Tensor) -> dict[Head, torch.Tensor]:
    """What each head kept of a chunk, [tokens, 2 * D]."""
    return {
        head: torch.stack(
            [pool[row[g.sealed_index(chunk, tier, j)], member, j % g.page_tokens] for j in range(of.keep)]
        )
        for tier, of in enumerate(g.tiers)
        for member, head in enumerate(of.heads)
    }


@pytest.mark.parametrize("chunk", [0, 2])
@pytest.mark.parametrize("name", SCORERS)
def test_heads_keep_what_one_engine_without_ranks_keeps(name: str, chunk: int) -> None:
    """With the same tiers: also where a score is a hash of the head's number, or a mean over a layer."""
    n, scorer = FOUR.boundary(chunk), get_scorer(name)
    draw = torch.Generator().manual_seed(1)
    states = torch.randn(n, 2, HEADS, 2 * FOUR.head_size, generator=draw)
    queries = torch.randn(2, WIDTH, HEADS * GROUP, FOUR.head_size, generator=draw)
    means = MeanQueries(torch.randn(2, HEADS, FOUR.head_size, generator=draw), ROTARY)
    whole = replace(FOUR, ranks=1)
    pool, row = filled(whole, n, states)
    seal_chunk(pool, row, whole, chunk, 3, scorer, Observed(queries, SCALE, ROTARY), mean_queries=means)
    expected = sealed(whole, chunk, pool, row)

    def one(ranks: Ranks) -> dict[Head, torch.Tensor]:
        g, first = FOUR.of_rank(ranks.rank), ranks.rank * FOUR.rank_heads
        pool, row = filled(g, n, states[:, :, first : first + FOUR.rank_heads])
        asked = queries.unflatten(2, (HEADS, GROUP))[:, :, first : first + FOUR.rank_heads].flatten(2, 3)
        seal_chunk(pool, row, g, chunk, 3, scorer, Observed(asked, SCALE, ROTARY), ranks, means)
        return {(la, first + head): kept for (la, head), kept in sealed(g, chunk, pool, row).items()}

    found = {head: kept for rank in together(2, one) for head, kept in rank.items()}
    assert found.keys() == expected.keys()
    for head, kept in expected.items():
        assert torch.equal(found[head], kept)


class Noted(DriftMeter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(None, 0.0)
        self.seen: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = []

    def observe(self, needs: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
        self.seen.append(needs)


def test_the_drift_is_of_all_heads_and_looked_at_when_the_first_rank_finds_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the clocks of the others it would never be time, or always."""
    monkeypatch.setattr(drift_sampler, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(drift_sampler, "MOST_OF_TIME", 1e9)
    n = FOUR.boundary(2)
    states = torch.randn(n, 2, HEADS, 2 * FOUR.head_size, generator=torch.Generator().manual_seed(3))
    step = Bounds([n], [n + 1], [0, 1])

    def look(g: Geometry, ranks: Ranks, own: torch.Tensor, late: bool) -> Noted:
        meter = Noted()
        pool, row = filled(g, n, own)
        watch = DriftSampler(g, meter if ranks.first else None, 1, torch.device("cpu"), ranks)
        watch._next = float("inf") if late else 0.0
        watch.between_steps(pool, row[None], step)
        return meter

    whole = replace(FOUR, ranks=1)
    (expected,) = look(whole, ALONE, states, late=False).seen
    assert expected.shape == (2, HEADS)

    def one(late_first: bool, ranks: Ranks) -> Noted:
        first = ranks.rank * FOUR.rank_heads
        own = states[:, :, first : first + FOUR.rank_heads]
        return look(FOUR.of_rank(ranks.rank), ranks, own, late=ranks.first == late_first)

    meters = together(2, lambda ranks: one(False, ranks))
    (seen,) = meters[0].seen
    np.testing.assert_array_equal(seen, expected)
    assert meters[1].seen == []
    assert [meter.seen for meter in together(2, lambda ranks: one(True, ranks))] == [[], []]


# ---- what they say ----------------------------------------------------------------------------------------


def test_a_chunk_that_all_ranks_sealed_is_counted_once_and_as_long_as_the_slowest_took() -> None:
    one = {"seals": 3, "seconds": 0.2, "buckets": [1, 3, 3], "drift": {"drift": 1.5}, "kernels": "native"}
    other = {"seals": 2, "seconds": 0.5, "buckets": [0, 1, 2], "drift": None, "kernels": "native"}
    assert merged([one]) == one
    assert merged([one, other]) == {
        "seals": 2,
        "seconds": 0.5,
        "buckets": [0, 1, 2],
        "drift": {"drift": 1.5},
        "kernels": "native",
    }
    assert merged([one, other | {"kernels": "reference"}])["kernels"] == "native, reference"


def test_all_workers_are_asked_and_one_that_is_silent_is_missed() -> None:
    said = {"seals": 1, "seconds": 0.1, "buckets": [1], "drift": None, "kernels": "native"}
    instance = f"ranks-{random.randrange(10**9)}"
    first = ControlServer(worker_socket(instance), {"worker": lambda _: said})
    with pytest.raises(EngineUnavailable, match="worker does not answer"):
        ask(instance, 2, timeout=PATIENCE)
    second = ControlServer(worker_socket(instance, 1), {"worker": lambda _: said | {"seconds": 0.3}})
    assert ask(instance, 2, timeout=PATIENCE) == said | {"seconds": 0.3}
    assert ask(instance, 1, timeout=PATIENCE) == said
    first.close()
    second.close()

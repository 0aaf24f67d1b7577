"""Predictions against counts made page by page, token by token and head by head."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.config import TangramConfig
from tangram.geometry import Geometry, Tier
from tangram.predict import LENGTHS, Prediction, default_lengths, measure, predict
from tangram.profile import ModelShape, Profile, group_size

KEYS = {  # what the console reads
    *("geometry", "heads", "bytes_at", "idle_bytes_at", "full_bytes_at", "conversations_at"),
    *("ring_bytes", "row_width", "fragmentation", "warnings"),
}


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Geometry, list[list[Fraction]]]:
    """Any assignment of heads to tiers of up to G, gaps anywhere, and budgets in whole tokens."""
    size = draw(st.sampled_from([1, 2, 4]))
    chunk = size * draw(st.integers(1, 4))
    layers, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads = draw(st.permutations([(layer, head) for layer in range(layers) for head in range(kv_heads)]))
    group = draw(st.integers(1, len(heads)))
    tiers = []
    while heads:
        count = draw(st.integers(1, min(group, len(heads))))
        tiers.append(Tier(size * draw(st.integers(1, chunk // size)), tuple(heads[:count])))
        heads = heads[count:]
    window, rewind = size * draw(st.integers(0, 3)), size * draw(st.integers(0, 3))
    head_size, itemsize = draw(st.sampled_from([1, 3, 64])), draw(st.sampled_from([1, 2, 4]))
    g = Geometry(layers, kv_heads, head_size, itemsize, size, chunk, window, rewind, group, tuple(tiers))
    budget = [[Fraction(draw(st.integers(0, chunk)), chunk) for _ in range(kv_heads)] for _ in range(layers)]
    return g, budget


def row_of_tiers(g: Geometry, n: int) -> list[int]:
    """The tier of every page that a conversation of ``n`` tokens holds, by growing it a token at a time."""
    ring: set[tuple[int, int]] = set()
    sealed: list[int] = []
    chunks = 0
    for p in range(n):
        ring |= {((p // g.page_tokens) % g.ring_slots, tier) for tier in range(len(g.tiers))}
        if p + 1 >= (chunks + 1) * g.chunk + g.window:
            chunks += 1
            for index, tier in enumerate(g.tiers):
                sealed += [index] * len({j // g.page_tokens for j in range(tier.keep)})
            ring = {(slot, tier) for slot in range(g.ring_slots) for tier in range(len(g.tiers))}
    return [tier for _, tier in ring] + sealed


@given(geometries(), st.integers(1, 60), st.integers(0, 10**6))
def test_a_conversation_s_cost_is_what_its_pages_add_up_to(
    drawn: tuple[Geometry, list[list[Fraction]]], n: int, pool: int
) -> None:
    g, budget = drawn
    pages = row_of_tiers(g, n)
    (at,) = measure(g, [[float(b) for b in row] for row in budget], n, [n]).within(pool).at
    assert (at.tokens, at.pages, at.bytes) == (n, len(pages), len(pages) * g.page_bytes)
    slot = g.page_tokens * 2 * g.head_size * g.itemsize
    used = sum(len(g.tiers[tier].heads) * slot for tier in pages)
    assert at.padding_bytes == at.bytes - used
    assert at.bytes_per_token == at.bytes / n
    assert (at.idle_pages, at.idle_bytes) == (g.idle_pages(n), g.idle_bytes(n))
    fits, left = 0, pool
    while left >= at.bytes and fits < 10**4:  # there is room for one more to be answered; then it is idle
        fits, left = fits + 1, left - (at.idle_bytes or at.bytes)
    assert min(at.conversations, 10**4) == fits
    whole_pages = len({p // g.page_tokens for p in range(n)})
    assert at.full_bytes == whole_pages * slot * g.layers * g.kv_heads
    assert at.kept_share == pytest.approx(g.kept_fraction(n))


@given(geometries())
def test_waste_of_a_chunk_is_counted_token_by_token_and_slot_by_slot(
    drawn: tuple[Geometry, list[list[Fraction]]],
) -> None:
    g, budget = drawn
    got = measure(g, [[float(b) for b in row] for row in budget], 64)
    over = short = kept = asked = empty = 0
    for tier in g.tiers:
        for layer, head in tier.heads:
            wanted = budget[layer][head] * g.chunk
            over += sum(token >= wanted for token in range(tier.keep))
            short += sum(tier.keep <= token < wanted for token in range(g.chunk))
            kept, asked = kept + tier.keep, asked + int(wanted)
        for _page in range(0, tier.keep, g.page_tokens):
            empty += g.group_size - len(tier.heads)
    assert got.excess_tokens == pytest.approx(over, abs=1e-9)
    assert got.excess_share == pytest.approx(over / kept, abs=1e-9)
    assert got.shortfall_tokens == pytest.approx(short, abs=1e-9)
    assert got.shortfall_share == pytest.approx(short / asked if asked else 0, abs=1e-9)
    assert got.empty_slots == empty
    pages = sum(tier.keep for tier in g.tiers) // g.page_tokens
    slot = g.page_tokens * 2 * g.head_size * g.itemsize
    content = sum(tier.keep * len(tier.heads) for tier in g.tiers) * 2 * g.head_size * g.itemsize
    assert got.empty_slot_bytes == empty * slot
    assert got.rounding_bytes == pages * (g.page_bytes - g.group_size * slot)
    assert content + got.empty_slot_bytes + got.rounding_bytes == pages * g.page_bytes
    assert got.padding_share == pytest.approx(g.padding, abs=1e-12)
    assert got.sealed_bytes_per_token == pages * g.page_bytes / g.chunk


@given(geometries(), st.integers(1, 80))
def test_the_row_is_wide_enough_at_every_length(
    drawn: tuple[Geometry, list[list[Fraction]]], longest: int
) -> None:
    g, budget = drawn
    got = measure(g, [[float(b) for b in row] for row in budget], longest)
    ring = len({g.ring_index(p, t) for p in range(500) for t in range(g.num_tiers)})
    needed = max(max(len(row_of_tiers(g, n)), -(-n // g.page_tokens)) for n in range(longest + 1))
    assert got.row_width == max(ring, needed), "the kernels look for sealed pages behind a whole ring"
    assert got.ring_bytes == ring * g.page_bytes


shares = st.integers(0, 1000).map(lambda n: n / 1000)


@st.composite
def configured(draw: st.DrawFn) -> tuple[TangramConfig, ModelShape, Profile]:
    layers, kv_heads = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    matrix = st.lists(
        st.lists(shares, min_size=kv_heads, max_size=kv_heads), min_size=layers, max_size=layers
    )
    mean, std = (tuple(map(tuple, draw(matrix))) for _ in range(2))
    config = TangramConfig(
        retention=draw(st.floats(0.02, 1.0)),
        chunk=draw(st.sampled_from([16, 64, 512])),
        sink=4,
        group_size=draw(st.one_of(st.none(), st.integers(1, layers * kv_heads))),
        scope=draw(st.sampled_from(["model", "layer", "uniform"])),
        alpha=draw(st.floats(0, 3)),
    )
    return config, ModelShape("m", layers, kv_heads, 64, 2, "bfloat16", 4096), Profile(mean, std)


@given(configured())
def test_any_scope_and_group_size_cuts_every_head_into_exactly_one_group(
    drawn: tuple[TangramConfig, ModelShape, Profile],
) -> None:
    config, shape, profile = drawn
    got = predict(config, shape, profile)
    g, run = got.geometry, shape.kv_heads if config.scope == "layer" else shape.layers * shape.kv_heads
    group = group_size(config, shape)
    assert g.group_size == group <= run
    assert sorted(head for tier in g.tiers for head in tier.heads) == [
        (layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads)
    ]
    runs = shape.layers if config.scope == "layer" else 1
    gap = -run % group  # places that stay empty in the last group of a run
    assert g.num_tiers == runs * -(-run // group)
    assert g.num_tiers * group - shape.layers * shape.kv_heads == runs * gap
    last = [tier for tier in g.tiers if len(tier.heads) < group]
    assert got.empty_slots == sum(tier.keep // g.page_tokens * gap for tier in last)
    if config.scope == "uniform":
        assert len(set(g.keep)) == 1
        assert {round(b, 9) for row in got.budget for b in row} == {round(config.retention, 9)}
    if config.scope == "layer":
        assert all(len({layer for layer, _ in tier.heads}) == 1 for tier in g.tiers)


@given(configured(), st.integers(0, 10**9))
def test_a_prediction_is_json_with_what_the_console_reads(
    drawn: tuple[TangramConfig, ModelShape, Profile], pool: int
) -> None:
    got = predict(*drawn, lengths=[1, 700, 5000]).within(pool)
    report = json.loads(json.dumps(got.to_dict()))
    assert report.keys() >= KEYS
    assert report["fragmentation"] == got.excess_share
    assert Geometry.from_dict(report["geometry"]) == got.geometry
    for at in got.at:
        for name in ("pages", "bytes", "full_bytes", "bytes_per_token", "kept_share", "padding_bytes"):
            assert report[f"{name}_at"][str(at.tokens)] == getattr(at, name)
        for name in ("idle_pages", "idle_bytes", "conversations"):
            assert report[f"{name}_at"][str(at.tokens)] == getattr(at, name)
        assert at.idle_pages == got.geometry.idle_pages(at.tokens, drawn[0].observed)


SHAPE = ModelShape("m", 30, 3, 64, 2, "bfloat16", 8192)
UNEVEN = Profile(
    tuple(tuple(0.05 + 0.01 * (3 * layer + head) for head in range(3)) for layer in range(30)),
    ((0.0,) * 3,) * 30,
)


def warned(
    *, retention: float = 0.5, shape: ModelShape = SHAPE, profile: Profile = UNEVEN, **more: object
) -> str:
    config = TangramConfig.from_mapping({"retention": retention, **more})
    return " | ".join(predict(config, shape, profile).warnings)


def test_nothing_to_warn_of() -> None:
    assert warned() == ""
    assert warned(retention=1.0) == ""


def test_operators_are_warned() -> None:
    assert "more than a sixth" in warned(group_size=16)
    assert "below a retention of 0.2" in warned(retention=0.1)
    assert "no calibrated profile" in warned(scope="uniform")
    assert "no calibrated profile" in warned(profile=Profile.uniform(30, 3))
    assert "a group size that divides the model's 90 heads" in warned(scope="uniform", group_size=14)
    assert "a group size that divides a layer's 3 heads" in warned(scope="layer", group_size=2)
    assert "equal shares of 30 layers" in warned(group_size=1)


def test_a_retention_that_cannot_be_had_is_told() -> None:
    greedy = Profile(((0.9,) * 3,) * 30, ((0.2,) * 3,) * 30)
    assert "keep 1.00 of a chunk on average, not 0.25 as asked" in warned(retention=0.25, profile=greedy)
    assert "keep 0.25 of a chunk on average, not 0.05 as asked" in warned(retention=0.05, chunk=64)


def test_a_layer_s_group_is_capped_and_says_so_only_if_it_was_asked_for() -> None:
    assert "3 is used instead of 8" in warned(scope="layer", group_size=8)
    assert "is used instead of" not in warned(scope="layer")
    assert predict(TangramConfig(scope="layer", group_size=8), SHAPE, UNEVEN).geometry.group_size == 3


@given(st.one_of(st.integers(1, 200_000), st.sampled_from([n + d for n in LENGTHS for d in (-1, 0, 1)])))
def test_nobody_is_told_of_conversations_that_the_model_cannot_have(longest: int) -> None:
    lengths = default_lengths(longest)
    assert list(lengths) == sorted({n for n in LENGTHS if n <= longest} | {longest})
    shape = replace(SHAPE, max_model_len=longest)
    assert [at.tokens for at in predict(TangramConfig(), shape, UNEVEN).at] == list(lengths)


def test_uniform_ignores_the_profile_and_the_other_scopes_do_not() -> None:
    keeps = {
        scope: predict(TangramConfig(scope=scope, group_size=15), SHAPE, UNEVEN).geometry.keep
        for scope in ("model", "layer", "uniform")
    }
    assert set(keeps["uniform"]) == {256}
    assert len(set(keeps["model"])) > 3
    assert len(set(keeps["layer"])) > 3


def test_the_published_example() -> None:
    """SmolLM2-135M at a quarter of a uniform budget, as in test_geometry."""
    got: Prediction = predict(TangramConfig(retention=0.25), SHAPE, lengths=[8192]).within(10**9)
    (at,) = got.at
    assert (at.pages, at.bytes) == (990, 990 * 61440)
    assert at.full_bytes == 8192 * 30 * 3 * 2 * 64 * 2
    assert at.idle_pages == 912
    assert at.conversations == 17
    assert (got.excess_tokens, got.empty_slots, got.padding_share) == (0, 0, 0)

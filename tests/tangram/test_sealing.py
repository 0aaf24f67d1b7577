"""Sealing against a reference that works head by head and token by token."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tangram.config import PROFILE_SCORERS, QUERY_SCORERS, SCORERS
from tangram.errors import CacheIntegrityError
from tangram.geometry import Geometry, Tier
from tangram.mean_queries import MeanQueries
from tangram.rotary import Rotary
from tangram.scorers import Chunk, get_scorer
from tangram.sealing import Observed, seal_chunk, select

G = Geometry(2, 2, 4, 4, 2, 8, 4, 2, 3, (Tier(2, ((1, 1), (0, 0))), Tier(6, ((0, 1),)), Tier(8, ((1, 0),))))


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(0, 8))
def test_selection_takes_the_best_after_the_sink_in_order(seed: int, keep: int, sink: int) -> None:
    scores = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
    before = scores.clone()
    chosen = select(scores, keep, sink)
    assert torch.equal(scores, before), "the scores are the caller's"
    for head in range(2):
        order = sorted(range(8), key=lambda t: (t >= sink, -scores[head, t].item() if t >= sink else 0, t))
        assert chosen[head].tolist() == sorted(order[:keep])


def test_the_sink_wins_over_scores_that_are_no_numbers() -> None:
    scores = torch.tensor([[0.0, 0.0, torch.nan, 5.0, torch.inf, 1.0]])
    assert select(scores, 3, 2).tolist() == [[0, 1, 4]]
    assert select(scores, 5, 2).tolist() == [[0, 1, 3, 4, 5]]


def test_equal_scores_go_to_the_earlier_token() -> None:
    assert select(torch.zeros(1, 6), 3, 0).tolist() == [[0, 1, 2]]


WIDTH, GROUP = 4, 2
ROTARY = Rotary(torch.tensor([[1.0, 0.1], [0.0, 0.0]]))
SCALE = torch.tensor([0.5, 0.25])
MEANS = MeanQueries(torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(2)), ROTARY)


def whole_layers(states: torch.Tensor, queries: torch.Tensor, chunk: int, layer: int, sink: int) -> Chunk:
    """All KV heads of a layer, from plain tensors: states [n, layers, heads, 2 * D], queries [n, layers,
    heads, group, D]."""
    first, end, n = chunk * G.chunk, (chunk + 1) * G.chunk, G.boundary(chunk)
    keys, values = states[:n, layer].float().transpose(0, 1).split(G.head_size, dim=-1)
    return Chunk(
        layers=torch.tensor([layer, layer]),
        heads=torch.tensor([0, 1]),
        keys=keys[:, first:end],
        sink=sink,
        values=values[:, first:end],
        positions=torch.arange(first, end),
        recent=keys[:, end:],
        queries=queries[n - WIDTH : n, layer].permute(1, 2, 0, 3).float(),
        query_positions=torch.arange(n - WIDTH, n),
        scale=SCALE[layer].repeat(2),
        rotary=ROTARY,
        mean_query=MEANS.behind(n)[layer],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("name", SCORERS)
def test_sealed_pages_hold_the_kept_tokens_of_every_head(name: str, chunk: int, dtype: torch.dtype) -> None:
    """Pages are scattered and everything that was never written is NaN, so that reading it would show."""
    n = G.boundary(chunk)
    pages = list(range(200))
    random.Random(chunk).shuffle(pages)
    row = torch.tensor(pages[: G.pages(n)], dtype=torch.int32)
    pool = torch.full((200, G.group_size, G.page_tokens, 2 * G.head_size), torch.nan, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(n, 2, 2, 2 * G.head_size, generator=generator).to(dtype)
    queries = torch.randn(n, 2, 2, GROUP, G.head_size, generator=generator).to(dtype)
    for position in range(n):
        for tier, of in enumerate(G.tiers):
            for member, (layer, head) in enumerate(of.heads):
                page = row[G.ring_index(position, tier)]
                pool[page, member, position % G.page_tokens] = states[position, layer, head]
    before = pool.clone()
    scorer = get_scorer(name)
    observed = Observed(queries[n - WIDTH :].transpose(0, 1).flatten(2, 3), SCALE, ROTARY)
    seal_chunk(pool, row, G, chunk, 3, scorer, observed, mean_queries=MEANS)
    sink = 3 if chunk == 0 else 0
    scores = [scorer(whole_layers(states, queries, chunk, layer, sink)) for layer in range(2)]
    if scorer.whole_layer:
        scores = [of.mean(dim=0, keepdim=True).expand(2, -1) for of in scores]
    for tier, of in enumerate(G.tiers):
        for member, (layer, head) in enumerate(of.heads):
            whole = states[chunk * G.chunk : (chunk + 1) * G.chunk, layer, head]
            kept = select(scores[layer][head : head + 1], of.keep, sink)[0]
            for j, token in enumerate(kept.tolist()):
                page = row[G.sealed_index(chunk, tier, j)]
                assert torch.equal(pool[page, member, j % G.page_tokens], whole[token])
                before[page, member, j % G.page_tokens] = whole[token]
    # Nothing else was touched.
    torch.testing.assert_close(pool, before, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("name", SCORERS)
def test_queries_are_asked_for_only_where_they_are_needed(name: str) -> None:
    pool = torch.zeros(200, G.group_size, G.page_tokens, 2 * G.head_size)
    row = torch.arange(G.pages(G.boundary(0)), dtype=torch.int32)
    lacking = "without its queries" if name in QUERY_SCORERS else "without the mean queries of a profile"
    if name in (*QUERY_SCORERS, *PROFILE_SCORERS):
        with pytest.raises(CacheIntegrityError, match=lacking):
            seal_chunk(pool, row, G, 0, 3, get_scorer(name))
    else:
        seal_chunk(pool, row, G, 0, 3, get_scorer(name))

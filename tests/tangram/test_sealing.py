"""Sealing against a reference that works head by head and token by token."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tangram.config import SCORERS
from tangram.errors import ConfigError
from tangram.geometry import Geometry, Tier
from tangram.scorers import get_scorer
from tangram.scorers.keydiff import keydiff
from tangram.sealing import seal_chunk, select

G = Geometry(2, 2, 4, 4, 2, 8, 4, 2, 3, (Tier(2, ((1, 1), (0, 0))), Tier(6, ((0, 1),)), Tier(8, ((1, 0),))))


def plain_keydiff(keys: list[list[float]]) -> list[float]:
    def unit(v: list[float]) -> list[float]:
        norm = math.sqrt(sum(x * x for x in v))
        return [x / norm for x in v]

    units = [unit(key) for key in keys]
    anchor = unit([sum(u[i] for u in units) for i in range(len(keys[0]))])
    return [-sum(a * b for a, b in zip(anchor, u, strict=True)) for u in units]


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(2, 8))
def test_keydiff_is_its_formula(seed: int, tokens: int, size: int) -> None:
    keys = torch.randn(3, tokens, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = torch.tensor([plain_keydiff(head.tolist()) for head in keys])
    torch.testing.assert_close(keydiff(keys).float(), expected.float(), atol=1e-5, rtol=1e-5)


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(0, 8))
def test_selection_takes_the_best_after_the_sink_in_order(seed: int, keep: int, sink: int) -> None:
    keys = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(seed))
    chosen = select(keys, keep, sink, keydiff)
    scores = keydiff(keys)
    for head in range(2):
        order = sorted(range(8), key=lambda t: (t >= sink, -scores[head, t].item() if t >= sink else 0, t))
        assert chosen[head].tolist() == sorted(order[:keep])


def test_equal_scores_go_to_the_earlier_token() -> None:
    assert select(torch.ones(1, 6, 4), 3, 0, keydiff).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_sealed_pages_hold_the_kept_tokens_of_every_head(chunk: int, dtype: torch.dtype) -> None:
    """Pages are scattered and everything that was never written is NaN, so that reading it would show."""
    n = G.boundary(chunk)
    pages = list(range(200))
    random.Random(chunk).shuffle(pages)
    row = torch.tensor(pages[: G.pages(n)], dtype=torch.int32)
    pool = torch.full((200, G.group_size, G.page_tokens, 2 * G.head_size), torch.nan, dtype=dtype)
    states = torch.randn(n, 2, 2, 2 * G.head_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    for position in range(n):
        for tier, of in enumerate(G.tiers):
            for member, (layer, head) in enumerate(of.heads):
                page = row[G.ring_index(position, tier)]
                pool[page, member, position % G.page_tokens] = states[position, layer, head]
    before = pool.clone()
    seal_chunk(pool, row, G, chunk, 3, keydiff)
    for tier, of in enumerate(G.tiers):
        for member, (layer, head) in enumerate(of.heads):
            whole = states[chunk * G.chunk : (chunk + 1) * G.chunk, layer, head]
            sink = 3 if chunk == 0 else 0
            kept = select(whole[None, :, : G.head_size], of.keep, sink, keydiff)[0]
            for j, token in enumerate(kept.tolist()):
                page = row[G.sealed_index(chunk, tier, j)]
                assert torch.equal(pool[page, member, j % G.page_tokens], whole[token])
                before[page, member, j % G.page_tokens] = whole[token]
    # Nothing else was touched.
    torch.testing.assert_close(pool, before, equal_nan=True, atol=0, rtol=0)


def test_all_scorers_of_the_configuration_exist() -> None:
    for name in SCORERS:
        scores = get_scorer(name)(torch.randn(2, 5, 4))
        assert scores.shape == (2, 5)
    with pytest.raises(ConfigError, match="scorer: must be one of keydiff"):
        get_scorer("none")

"""The references behind the registered operators, for devices and machines without kernels of their own."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch

from kernels import reference
from kernels.layout import RaggedLayout


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    head_tier: torch.Tensor,
    head_member: torch.Tensor,
    tier_offset: torch.Tensor,
    page_tokens: int,
    ring_slots: int,
    chunk: int,
    window: int,
) -> None:
    """``tangram::ragged_append`` in plain torch; the arguments are those of ``kernels.ragged``."""
    tables = (rows, query_start_loc, seq_lens, head_tier, head_member)
    layout = _layout(tuple(tier_offset.tolist()), page_tokens, ring_slots, chunk, window, key.shape[-1])
    reference.check_values(pool, *tables, layout, key.shape[0])
    reference.append(key, value, pool, *tables, layout)


def attention(
    out: torch.Tensor,
    query: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    head_tier: torch.Tensor,
    head_member: torch.Tensor,
    tier_offset: torch.Tensor,
    page_tokens: int,
    ring_slots: int,
    chunk: int,
    window: int,
    scale: float,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    """``tangram::ragged_attention`` in plain torch; the arguments are those of ``kernels.ragged``."""
    tables = (rows, query_start_loc, seq_lens, head_tier, head_member)
    layout = _layout(tuple(tier_offset.tolist()), page_tokens, ring_slots, chunk, window, query.shape[-1])
    reference.check_values(pool, *tables, layout, query.shape[0])
    reference.attention(out, query, pool, *tables, layout, scale, sinks, soft_cap)


@lru_cache(maxsize=64)
def _layout(
    offsets: tuple[int, ...], page_tokens: int, ring_slots: int, chunk: int, window: int, head_size: int
) -> RaggedLayout:
    keep = tuple((stop - start) * page_tokens for start, stop in pairwise(offsets))
    return RaggedLayout(page_tokens, ring_slots, chunk, window, keep, head_size)

"""The references behind the registered operators, for devices and machines without kernels of their own."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch.nn.functional import cosine_similarity, normalize

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
    max_query: int = 0,
    singles: bool = True,
) -> None:
    """``tangram::ragged_attention`` in plain torch; the arguments are those of ``kernels.ragged``."""
    del max_query, singles  # hints, of no use here
    tables = (rows, query_start_loc, seq_lens, head_tier, head_member)
    layout = _layout(tuple(tier_offset.tolist()), page_tokens, ring_slots, chunk, window, query.shape[-1])
    reference.check_values(pool, *tables, layout, query.shape[0])
    reference.attention(out, query, pool, *tables, layout, scale, sinks, soft_cap)


def keydiff(keys: torch.Tensor) -> torch.Tensor:
    """Minus the cosine between each key and the mean of its head's unit keys: ``[H, C, D]`` to ``[H, C]``."""
    anchor = normalize(keys, dim=-1).mean(dim=-2, keepdim=True)
    return -cosine_similarity(keys, anchor, dim=-1)


def seal(
    pool: torch.Tensor,
    rows: torch.Tensor,
    due: torch.Tensor,
    tier_offset: torch.Tensor,
    tier_heads: torch.Tensor,
    page_tokens: int,
    ring_slots: int,
    chunk: int,
    window: int,
    sink: int,
    scores: torch.Tensor | None = None,
) -> None:
    """``tangram::ragged_seal`` in plain torch, one chunk and tier at a time; see ``kernels.sealing``."""
    layout = _layout(tuple(tier_offset.tolist()), page_tokens, ring_slots, chunk, window, pool.shape[3] // 2)
    keep = layout.keep
    heads_of = tier_heads.tolist()
    for index, (request, number) in enumerate(due.tolist()):
        row = rows[request].long()
        for tier, heads in enumerate(heads_of):
            first = number * chunk
            ring = [layout.ring_entry(p, tier) for p in range(first, first + chunk, page_tokens)]
            states = pool[row[ring], :heads].transpose(0, 1).reshape(heads, chunk, -1)
            if keep[tier] < chunk:
                own = None if scores is None else scores[index, tier, :heads].clone()
                own = keydiff(states[..., : layout.head_size].float()) if own is None else own
                own[:, : max(0, min(chunk, sink - first))] = torch.inf
                order = torch.sort(own, dim=-1, descending=True, stable=True).indices
                kept = order[:, : keep[tier]].sort(dim=-1).values
                states = states.gather(1, kept.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
            target = list(layout.kept_entries(number, tier))
            pages = states.reshape(heads, len(target), page_tokens, -1).transpose(0, 1)
            pool[row[target], :heads] = pages


@lru_cache(maxsize=64)
def _layout(
    offsets: tuple[int, ...], page_tokens: int, ring_slots: int, chunk: int, window: int, head_size: int
) -> RaggedLayout:
    keep = tuple((stop - start) * page_tokens for start, stop in pairwise(offsets))
    return RaggedLayout(page_tokens, ring_slots, chunk, window, keep, head_size)

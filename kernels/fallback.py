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


def places(scores: torch.Tensor) -> torch.Tensor:
    """How many of a head's tokens score lower than each, as many for equal ones: ``[.., C]``."""
    return torch.searchsorted(scores.sort(dim=-1).values, scores.contiguous())


def keyvalue(
    keys: torch.Tensor, values: torch.Tensor, sink: int, mean_query: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of a token's places by :func:`keydiff`, by the norm of its value and, where a query is given
    for each head, by its key's product with that; the first ``sink`` tokens are above all others in each.

    Args:
        keys, values: ``[H, C, D]``.
        mean_query: ``[H, D]``.

    Returns:
        ``[H, C]``.
    """
    orders = [keydiff(keys), values.norm(dim=-1)]
    if mean_query is not None:
        orders.append((keys @ mean_query.unsqueeze(-1)).squeeze(-1))
    scores = torch.stack(orders)
    scores[..., :sink] = torch.inf
    return places(scores).sum(dim=0).float()


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
    head_tier: torch.Tensor | None = None,
    head_member: torch.Tensor | None = None,
    staged: torch.Tensor | None = None,
    origin: torch.Tensor | None = None,
    values: bool = False,
    asked: torch.Tensor | None = None,
) -> None:
    """``tangram::ragged_seal`` in plain torch, one chunk and tier at a time; see ``kernels.sealing``."""
    layout = _layout(tuple(tier_offset.tolist()), page_tokens, ring_slots, chunk, window, pool.shape[3] // 2)
    if head_tier is None or head_member is None:
        heads_of = [(tier, [*range(n)], [*range(n)]) for tier, n in enumerate(tier_heads.tolist())]
    else:
        table = list(zip(head_tier.tolist(), head_member.tolist(), strict=True))
        heads_of = [
            (
                tier,
                [member for of, member in table if of == tier],
                [h for h, (of, _) in enumerate(table) if of == tier],
            )
            for tier in range(layout.tiers)
        ]
    for index, (request, number) in enumerate(due.tolist()):
        row = rows[request].long()
        for tier, members, heads in heads_of:
            if not members:
                continue
            first = number * chunk
            if staged is None or origin is None:
                ring = [layout.ring_entry(p, tier) for p in range(first, first + chunk, page_tokens)]
                pages = pool[row[ring]][:, members]
            else:
                begin = int(origin[index])
                pages = staged[begin : begin + chunk // page_tokens, heads]
            states = pages.transpose(0, 1).reshape(len(members), chunk, -1)
            if layout.keep[tier] < chunk:
                own = None if scores is None else scores[index, tier, : len(members)].clone()
                query = None
                if asked is not None:
                    query = asked[index, tier, : len(members)] if head_tier is None else asked[index, heads]
                states = _kept(states, layout, tier, max(0, min(chunk, sink - first)), own, values, query)
            target = list(layout.kept_entries(number, tier))
            pages = states.reshape(len(members), len(target), page_tokens, -1).transpose(0, 1)
            pool[row[target][:, None], torch.tensor(members)] = pages


def _kept(
    states: torch.Tensor,
    layout: RaggedLayout,
    tier: int,
    sink: int,
    scores: torch.Tensor | None,
    values: bool,
    asked: torch.Tensor | None,
) -> torch.Tensor:
    """What heads of a tier keep of a chunk's states: ``[heads, C, 2 * D]`` to ``[heads, keep, 2 * D]``."""
    if scores is None:
        key, value = states.float().split(layout.head_size, dim=-1)
        scores = keyvalue(key, value, sink, asked) if values else keydiff(key)
    scores[:, :sink] = torch.inf
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    kept = order[:, : layout.keep[tier]].sort(dim=-1).values
    return states.gather(1, kept.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


@lru_cache(maxsize=64)
def _layout(
    offsets: tuple[int, ...], page_tokens: int, ring_slots: int, chunk: int, window: int, head_size: int
) -> RaggedLayout:
    keep = tuple((stop - start) * page_tokens for start, stop in pairwise(offsets))
    return RaggedLayout(page_tokens, ring_slots, chunk, window, keep, head_size)


def stage(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    head_tier: torch.Tensor,
    head_member: torch.Tensor,
    tier_offset: torch.Tensor,
    page_tokens: int,
    ring_slots: int,
    chunk: int,
    window: int,
    requests: torch.Tensor,
    segments: torch.Tensor,
    starts: torch.Tensor,
    staged: torch.Tensor,
    packed: torch.Tensor,
    table: torch.Tensor,
    used: torch.Tensor,
    unit: int,
    staged_at: int,
    most_tail: int,
    most_new: int,
    most_tokens: int,
) -> None:
    """``tangram::ragged_stage`` in plain torch; see ``kernels.wide``."""
    del most_tail, most_new, most_tokens  # how many blocks a GPU needs
    layout = _layout(tuple(tier_offset.tolist()), page_tokens, ring_slots, chunk, window, key.shape[2])
    tiers, members = head_tier.long(), head_member.long()
    heads = torch.arange(len(tiers), device=pool.device)
    for row, token, cached, length, first, page in requests.tolist():
        positions = torch.arange(first, length, device=pool.device)
        ring = rows[row].long()[(positions // page_tokens % ring_slots * layout.tiers)[:, None] + tiers]
        offset = (positions % page_tokens)[:, None].expand_as(ring)
        places = (ring, members.expand_as(ring), offset)
        states = torch.cat((key, value), dim=-1)[token : token + length - cached]
        raw = torch.cat((pool[places][: cached - first], states))
        at = page + (positions - first) // page_tokens
        staged[at[:, None].expand_as(ring), heads.expand_as(ring), offset] = raw
        new = positions >= max(cached, (-(-length // page_tokens) - ring_slots) * page_tokens)
        pool[tuple(place[new] for place in places)] = raw[new]
    slot = page_tokens * 2 * layout.head_size
    group = query.shape[1] // len(tiers)
    bounds = starts.tolist()
    for segment, (row, token, count, sealed, raw, page) in enumerate(segments.tolist()):
        for head, (tier, member) in enumerate(zip(head_tier.tolist(), head_member.tolist(), strict=True)):
            sequence = segment * len(tiers) + head
            kept = [entry for number in range(sealed) for entry in layout.kept_entries(number, tier)]
            pages = [(int(rows[row, entry]) * pool.stride(0) + member * slot) // unit for entry in kept]
            behind = -(-raw // page_tokens)
            pages += [staged_at + ((page + i) * len(tiers) + head) * (slot // unit) for i in range(behind)]
            table[sequence, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            used[sequence] = len(kept) * page_tokens + raw
            own = query[token : token + count, head * group : (head + 1) * group]
            packed[bounds[sequence] : bounds[sequence + 1]] = own


def unpack(
    out: torch.Tensor,
    packed: torch.Tensor,
    segments: torch.Tensor,
    starts: torch.Tensor,
    kv_heads: int,
    most_tokens: int,
) -> None:
    """``tangram::ragged_unpack`` in plain torch; see ``kernels.wide``."""
    del most_tokens
    group, bounds = packed.shape[1], starts.tolist()
    for segment, (_, token, count, *_) in enumerate(segments.tolist()):
        for head in range(kv_heads):
            sequence = segment * kv_heads + head
            target = out[token : token + count, head * group : (head + 1) * group]
            target.copy_(packed[bounds[sequence] : bounds[sequence + 1]])

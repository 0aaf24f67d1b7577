"""Plain-torch float32 references of the ragged kernels: slow, short, and the definition of what is right.

They take what ``kernels.ragged`` takes, in the same shapes, and run wherever the tensors are.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.layout import RaggedLayout


def ragged_gather(
    pool: torch.Tensor,
    row: torch.Tensor,
    head_tier: torch.Tensor,
    head_member: torch.Tensor,
    layout: RaggedLayout,
    seq_len: int,
    sealed: int | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Read what each head of a layer holds of one request.

    Args:
        pool: ``[P, G, B, 2 * D]``.
        row: ``[width]`` page ids.
        head_tier, head_member: ``[Hkv]``, the layer's head table.
        seq_len: tokens in the cache.
        sealed: chunks to take as sealed; by default all that ``seq_len`` seals.

    Returns:
        For each KV head its keys and values, ``[visible, D]`` each: the kept tokens chunk by chunk, then
        the raw ones.
    """
    chunks = layout.sealed(seq_len) if sealed is None else sealed
    heads = zip(head_tier.tolist(), head_member.tolist(), strict=True)
    return [_head_history(pool, row, layout, tier, member, chunks, seq_len) for tier, member in heads]


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    head_tier: torch.Tensor,
    head_member: torch.Tensor,
    layout: RaggedLayout,
) -> None:
    """Write each request's new keys and values into its ring."""
    tiers, members = head_tier.long(), head_member.long()
    head = torch.arange(len(tiers), device=pool.device)
    for request, (start, stop, length) in enumerate(_steps(query_start_loc, seq_lens)):
        positions = torch.arange(length - (stop - start), length, device=pool.device)
        slots = (positions // layout.page_tokens % layout.ring_slots * layout.tiers)[:, None] + tiers
        pages = rows[request].long()[slots]
        target = (pages, members.expand_as(pages), (positions % layout.page_tokens)[:, None].expand_as(pages))
        fresh = torch.cat((key[start:stop], value[start:stop]), dim=-1)
        pool[target] = fresh[:, head].to(pool.dtype)


def attention(
    out: torch.Tensor,
    query: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    head_tier: torch.Tensor,
    head_member: torch.Tensor,
    layout: RaggedLayout,
    scale: float,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    """Attend each request's new queries to its kept and raw tokens, in float32."""
    group = query.shape[1] // len(head_tier)
    for request, (start, stop, length) in enumerate(_steps(query_start_loc, seq_lens)):
        if start == stop:
            continue
        count = stop - start
        sealed = layout.sealed(length - count)
        history = ragged_gather(pool, rows[request], head_tier, head_member, layout, length, sealed)
        for head, (keys, values) in enumerate(history):
            q = query[start:stop, head * group : (head + 1) * group].float()
            scores = torch.einsum("qgd,jd->gqj", q, keys.float()) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            ahead = torch.ones(count, len(keys), dtype=torch.bool, device=q.device).triu(
                len(keys) - count + 1
            )
            scores = scores.masked_fill(ahead, float("-inf"))
            if sinks is None:
                weights = scores.softmax(dim=-1)
            else:
                sink = sinks[head * group : (head + 1) * group, None, None].expand(group, count, 1)
                weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
            mixed = torch.einsum("gqj,jd->qgd", weights, values.float())
            out[start:stop, head * group : (head + 1) * group] = mixed.to(out.dtype)


def check_values(
    pool: torch.Tensor,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    head_tier: torch.Tensor,
    head_member: torch.Tensor,
    layout: RaggedLayout,
    tokens: int,
) -> None:
    """Check what the tables hold, as the native kernels do for the entries that they use.

    Raises:
        ValueError: a bound, length, page id or head is out of range; the message names the table and the
        request.
    """
    for head, (tier, member) in enumerate(zip(head_tier.tolist(), head_member.tolist(), strict=True)):
        if not (0 <= tier < layout.tiers and 0 <= member < pool.shape[1]):
            raise ValueError(
                f"head_tier, head_member: head {head} names a tier or member that does not exist"
            )
    for request, (start, stop, length) in enumerate(_steps(query_start_loc, seq_lens)):
        if not 0 <= start <= stop <= tokens:
            raise ValueError(
                f"query_start_loc: the bounds of request {request} decrease"
                " or pass the tokens that were given"
            )
        if start == stop:
            continue
        cached = length - (stop - start)
        if cached < 0:
            raise ValueError(f"seq_lens: request {request} is shorter than its new tokens")
        if length > layout.step_end(cached):
            raise ValueError(
                f"seq_lens: the step of request {request} crosses a seal boundary; end the step there"
            )
        if layout.width(cached) > rows.shape[1]:
            raise ValueError(f"rows: the row of request {request} ends before its sealed chunks do")
        entries = _entries(layout, sorted(set(head_tier.tolist())), layout.sealed(cached), length)
        used = rows[request, entries]
        if bool(((used < 0) | (used >= pool.shape[0])).any()):
            raise ValueError(f"rows: request {request} names a page outside the pool")


def _entries(layout: RaggedLayout, tiers: list[int], sealed: int, tokens: int) -> list[int]:
    kept = [entry for tier in tiers for chunk in range(sealed) for entry in layout.kept_entries(chunk, tier)]
    return kept + [entry for tier in tiers for entry in layout.raw_entries(sealed, tokens, tier)]


def _head_history(
    pool: torch.Tensor,
    row: torch.Tensor,
    layout: RaggedLayout,
    tier: int,
    member: int,
    sealed: int,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    entries = _entries(layout, [tier], sealed, tokens)
    pages = row[torch.tensor(entries, dtype=torch.long, device=row.device)].long()
    visible = sealed * layout.keep[tier] + tokens - sealed * layout.chunk
    both = pool[pages, member].reshape(-1, 2 * layout.head_size)[:visible]
    return both[:, : layout.head_size], both[:, layout.head_size :]


def _steps(query_start_loc: torch.Tensor, seq_lens: torch.Tensor) -> list[tuple[int, int, int]]:
    """(first query row, one past the last, sequence length after the step) of each request; no rows where the
    length is 0."""
    bounds = pairwise(query_start_loc.tolist())
    return [
        (start, stop if length else start, length)
        for (start, stop), length in zip(bounds, seq_lens.tolist(), strict=True)
    ]

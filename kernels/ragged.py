"""The operators of ragged paging: write new keys and values, attend new queries, or both in one.

All take one step of a batch of ``N`` requests, flattened over its ``T`` tokens as vLLM does: request ``i``
owns the rows ``query_start_loc[i] .. query_start_loc[i + 1] - 1`` and holds ``seq_lens[i]`` tokens once the
step is done; where that is 0 the request is skipped, whatever rows it owns. Rows from
``query_start_loc[N]`` on are padding: never read, never written. A step must not cross a seal boundary
(``RaggedLayout.step_end``), so all of its queries see the same sealed chunks; for one that does there is
``kernels.wide``.
"""

from __future__ import annotations

import torch

from kernels import ops as ops  # registers the operators
from kernels.checks import check_batch, check_pool, check_sinks, check_tokens
from kernels.layout import RaggedLayout
from kernels.reference import ragged_gather

__all__ = ["ragged_append", "ragged_append_attention", "ragged_attention", "ragged_gather"]


def ragged_append(
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
    """Write the step's keys and values of one layer into the rings.

    Args:
        key, value: ``[T, Hkv, D]``; token and head strides are free.
        pool: ``[P, G, B, 2 * D]``, written in place.
        rows: int32 ``[N, width]`` page ids.
        query_start_loc: int32 ``[N + 1]``.
        seq_lens: int32 ``[N]``, lengths after this step.
        head_tier, head_member: int32 ``[Hkv]``, the layer's head table.
        layout: the sizes behind the row.

    Raises:
        ValueError: a shape, stride or device does not fit, or (on the CPU) a page id, length or table entry
            is out of range.
        TypeError: a tensor has a type that does not fit.
    """
    check_pool(pool, layout)
    check_batch(pool, rows, query_start_loc, seq_lens, head_tier, head_member)
    _check_new(key, value, pool, head_tier, layout)
    torch.ops.tangram.ragged_append.default(
        key,
        value,
        pool,
        rows,
        query_start_loc,
        seq_lens,
        head_tier,
        head_member,
        *layout.operands(pool.device),
    )


def ragged_attention(
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
    max_query: int = 0,
    singles: bool = True,
) -> None:
    """Attend the step's queries of one layer to what their heads hold, the step's own tokens included.

    The keys and values of the step must be in the pool already (``ragged_append``). Sums are float32; only
    the output is rounded. On a CPU a query's result does not depend on how the step was cut, on the rest of
    the batch or on the number of threads, bit for bit, as long as one native library computes it. On a GPU
    the batch decides where a history is cut, and so the order of the sums.

    Args:
        out: ``[T, Hq, D]``, written in place; token and head strides are free. query: ``[T, Hq, D]``;
            ``Hq`` is a multiple of ``Hkv``, query head h reads KV head ``h // (Hq / Hkv)``. scale: factor
            of the scores before the softmax. sinks: float32 ``[Hq]``, a score beside the tokens' that takes
            weight from them and adds no value (gpt-oss). soft_cap: above 0, a score s becomes
            ``soft_cap * tanh(s / soft_cap)`` (Gemma-2). max_query: no request has more new tokens than this,
            a hint that saves a launch when it is 1; 0 where that is not known. singles: False is a hint that
            no request has exactly one new token, and saves another; where it is wrong, such requests get no
            output on a GPU. pool, rows, query_start_loc, seq_lens, head_tier, head_member, layout: as in
            ``ragged_append``.

    Raises:
        ValueError, TypeError: as in ``ragged_append``.
    """
    check_pool(pool, layout)
    check_batch(pool, rows, query_start_loc, seq_lens, head_tier, head_member)
    _check_queries(out, query, pool, head_tier, layout, sinks, soft_cap)
    torch.ops.tangram.ragged_attention.default(
        out,
        query,
        pool,
        rows,
        query_start_loc,
        seq_lens,
        head_tier,
        head_member,
        *layout.operands(pool.device),
        scale,
        sinks,
        soft_cap,
        max_query,
        singles,
    )


def ragged_append_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
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
    max_query: int = 0,
    singles: bool = True,
) -> None:
    """``ragged_append`` and then ``ragged_attention``, with their arguments.

    On a GPU a step with ``max_query`` 1 takes one launch for both, where ``TANGRAM_DECODE_LAUNCH`` does not
    say otherwise: so no request may then have more new tokens, or they are lost. Where it says ``early``, the
    kernel launched just before must not write ``rows``, ``query_start_loc``, ``seq_lens`` or the head table.

    Raises:
        ValueError, TypeError: as both.
    """
    check_pool(pool, layout)
    check_batch(pool, rows, query_start_loc, seq_lens, head_tier, head_member)
    _check_new(key, value, pool, head_tier, layout)
    _check_queries(out, query, pool, head_tier, layout, sinks, soft_cap)
    if key.shape[0] != query.shape[0]:
        raise ValueError(f"key: {key.shape[0]} tokens, but query has {query.shape[0]}")
    torch.ops.tangram.ragged_append_attention.default(
        out,
        query,
        key,
        value,
        pool,
        rows,
        query_start_loc,
        seq_lens,
        head_tier,
        head_member,
        *layout.operands(pool.device),
        scale,
        sinks,
        soft_cap,
        max_query,
        singles,
    )


def _check_new(
    key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, head_tier: torch.Tensor, layout: RaggedLayout
) -> None:
    """Check the step's keys and values."""
    heads = head_tier.shape[0]
    check_tokens("key", key, pool, heads, layout.head_size)
    check_tokens("value", value, pool, heads, layout.head_size)
    if key.shape[0] != value.shape[0]:
        raise ValueError(f"value: {value.shape[0]} tokens, but key has {key.shape[0]}")


def _check_queries(
    out: torch.Tensor,
    query: torch.Tensor,
    pool: torch.Tensor,
    head_tier: torch.Tensor,
    layout: RaggedLayout,
    sinks: torch.Tensor | None,
    soft_cap: float,
) -> None:
    """Check the step's queries, their outputs and how they are scored."""
    check_tokens("query", query, pool, None, layout.head_size)
    check_tokens("out", out, pool, query.shape[1], layout.head_size)
    heads = head_tier.shape[0]
    if heads == 0 or query.shape[1] % heads:
        raise ValueError(f"query: {query.shape[1]} heads are not a multiple of the {heads} KV heads")
    if out.shape[0] != query.shape[0]:
        raise ValueError(f"out: {out.shape[0]} tokens, but query has {query.shape[0]}")
    if sinks is not None:
        check_sinks(sinks, query)
    if not 0.0 <= soft_cap < float("inf"):
        raise ValueError(f"soft_cap: must be 0 for none or positive and finite, is {soft_cap}")

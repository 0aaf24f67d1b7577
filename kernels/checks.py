"""Argument checks shared by every device: shapes, strides and types, never the values inside a tensor.

They read no tensor memory, so that they neither wait for a device nor break the capture of a graph.
"""

from __future__ import annotations

import torch

from kernels.layout import RaggedLayout

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_pool(pool: torch.Tensor, layout: RaggedLayout) -> None:
    """Check that ``pool`` is ``[P, G, B, 2 * D]`` and that at most its page stride is padded."""
    shape = pool.shape
    if len(shape) != 4 or shape[2] != layout.page_tokens or shape[3] != 2 * layout.head_size:
        raise ValueError(
            f"pool: expected [pages, members, {layout.page_tokens}, {2 * layout.head_size}],"
            f" got {list(shape)}"
        )
    row = shape[3]
    page = shape[1] * shape[2] * row
    stride = pool.stride()
    if stride[1:] != (shape[2] * row, row, 1) or stride[0] < page:
        raise ValueError(f"pool: only the page stride may be padded, the strides are {list(stride)}")
    if pool.dtype not in DTYPES:
        raise TypeError(f"pool: {pool.dtype} is not supported, use one of {[str(dtype) for dtype in DTYPES]}")


def check_tokens(
    name: str, tensor: torch.Tensor, pool: torch.Tensor, heads: int | None, head_size: int
) -> None:
    """Check that ``tensor`` is ``[T, heads, D]`` in the pool's type, its heads' elements adjacent in
    memory."""
    shape = tensor.shape
    if len(shape) != 3 or shape[2] != head_size or (heads is not None and shape[1] != heads):
        raise ValueError(f"{name}: expected [tokens, {heads or 'heads'}, {head_size}], got {list(shape)}")
    if tensor.stride(2) != 1:
        raise ValueError(
            f"{name}: the elements of a head must be adjacent, the strides are {list(tensor.stride())}"
        )
    if tensor.dtype != pool.dtype:
        raise TypeError(f"{name}: {tensor.dtype} differs from the pool's {pool.dtype}")
    if tensor.device != pool.device:
        raise ValueError(f"{name}: is on {tensor.device}, the pool is on {pool.device}")


def check_sinks(sinks: torch.Tensor, query: torch.Tensor) -> None:
    """Check that ``sinks`` is contiguous float32 ``[Hq]`` beside the queries."""
    if sinks.dtype != torch.float32:
        raise TypeError(f"sinks: must be float32, is {sinks.dtype}")
    if sinks.shape != query.shape[1:2] or not sinks.is_contiguous():
        raise ValueError(f"sinks: expected [{query.shape[1]}], contiguous, got {list(sinks.shape)}")
    if sinks.device != query.device:
        raise ValueError(f"sinks: is on {sinks.device}, the queries are on {query.device}")


def check_batch(
    pool: torch.Tensor,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    head_tier: torch.Tensor,
    head_member: torch.Tensor,
) -> None:
    """Check the int32 tables: ``rows [N, width]``, ``query_start_loc [N + 1]``, ``seq_lens [N]``, heads
    ``[Hkv]``."""
    int32 = torch.int32
    if not (
        rows.dtype is query_start_loc.dtype is seq_lens.dtype is int32
        and head_tier.dtype is head_member.dtype is int32
        and rows.dim() == 2
        and query_start_loc.dim() == seq_lens.dim() == head_tier.dim() == head_member.dim() == 1
        and query_start_loc.is_contiguous()
        and seq_lens.is_contiguous()
        and head_tier.is_contiguous()
        and head_member.is_contiguous()
        and rows.stride(1) == 1
        and rows.device == query_start_loc.device == seq_lens.device == pool.device
        and head_tier.device == head_member.device == pool.device
    ):
        _explain_tables(
            pool,
            rows=rows,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            head_tier=head_tier,
            head_member=head_member,
        )
    requests = rows.shape[0]
    if seq_lens.shape[0] != requests:
        raise ValueError(f"seq_lens: {seq_lens.shape[0]} lengths for {requests} rows")
    if query_start_loc.shape[0] != requests + 1:
        raise ValueError(
            f"query_start_loc: {query_start_loc.shape[0]} bounds for {requests} rows, need one more"
        )
    if head_tier.shape != head_member.shape:
        raise ValueError(f"head_member: {head_member.shape[0]} heads, but head_tier has {head_tier.shape[0]}")


def _explain_tables(pool: torch.Tensor, **tables: torch.Tensor) -> None:
    """Raise for the first table that is not as it must be; the caller found that one of them is not."""
    for name, table in tables.items():
        dims = 2 if name == "rows" else 1
        if table.dtype != torch.int32:
            raise TypeError(f"{name}: must be int32, is {table.dtype}")
        if table.dim() != dims:
            raise ValueError(f"{name}: must have {dims} dimensions, has {table.dim()}")
        if table.device != pool.device:
            raise ValueError(f"{name}: is on {table.device}, the pool is on {pool.device}")
        if table.stride(dims - 1) != 1:
            raise ValueError(f"{name}: the last dimension must be contiguous")

"""Sealing a chunk: choose the tokens that each head keeps and write them to their pages.

The operator takes all chunks of a step that are due at once, for all heads of all layers. Sealed pages are
written, the ring is only read.
"""

from __future__ import annotations

import torch

from kernels import ops as ops  # registers the operators
from kernels.checks import check_pool
from kernels.layout import RaggedLayout


def ragged_seal(
    pool: torch.Tensor,
    rows: torch.Tensor,
    due: torch.Tensor,
    tier_heads: torch.Tensor,
    layout: RaggedLayout,
    sink: int,
    scores: torch.Tensor | None = None,
    heads: tuple[torch.Tensor, torch.Tensor] | None = None,
    staged: tuple[torch.Tensor, torch.Tensor] | None = None,
    values: bool = False,
    asked: torch.Tensor | None = None,
) -> None:
    """Seal chunks: for each head keep its ``layout.keep`` highest tokens, in the order of their positions.

    Equal scores are decided in favour of the earlier token.

    Args:
        pool: ``[P, G, B, 2 * D]``, written in place.
        rows: int32 ``[N, width]`` page ids; must reach the chunks' sealed pages.
        due: int32 ``[M, 2]``, the row and the index of each chunk; all tokens of a chunk must be in its ring.
        tier_heads: int32 ``[K]``, how many of a page's members each tier has.
        layout: the sizes behind the row.
        sink: so many first tokens of a sequence always win.
        scores: float32 ``[M, K, G, C]``, the higher the rather kept; by default minus the cosine between a
            key and the mean of its chunk's unit keys (KeyDiff, arXiv 2504.15364).
        heads: ``(head_tier, head_member)``, int32 ``[Hkv]`` each: seal one layer's heads only, as its forward
            pass does in the middle of a step. ``scores`` cannot be given then, and ``tier_heads`` is ignored.
        staged: ``(pages, origin)``: the chunks' tokens lie there rather than in the rings; only with
            ``heads``. ``pages``: ``[pages, Hkv, B, 2 * D]``; ``origin``: int32 ``[M]``, where each chunk's
            pages begin.
        values: without ``scores``, rank by the sum of a token's places in two orders: that of KeyDiff, and
            that of the norms of values.
        asked: with ``values``, a third order: that of the products of keys with what each head is asked,
            float32 ``[M, K, G, D]``, or ``[M, Hkv, D]`` for one layer's heads.

    Raises:
        ValueError: a shape, stride or device does not fit.
        TypeError: a tensor has a type that does not fit.
    """
    check_pool(pool, layout)
    shapes: dict[str, tuple[torch.Tensor, torch.dtype, tuple[int, ...]]] = {
        "rows": (rows, torch.int32, (rows.shape[0], rows.shape[-1])),
        "due": (due, torch.int32, (due.shape[0], 2)),
        "tier_heads": (tier_heads, torch.int32, (layout.tiers,)),
    }
    if scores is not None:
        expected = (due.shape[0], layout.tiers, pool.shape[1], layout.chunk)
        shapes["scores"] = (scores, torch.float32, expected)
    if asked is not None:
        of_chunk = (layout.tiers, pool.shape[1]) if heads is None else (heads[0].shape[0],)
        shapes["asked"] = (asked, torch.float32, (due.shape[0], *of_chunk, layout.head_size))
        if not values or scores is not None:
            raise ValueError("asked: is an order beside that of the norms of values, and not beside scores")
    if heads is not None:
        count = heads[0].shape[0]
        shapes["head_tier"] = (heads[0], torch.int32, (count,))
        shapes["head_member"] = (heads[1], torch.int32, (count,))
        if scores is not None:
            raise ValueError("scores: cannot be given for one layer's heads")
    if staged is not None:
        if heads is None:
            raise ValueError("staged: belongs to one layer's heads, which are not given")
        pages = staged[0].shape[0]
        expected = (pages, heads[0].shape[0], layout.page_tokens, 2 * layout.head_size)
        shapes["staged"] = (staged[0], pool.dtype, expected)
        shapes["origin"] = (staged[1], torch.int32, (due.shape[0],))
    for name, (tensor, dtype, shape) in shapes.items():
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: must be {dtype}, is {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected {list(shape)}, got {list(tensor.shape)}")
        if tensor.device != pool.device:
            raise ValueError(f"{name}: is on {tensor.device}, the pool is on {pool.device}")
        if tensor.stride(-1) != 1 or (name != "rows" and not tensor.is_contiguous()):
            raise ValueError(f"{name}: must be contiguous")
    if sink < 0:
        raise ValueError(f"sink: must not be negative, is {sink}")
    torch.ops.tangram.ragged_seal.default(
        pool,
        rows,
        due,
        layout.offset_tensor(pool.device),
        tier_heads,
        layout.page_tokens,
        layout.ring_slots,
        layout.chunk,
        layout.window,
        sink,
        scores,
        *(heads or (None, None)),
        *(staged or (None, None)),
        values,
        asked,
    )

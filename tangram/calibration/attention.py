"""The attention of a transformers model, computed by us, so that somebody can watch.

Registered under one name with transformers' AttentionInterface: any decoder whose layers ask there for their
attention can be watched without a line about its architecture. No mask is made for a name that has no mask
function; the causal one follows from the shapes, as there is one sequence and no padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "tangram_watched"
BLOCK_ELEMENTS = 1 << 25
"""Most attention weights (float32) that exist at once."""


class Watcher(Protocol):
    """Sees every layer's attention while the model runs.

    Attributes:
        wants_weights: whether :meth:`see_weights` is to be called; it makes attention slower.
    """

    wants_weights: bool

    def see_queries(self, layer: int, queries: torch.Tensor, scale: float, kv_heads: int) -> None:
        """Rotated queries [query_heads, tokens, head_size] of a step, once a layer."""

    def see_weights(self, layer: int, head: int, weights: torch.Tensor) -> None:
        """Attention weights of a block of queries of one KV head, float32 [group, queries, keys]."""

    def held(self, layer: int, keys: int) -> torch.Tensor | None:
        """Which of so many keys each KV head still has, bool [kv_heads, keys]; None for all of them."""


_watcher: Watcher | None = None


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Let it see what the model attends to inside the block."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


def register() -> None:
    """Make the attention known to transformers. Safe to call again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of the last ``queries`` of ``keys`` tokens, as transformers calls it.

    Args:
        query: [1, query_heads, queries, head_size].
        key, value: [1, kv_heads, keys, head_size].
        scaling: what logits are multiplied by; 1 / sqrt(head_size) if None.
        sliding_window: tokens that a query sees, itself included; None for all.
        softcap: logits are bent to stay within it.
        s_aux: [query_heads], the logit of an attention sink of each head.

    Returns:
        [1, queries, query_heads, head_size], and None for the weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)
    watching = _watcher
    if watching is not None:
        watching.see_queries(layer, query[0], scale, key.shape[1])
    held = None if watching is None else watching.held(layer, key.shape[2])
    if (watching is not None and watching.wants_weights) or softcap is not None or s_aux is not None:
        see = watching if watching is not None and watching.wants_weights else None
        out = _explicit(query[0], key[0], value[0], scale, sliding_window, softcap, s_aux, layer, see, held)
        return out.transpose(0, 1).unsqueeze(0).contiguous(), None
    visible = _visible(query.shape[2], key.shape[2], sliding_window, query.device)
    if held is not None:
        visible = (visible & held[:, None]).repeat_interleave(query.shape[1] // key.shape[1], dim=0)[None]
    # One key a query head: with a mask and shared keys a GPU would fall back to whole matrices of weights.
    keys, values = (_repeated(part, query.shape[1]) for part in (key, value))
    out = scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scale)
    return out.transpose(1, 2).contiguous(), None


def _repeated(part: torch.Tensor, query_heads: int) -> torch.Tensor:
    """[1, kv_heads, keys, head_size] as [1, query_heads, keys, head_size]."""
    group = query_heads // part.shape[1]
    return part if group == 1 else part.repeat_interleave(group, dim=1)


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [queries, keys]: the last query stands at the last key."""
    at = torch.arange(keys - queries, keys, device=device)[:, None]
    of = torch.arange(keys, device=device)
    seen = of <= at
    return seen if window is None else seen & (of > at - window)


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    layer: int,
    watcher: Watcher | None,
    held: torch.Tensor | None = None,
) -> torch.Tensor:
    """[query_heads, queries, head_size], by blocks of queries of one KV head whose weights are shown."""
    kv_heads, keys, head_size = key.shape
    queries = query.shape[1]
    grouped = query.view(kv_heads, -1, queries, head_size)
    group = grouped.shape[1]
    out = torch.empty_like(grouped)
    step = max(1, BLOCK_ELEMENTS // (group * keys))
    visible = _visible(queries, keys, window, query.device)
    for head in range(kv_heads):
        transposed, values = key[head].float().T, value[head]
        for start in range(0, queries, step):
            part = slice(start, start + step)
            logits = grouped[head, :, part].float() @ transposed
            logits *= scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            seen = visible[part] if held is None else visible[part] & held[head]
            logits.masked_fill_(~seen, -torch.inf)
            if sinks is not None:
                column = sinks.float().view(kv_heads, group, 1, 1)[head].expand(-1, logits.shape[1], 1)
                logits = torch.cat([logits, column], dim=-1)
            weights = logits.softmax(dim=-1)[..., :keys]
            if watcher is not None:
                watcher.see_weights(layer, head, weights)
            out[head, :, part] = weights.to(values.dtype) @ values
    return out.reshape(query.shape)

"""The KV cache spec that makes vLLM's pool ours.

vLLM thinks in blocks of one layer. A page of the ragged cache holds heads of any layer, so each of the
``L`` layers is charged an equal part of it: ``state_bytes`` a token in one head slot. In the layout
``BLHNC`` the ``L`` parts of a block lie side by side, and together they are one page. With tensor parallelism
the spec is the same on all ranks, as vLLM wants it, and so names the geometry of all of them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tangram.errors import UnsupportedError
from tangram.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class RaggedSpec(FullAttentionSpec):
    """A layer's share of the ragged cache. ``geometry`` is the same for all layers."""

    geometry: Geometry

    @classmethod
    def from_full(cls, spec: FullAttentionSpec, geometry: Geometry) -> RaggedSpec:
        """Replace what vLLM planned for a full-attention layer."""
        if spec.block_size != geometry.page_tokens:
            raise UnsupportedError(
                f"vLLM's block size is {spec.block_size} but page_tokens is {geometry.page_tokens}: "
                f"start vLLM with --block-size {geometry.page_tokens} (tangram serve does)"
            )
        if (spec.num_kv_heads, spec.head_size, spec.head_size_v) != (
            geometry.rank_heads,
            geometry.head_size,
            geometry.head_size,
        ):
            raise UnsupportedError(
                f"a full-attention layer has {spec.num_kv_heads} KV heads of size {spec.head_size} (values "
                f"{spec.head_size_v}), but the model's configuration says {geometry.rank_heads} of "
                f"{geometry.head_size}: layers of different shapes cannot share the ragged cache"
            )
        return cls(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=spec.dtype,
            num_head_slots=1,
            state_content_bytes=geometry.state_bytes,
            geometry=geometry,
        )

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Length of a request's row."""
        return self.geometry.row_width(max_len)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """This layer's share of the longest request."""
        return self.geometry.pages(vllm_config.model_config.max_model_len) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """One spec for the group; all layers have the same."""
        if any(spec != specs[0] for spec in specs[1:]):
            raise UnsupportedError("all layers of the ragged cache must have the same shape")
        return copy.deepcopy(specs[0])


def pool_view(layer_cache: torch.Tensor, geometry: Geometry, dtype: torch.dtype) -> torch.Tensor:
    """The whole pool, seen through any layer's cache tensor.

    Args:
        geometry: of the rank whose pool it is.

    Returns:
        [pages, group_size, page_tokens, 2 * head_size] of ``dtype`` over the same storage; only the stride
        between pages may be padded.
    """
    storage = layer_cache.untyped_storage()
    page = geometry.page_bytes // dtype.itemsize
    if layer_cache.stride(0) != page:
        raise UnsupportedError(
            f"vLLM laid the KV cache out in blocks of {layer_cache.stride(0) * dtype.itemsize} bytes, a page "
            f"of the ragged cache has {geometry.page_bytes}"
        )
    slot = geometry.page_tokens * 2 * geometry.head_size
    pages = layer_cache.shape[0]
    if storage.nbytes() < pages * geometry.page_bytes:
        raise UnsupportedError(
            "vLLM laid the KV cache out in a way that the ragged cache cannot view: "
            f"{storage.nbytes()} bytes for {pages} pages of {geometry.page_bytes}"
        )
    flat = torch.empty(0, dtype=dtype, device=layer_cache.device).set_(storage)
    view: torch.Tensor = flat.as_strided(
        (pages, geometry.group_size, geometry.page_tokens, 2 * geometry.head_size),
        (page, slot, 2 * geometry.head_size, 1),
    )
    return view

"""Sliding-window layers: vLLM's own attention, for the layers of a model that the ragged cache leaves alone.

vLLM asks one backend for all layers of a kind of device (on a CPU there is one slot only, which ours takes).
So ours passes sliding-window layers on: to the backend that vLLM would have chosen without us.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tangram.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionImpl

    from tangram.geometry import Geometry

_native: type[AttentionBackend] | None = None


def choose(head_size: int, kv_cache_dtype: str, sinks: torch.Tensor | None) -> type[AttentionBackend]:
    """The backend that vLLM would choose for a sliding-window layer, if ours were not there. Remembered for
    this process: all such layers of a model are alike."""
    global _native
    if current_platform.is_cpu():
        path: str = AttentionBackendEnum.CPU_ATTN.value  # the built-in class, not what took its slot
    else:
        own = get_current_vllm_config()
        wanted = AttentionSelectorConfig(
            head_size=head_size,
            dtype=own.model_config.dtype,
            kv_cache_dtype=kv_cache_dtype,
            block_size=None,
            has_sink=sinks is not None,
            has_sliding_window=True,
        )
        path = current_platform.get_attn_backend_cls(None, attn_selector_config=wanted)
    chosen: type[AttentionBackend] = resolve_obj_by_qualname(path)
    if not chosen.supports_head_size(head_size):
        raise UnsupportedError(
            f"vLLM's {chosen.get_name()} backend, which serves this model's sliding-window layers, does not "
            f"support heads of size {head_size}"
        )
    _native = chosen
    return chosen


def native() -> type[AttentionBackend]:
    """The backend of this process's sliding-window layers. Raises UnsupportedError before :func:`choose`."""
    if _native is None:
        raise UnsupportedError("vLLM asked about sliding-window layers before it built one")
    return _native


def is_window(spec: Any) -> bool:
    """Whether this is the cache of a sliding-window layer, which stays as vLLM keeps it."""
    return type(spec) is SlidingWindowSpec


def block_spec(spec: Any, geometry: Geometry) -> Any:
    """The cache of a sliding-window layer, in blocks of the size that our pages are made for."""
    if spec.block_size == 1:  # vLLM is asking what a token takes
        return spec
    spec = replace(spec, block_size=geometry.window_block_tokens)
    if spec.page_size_bytes * geometry.ranks != geometry.window_block_bytes:
        raise UnsupportedError(
            "the sliding-window layers of this model are not shaped like its other layers: the ragged cache "
            "cannot share its pages with them"
        )
    return spec


def cudagraph_support(vllm_config: VllmConfig, spec: Any) -> AttentionCGSupport:
    """What vLLM's builder for these layers can capture."""
    support: AttentionCGSupport = native().get_builder_cls().get_cudagraph_support(vllm_config, spec)
    return support


def implementation(
    num_heads: int,
    head_size: int,
    scale: float,
    num_kv_heads: int,
    alibi_slopes: list[float] | None,
    sliding_window: int | None,
    kv_cache_dtype: str,
    *rest: Any,
    **more: Any,
) -> AttentionImpl[Any]:
    """One sliding-window layer's attention; the arguments are those of vLLM's implementations."""
    backend: Any = choose(head_size, kv_cache_dtype, more.get("sinks"))
    impl: AttentionImpl[Any] = _writing(backend)(
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        *rest,
        **more,
    )
    return impl


@cache
def _writing(backend: Any) -> Any:
    """The backend's implementation, made to write the cache in its forward pass. vLLM asks the layer's
    backend class whether it does so; that class is ours, and the ragged cache does."""
    base: Any = backend.get_impl_cls()
    if backend.forward_includes_kv_cache_update:
        return base

    class WindowImpl(base):
        def forward(
            self,
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: Any,
            *rest: Any,
            **more: Any,
        ) -> Any:
            if attn_metadata is not None:
                slots = attn_metadata.slot_mapping
                count = slots.shape[0]
                self.do_kv_cache_update(layer, key[:count], value[:count], kv_cache, slots)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)

    return WindowImpl

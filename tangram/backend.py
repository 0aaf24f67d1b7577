"""The attention backend: tells vLLM how the cache looks, seals chunks between steps, calls the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kernels import implementation, prepare, ragged_append_attention
from kernels.layout import RaggedLayout
from kernels.wide import staged_pages
from tangram import runtime, seal_meter, window_backend
from tangram.config import FUSED_SCORERS
from tangram.engines import own_instance
from tangram.errors import UnsupportedError
from tangram.layer_support import check_layer, check_shape
from tangram.observation import Capture
from tangram.ranks import Ranks
from tangram.reasons import told
from tangram.sealer import Sealer
from tangram.spec import RaggedSpec, pool_view
from tangram.wide import Bounds, Scoring, WideStep, WideSteps, flash_version
from tangram.window_backend import is_window

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RaggedBackend(AttentionBackend):
    """Ragged paging for vLLM. Registered by :mod:`tangram.plugin`."""

    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RaggedImpl]:
        return RaggedImpl

    @staticmethod
    def get_builder_cls() -> type[RaggedMetadataBuilder]:
        return RaggedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(min(runtime.window_blocks()) if is_window(kv_cache_spec) else 1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True  # by passing such layers on

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        with told():
            geometry = runtime.active().geometry
            if is_window(spec):
                return window_backend.block_spec(spec, geometry)
            if type(spec) is not FullAttentionSpec or spec.sliding_window is not None:
                raise UnsupportedError(
                    "the ragged cache serves full attention, beside sliding-window layers; this model has "
                    f"{type(spec).__name__}"
                )
            expected = (geometry.rank_heads, geometry.head_size)
            check_shape(spec.num_kv_heads, spec.head_size, spec.head_size_v, expected)
            return RaggedSpec.from_full(spec, geometry)


@dataclass
class RaggedMetadata:
    """One step of the batch.

    Attributes:
        pool: [pages, group_size, page_tokens, 2 * head_size].
        rows: int32 [requests, width], page ids.
        query_start_loc: int32 [requests + 1].
        seq_lens: int32 [requests], lengths after the step.
        layers: layer name to its index in the geometry.
        tables: layer name to (head_tier, head_member), int32 [kv_heads] each, of this rank's heads.
        capture: queries to copy aside for a later seal, if any.
        max_query, singles: what the attention may know of the step, see :func:`kernels.ragged_attention`.
        wide: how to go about it, if it crosses a seal boundary.
    """

    num_actual_tokens: int
    pool: torch.Tensor
    rows: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    layers: dict[str, int]
    tables: dict[str, tuple[torch.Tensor, torch.Tensor]]
    layout: RaggedLayout
    capture: Capture | None = None
    max_query: int = 0
    singles: bool = True
    wide: WideStep | None = None


class RaggedMetadataBuilder(AttentionMetadataBuilder[Any]):
    """Builds a step's metadata; requests that stand at a seal boundary are sealed first.

    For a group of sliding-window layers this makes vLLM's own builder instead.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __new__(cls, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> Any:
        if is_window(kv_cache_spec):
            return window_backend.native().get_builder_cls()(kv_cache_spec, *args, **kwargs)
        return super().__new__(cls)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        if is_window(kv_cache_spec):
            return window_backend.cudagraph_support(vllm_config, kv_cache_spec)
        if not current_platform.is_cuda() or runtime.active().config.observed:
            return cls._cudagraph_support  # a captured step could not set queries aside
        kind = (torch.device("cuda"), kv_cache_spec.dtype, kv_cache_spec.head_size)
        if implementation(*kind) != "native":
            return cls._cudagraph_support
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: RaggedSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Before the engine says that it is ready, not in somebody's first request.
        prepare(device, kv_cache_spec.dtype, kv_cache_spec.head_size)
        kernels = implementation(device, kv_cache_spec.dtype, kv_cache_spec.head_size)
        ranks = Ranks.current(kv_cache_spec.geometry.ranks)
        meter = seal_meter.serve(own_instance(vllm_config), kernels, ranks.rank)
        own = runtime.active()
        self.geometry = kv_cache_spec.geometry.of_rank(ranks.rank)
        self.layout = runtime.kernel_layout(self.geometry)
        self.dtype = kv_cache_spec.dtype
        self._pool: torch.Tensor | None = None
        self.layers = {name: own.row(extract_layer_index(name)) for name in layer_names}
        self.tables = {
            name: (
                torch.tensor(self.geometry.head_tier[layer], dtype=torch.int32, device=device),
                torch.tensor(self.geometry.head_member[layer], dtype=torch.int32, device=device),
            )
            for name, layer in self.layers.items()
        }
        self.sealer = Sealer(self.geometry, self.layers, vllm_config, self.dtype, device, meter, ranks)
        impl = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl
        self.wide = wide_steps(vllm_config, impl.num_heads, self.dtype, device)
        self.wide.meter, self.wide.asked = meter, self.sealer.asked

    def pool(self) -> torch.Tensor:
        """The pool, found through the first layer: it is allocated after the builder."""
        cache = self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]].kv_cache
        if (
            self._pool is None
            or self._pool.untyped_storage().data_ptr() != cache.untyped_storage().data_ptr()
        ):
            self._pool = pool_view(cache, self.geometry, self.dtype)
        return self._pool

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RaggedMetadata:
        common = common_attn_metadata
        pool, rows = self.pool(), common.block_table_tensor
        bounds = Bounds.of(common)
        capture = self.sealer.between_steps(pool, rows, bounds)
        longest = common.max_query_len
        wide = self.wide.of(bounds, pool, rows, common.seq_lens) if longest > 1 else None
        new = common.query_start_loc_cpu[: common.num_reqs + 1].diff()
        return RaggedMetadata(
            num_actual_tokens=common.num_actual_tokens,
            pool=pool,
            rows=rows,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            layers=self.layers,
            tables=self.tables,
            layout=self.layout,
            capture=capture,
            max_query=longest,
            singles=longest == 1 or bool((new == 1).any()),
            wide=wide,
        )


_shared: WeakValueDictionary[tuple[Any, ...], WideSteps] = WeakValueDictionary()
"""Held by the layers of an engine, and gone with them: they hold its cache."""


def wide_steps(vllm_config: VllmConfig, heads: int, dtype: torch.dtype, device: torch.device) -> WideSteps:
    """How this worker goes about steps that cross seal boundaries: one for all layers, from the first forward
    pass on, by which vLLM measures memory before there is a cache.

    Args:
        heads: query heads of a layer on this rank.
    """
    key = (vllm_config.instance_id, heads, dtype, device.type)
    if (found := _shared.get(key)) is not None:
        return found
    own, scheduler = runtime.active(), vllm_config.scheduler_config
    layout = runtime.kernel_layout(own.geometry)
    tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    native = own.config.steps_wide(current_platform.is_cuda()) and (
        implementation(device, dtype, layout.head_size) == "native"
    )
    made = _shared[key] = WideSteps(
        layout,
        (heads, own.geometry.rank_heads),
        own.config.sink,
        staged_pages(layout, tokens, own.geometry.least_wide),
        flash_version(device, dtype, layout) if native else None,
        FUSED_SCORERS.get(own.scorer, False),
    )
    return made


class RaggedImpl(AttentionImpl[Any]):
    """One layer's attention over the ragged cache; vLLM's own for a sliding-window layer."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        with told():
            runtime.activate(get_current_vllm_config())
        window = args[5] if len(args) > 5 else kwargs.get("sliding_window")
        return super().__new__(cls) if window is None else window_backend.implementation(*args, **kwargs)

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        given = {
            "alibi_slopes": alibi_slopes,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        with told():
            check_layer(attn_type, given | others)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.soft_cap = float(logits_soft_cap or 0.0)
        self.sinks = sinks
        self.vllm_config = get_current_vllm_config()
        self.wide: WideSteps | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """The sinks, a weight of the model, as the kernels take them."""
        if self.sinks is not None:
            self.sinks = self.sinks.detach().to(torch.float32).contiguous()

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: RaggedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's keys and values, then attend.

        Args:
            query, output: [tokens, num_heads, head_size].
            key, value: [tokens, num_kv_heads, head_size].
            attn_metadata: None while vLLM profiles memory or warms up.
        """
        if attn_metadata is None:
            if self.wide is None:
                self.wide = wide_steps(self.vllm_config, self.num_heads, query.dtype, query.device)
            self.wide.warm_up(query)
            return output
        step = attn_metadata
        if step.capture is not None:
            step.capture.keep(layer.layer_name, query)
        tier, member = step.tables[layer.layer_name]
        if step.wide is not None:
            scoring = Scoring(self.scale, self.soft_cap, self.sinks)
            where = ((tier, member), scoring, step.layers[layer.layer_name])
            step.wide.attend(output, query, key, value, step.query_start_loc, *where)
            return output
        batch = (step.pool, step.rows, step.query_start_loc, step.seq_lens, tier, member, step.layout)
        how = (self.scale, self.sinks, self.soft_cap, step.max_query, step.singles)
        ragged_append_attention(output, query, key, value, *batch, *how)
        return output

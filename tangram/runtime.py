"""What a vLLM process knows of the ragged cache, derived from vLLM's own configuration.

Every process (API server, engine core, worker) derives the same geometry from the same inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform

from kernels.layout import RaggedLayout
from tangram.config import TangramConfig
from tangram.errors import UnsupportedError
from tangram.geometry import Geometry
from tangram.identity import config_fingerprint, weights_fingerprint
from tangram.layers import layer_kinds
from tangram.mean_queries import scorer_in_force
from tangram.profile import ModelShape, Profile, build_geometry, in_force
from tangram.rotary import Rotary, find_rotary
from tangram.support import check_supported

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Runtime:
    """Configuration, model shape, profile, and the geometry and the scorer that follow."""

    config: TangramConfig
    shape: ModelShape
    profile: Profile
    geometry: Geometry
    scorer: str

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Runtime:
        """Derive all of it. Raises UnsupportedError for what vLLM was asked and the ragged cache cannot give,
        ConfigError or ProfileError when our own settings cannot fit this model."""
        check_supported(vllm_config)
        config = TangramConfig.from_additional_config(vllm_config.additional_config)
        shape = model_shape(vllm_config)
        profile = in_force(config, shape)
        cpu = torch.device("cpu")
        scorer = scorer_in_force(config, profile, lambda: rotary_of(vllm_config, shape.layers, cpu))
        return cls(config, shape, profile, build_geometry(config, shape, profile), scorer)

    def row(self, layer: int) -> int:
        """The place of a layer of the model in the head tables.

        Raises:
            UnsupportedError: the model was built otherwise than its configuration says.
        """
        rows = self.shape.full_layers or range(self.shape.layers)
        if layer not in rows:
            raise UnsupportedError(
                f"layer {layer} uses full attention, which this model's configuration does not say of it: "
                "the ragged cache cannot tell which layers to compress"
            )
        return rows.index(layer)

    def budgets(self) -> list[list[float]]:
        """[layers][kv_heads]: the heads' own budgets, before tiers and pages round them."""
        return self.profile.budgets(self.config.retention, self.config.alpha)


def model_shape(vllm_config: VllmConfig) -> ModelShape:
    """The attention shape of the whole model that vLLM is about to serve, however many ranks share it."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    dtype: torch.dtype = model.dtype  # check_supported refuses another type of cache
    kinds = layer_kinds(model.hf_text_config, model.get_num_layers(parallel))
    kv_heads, head_size = model.get_total_num_kv_heads(), model.get_head_size()
    shape = ModelShape(
        name=str(model.served_model_name or model.model),
        layers=len(kinds.full),
        kv_heads=kv_heads,
        head_size=head_size,
        itemsize=dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
        ranks=parallel.tensor_parallel_size,
        config_hash=config_fingerprint(model.hf_text_config),
        weights_hash=weights_fingerprint(model.model, model.revision),
    )
    if not kinds.window:
        return shape
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise UnsupportedError(
            "this model has sliding-window layers, whose cache must be kept apart from ours: leave out "
            "--disable-hybrid-kv-cache-manager"
        )
    return replace(
        shape,
        full_layers=kinds.full,
        window_layers=kinds.window,
        window_span=kinds.span,
        window_state_bytes=kv_heads * 2 * head_size * dtype.itemsize,
        window_blocks=window_blocks(),
    )


def rotary_of(vllm_config: VllmConfig, layers: int, device: torch.device) -> Rotary | None:
    """How a model of so many layers of full attention rotates; None where it does not.

    Raises:
        UnsupportedError: that is not known.
    """
    model = vllm_config.model_config
    return find_rotary(model.hf_text_config, layers, model.get_head_size(), model.max_model_len, device)


def window_blocks() -> tuple[int, ...]:
    """Tokens of a sliding-window layer's block that vLLM's kernels take, or multiples of these. On the CPU
    its faster kernel wants 32, its other one 16."""
    return (32, 16) if current_platform.is_cpu() else (16,)


def kernel_layout(geometry: Geometry) -> RaggedLayout:
    """The geometry as the kernels take it."""
    return RaggedLayout(
        page_tokens=geometry.page_tokens,
        ring_slots=geometry.ring_slots,
        chunk=geometry.chunk,
        window=geometry.window,
        keep=geometry.keep,
        head_size=geometry.head_size,
    )


_active: Runtime | None = None


def activate(vllm_config: VllmConfig) -> Runtime:
    """Remember this process's runtime: vLLM asks the backend for specs without naming a configuration."""
    global _active
    _active = Runtime.from_vllm(vllm_config)
    return _active


def active() -> Runtime:
    """The runtime of this process. Raises UnsupportedError before :func:`activate`."""
    if _active is None:
        raise UnsupportedError("the ragged cache was asked for before vLLM's configuration was known")
    return _active

"""What a vLLM process knows of the ragged cache, derived from vLLM's own configuration.

Every process (API server, engine core, worker) derives the same geometry from the same inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.layout import RaggedLayout
from tangram.config import TangramConfig
from tangram.errors import UnsupportedError
from tangram.geometry import Geometry
from tangram.profile import ModelShape, Profile, build_geometry, load_profile
from tangram.support import check_supported

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Runtime:
    """Configuration, model shape, profile and the geometry that follows."""

    config: TangramConfig
    shape: ModelShape
    profile: Profile
    geometry: Geometry

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Runtime:
        """Derive all of it. Raises UnsupportedError for what vLLM was asked and the ragged cache cannot give,
        ConfigError or ProfileError when our own settings cannot fit this model."""
        check_supported(vllm_config)
        config = TangramConfig.from_additional_config(vllm_config.additional_config)
        shape = model_shape(vllm_config)
        profile = load_profile(config, shape)
        return cls(config, shape, profile, build_geometry(config, shape, profile))

    def budgets(self) -> list[list[float]]:
        """[layers][kv_heads]: the heads' own budgets, before tiers and pages round them."""
        return self.profile.budgets(self.config.retention, self.config.alpha)


def model_shape(vllm_config: VllmConfig) -> ModelShape:
    """The attention shape of the model that vLLM is about to serve."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    dtype: torch.dtype = model.dtype  # check_supported refuses another type of cache
    return ModelShape(
        name=str(model.served_model_name or model.model),
        layers=model.get_num_layers(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        itemsize=dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
    )


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

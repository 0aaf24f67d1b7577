"""Pages beside sliding-window layers: our arithmetic against vLLM's own grouping, and which models can be
served."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from tangram import plugin
    from tangram.spec import RaggedSpec

from tangram.config import TangramConfig
from tangram.errors import ConfigError, UnsupportedError
from tangram.geometry import WINDOW_FIELDS, Geometry
from tangram.layers import LayerKinds, layer_kinds
from tangram.profile import ModelShape, build_geometry

VLLM = SimpleNamespace(
    scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC),
    attention_config=SimpleNamespace(hisparse_config=None),
    speculative_config=None,
    kv_transfer_config=None,
)


def shape(full: int, window: int, kv_heads: int = 2, head_size: int = 32) -> ModelShape:
    return ModelShape(
        "m",
        full,
        kv_heads,
        head_size,
        4,
        "float32",
        4096,
        full_layers=tuple(range(full)),
        window_layers=window,
        window_span=64,
        window_state_bytes=kv_heads * 2 * head_size * 4,
        window_blocks=(32, 16),
    )


def groups(g: Geometry, of: ModelShape, window: int) -> list[object]:
    """What vLLM makes of the layers."""
    plugin.register()
    sizes = {"num_kv_heads": of.kv_heads, "head_size": of.head_size, "dtype": torch.float32}
    full = RaggedSpec.from_full(FullAttentionSpec(block_size=g.page_tokens, **sizes), g)
    block = of.window_block(g.page_tokens)
    local = SlidingWindowSpec(block_size=block, sliding_window=64, **sizes)
    specs = {f"window.{i}": local for i in range(window)} | {f"full.{i}": full for i in range(of.layers)}
    return list(kv_cache_utils.get_kv_cache_groups(VLLM, specs))  # type: ignore[arg-type]


@given(
    full=st.integers(1, 9),
    window=st.integers(1, 30),
    kv_heads=st.integers(1, 5),
    page_tokens=st.sampled_from([16, 32, 64, 128]),
    group=st.none() | st.integers(1, 45),
)
def test_vllm_packs_the_layers_as_computed(
    full: int, window: int, kv_heads: int, page_tokens: int, group: int | None
) -> None:
    of = shape(full, window, kv_heads)
    group = group and min(group, full * kv_heads)
    config = TangramConfig(page_tokens=page_tokens, group_size=group, window=128, rewind=128)
    g = build_geometry(config, of)
    made = groups(g, of, window)
    specs = [made_group.kv_cache_spec for made_group in made]  # type: ignore[attr-defined]
    kinds = [s.first_spec if isinstance(s, UniformTypeKVCacheSpecs) else s for s in specs]
    assert [isinstance(kind, RaggedSpec) for kind in kinds].count(True) == 1, "one row for a request"
    assert len(kinds) == 1 + g.window_groups
    size = kv_cache_utils._get_kv_cache_bytes_per_block(made, KVCacheLayout.BLHNC)  # type: ignore[arg-type]
    assert size == g.page_bytes, "a block is a page"


def test_a_page_holds_at_least_one_window_layer() -> None:
    of = shape(full=5, window=29, kv_heads=4, head_size=256)
    automatic = build_geometry(TangramConfig(page_tokens=16), of)
    assert automatic.group_size == 4, "a sixth of 20 heads is 3, a window layer's block has 4"
    assert automatic.window_groups == 29
    small = build_geometry(TangramConfig(page_tokens=16, group_size=1), of)
    assert small.page_bytes >= small.window_block_bytes
    assert small.padding > 0.7, "the rest of the page is waste, and is counted"
    large = build_geometry(TangramConfig(page_tokens=128, window=128, rewind=128), of)
    assert large.window_groups == 10


def test_the_geometry_survives_the_exchange_format() -> None:
    g = build_geometry(TangramConfig(page_tokens=64, rewind=64), shape(2, 7))
    assert Geometry.from_dict(g.to_dict()) == g
    old = {name: value for name, value in g.to_dict().items() if not name.startswith("window_")}
    assert Geometry.from_dict(old) == replace(g, **dict.fromkeys(WINDOW_FIELDS, 0))


def test_the_window_layers_part_of_a_sequence() -> None:
    g = build_geometry(TangramConfig(page_tokens=16, rewind=32), shape(2, 4))
    bare = replace(g, **dict.fromkeys(WINDOW_FIELDS, 0))
    for n in (1, 16, 111, 112, 5000):
        begins = [0] if n <= 111 else range(16)
        blocks = max(len({p // 16 for p in range(begin, begin + min(n, 111))}) for begin in begins)
        assert g.window_pages(n) == g.window_groups * blocks
        assert bare.window_pages(n) == 0
        assert g.bytes(n) == (g.pages(n) + g.window_pages(n)) * g.page_bytes
        assert g.full_bytes(n) - bare.full_bytes(n) == g.window_pages(n) * g.page_bytes


def test_pages_that_no_kernel_can_share_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"page_tokens: must be a multiple of 16 .* not 8"):
        build_geometry(TangramConfig(page_tokens=8), shape(2, 7))


def test_layers_of_another_shape_are_refused() -> None:
    of = shape(2, 2)
    g = build_geometry(TangramConfig(), of)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="layers of different shapes"):
        RaggedSpec.from_full(spec, g)


F, S = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("config", "layers", "expected"),
    [
        ({}, 3, LayerKinds((0, 1, 2))),
        ({"sliding_window": None}, 2, LayerKinds((0, 1))),
        ({"layer_types": [S, F, S, F], "sliding_window": 128}, 4, LayerKinds((1, 3), 2, 128)),
        ({"layer_types": [S, S, F], "sliding_window": 128}, 3, LayerKinds((2,), 2, 128)),
        ({"layer_types": [S, F], "sliding_window": None}, 2, LayerKinds((0, 1))),
        ({"layer_types": [F, F], "sliding_window": 128}, 2, LayerKinds((0, 1))),
    ],
)
def test_layers_by_kind(config: dict[str, object], layers: int, expected: LayerKinds) -> None:
    assert layer_kinds(SimpleNamespace(**config), layers) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sliding_window": 4096}, "all layers of this model use sliding-window"),
        ({"layer_types": [S, S], "sliding_window": 128}, "all layers of this model use sliding-window"),
        ({"layer_types": ["chunked_attention", F]}, "layers of type chunked_attention"),
        ({"layer_types": ["linear_attention", F]}, "layers of type linear_attention"),
        ({"layer_types": [S, F, S], "sliding_window": 128}, "names the types of 3 layers, it has 2"),
    ],
)
def test_models_that_are_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        layer_kinds(SimpleNamespace(**config), 2)

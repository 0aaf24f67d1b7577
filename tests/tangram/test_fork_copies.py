"""A fork's copies, as vLLM's worker makes them: whole pages of ours, and two launches for any number."""

from __future__ import annotations

import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace

    from tangram import plugin
    from tangram.spec import RaggedSpec, pool_view

from tangram.config import TangramConfig
from tangram.geometry import Geometry
from tangram.profile import ModelShape, build_geometry

PAGES = 7
VLLM = SimpleNamespace(
    scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    cache_config=SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
        num_gpu_blocks_override=PAGES,
        prefix_cache_retention_interval=None,
    ),
    attention_config=SimpleNamespace(hisparse_config=None),
    speculative_config=None,
    kv_transfer_config=None,
)


def caches(full: int, window: int, group: int) -> tuple[Geometry, dict[str, torch.Tensor]]:
    """What vLLM allocates for a model of so many layers, each layer's view of it."""
    plugin.register()
    of = ModelShape(
        "m",
        full,
        2,
        32,
        2,
        "bfloat16",
        4096,
        full_layers=tuple(range(full)),
        window_layers=window,
        window_span=64,
        window_state_bytes=2 * 2 * 32 * 2,
        window_blocks=(32, 16),
    )
    geometry = build_geometry(TangramConfig(page_tokens=16, group_size=group), of)
    sizes: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    ragged = RaggedSpec.from_full(FullAttentionSpec(block_size=16, **sizes), geometry)
    local = SlidingWindowSpec(block_size=of.window_block(16), sliding_window=64, **sizes)
    specs = {f"window.{i}": local for i in range(window)} | {f"full.{i}": ragged for i in range(full)}
    groups = kv_cache_utils.get_kv_cache_groups(VLLM, specs)  # type: ignore[arg-type]
    plan = kv_cache_utils.get_kv_cache_config_from_groups(VLLM, groups, PAGES * geometry.page_bytes)  # type: ignore[arg-type]
    assert plan.num_blocks == PAGES
    return geometry, allocate_kv_cache(plan, torch.device("cpu"), KVCacheLayout.BLHNC)


class Operations(TorchDispatchMode):
    """Counts the operators that touch elements."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(("index", "copy", "_index")):
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("full", "window", "group"), [(3, 0, 2), (5, 0, 3), (1, 0, 1), (2, 4, 3)])
def test_a_copy_moves_exactly_the_pages_that_it_names(full: int, window: int, group: int) -> None:
    geometry, views = caches(full, window, group)
    pool = pool_view(views["full.0"], geometry, torch.bfloat16)
    storage = views["full.0"].untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    whole.copy_(torch.randint(0, 256, whole.shape, dtype=torch.uint8))
    before, pages = whole.clone().view(PAGES, -1), pool.view(torch.int16).clone()
    assert before.shape[1] == geometry.page_bytes
    pairs = [KVCacheBlockCopy(1, 4), KVCacheBlockCopy(6, 2), KVCacheBlockCopy(1, 5)]
    with Operations() as operations:
        copy_kv_cache_blocks_inplace(list(views.values()), PAGES, pairs)
    after = whole.view(PAGES, -1)
    moved = {pair.dst_block_id: pair.src_block_id for pair in pairs}
    for page in range(PAGES):
        source = moved.get(page, page)
        assert torch.equal(after[page], before[source])
        assert torch.equal(pool[page].view(torch.int16), pages[source])
    # One gather and one scatter: not one for each layer, nor for each page.
    assert operations.count["index"] == operations.count["index_put_"] == 1, operations.count

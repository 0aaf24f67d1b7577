"""FlashAttention 3 (as vLLM brings it) and FlashInfer on the layers of a decode step.

Both take one sequence for each (request, KV head): 4 query heads on 1 KV head, in blocks of 16 tokens. They
read the memory that our kernel reads (``benchmarks.cases``).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.budgets import HEAD_SIZE
from benchmarks.cases import Sequences

STOCK_SPLITS = 32
"""vLLM's default ``flash_attn_max_num_splits_for_cuda_graph``."""


class PeerMissing(Exception):
    """A kernel to compare with cannot be loaded; the message names it."""


@dataclass(frozen=True)
class FlashPlan:
    """How FlashAttention 3 is called.

    Attributes:
        splits: most parts that a sequence is split into; 0 for its own heuristic.
        ahead: whether the schedule is computed once before the step, as vLLM does, or by each call. Ours is
            computed outside of what is timed.
    """

    splits: int
    ahead: bool

    def __str__(self) -> str:
        return (
            f"{self.splits or 'auto'} splits, {'scheduled ahead' if self.ahead else 'scheduled in the call'}"
        )


STOCK_PLAN = FlashPlan(STOCK_SPLITS, ahead=True)
PLANS = (STOCK_PLAN, FlashPlan(0, ahead=True), FlashPlan(0, ahead=False))
UNSPLIT = FlashPlan(1, ahead=False)
"""One block for each (request, KV head)."""


def load_flash_attention() -> Any:
    """vLLM's FlashAttention module.

    Raises:
        PeerMissing: it is not there, or has no FlashAttention 3 for this GPU.
    """
    try:
        module = importlib.import_module("vllm.vllm_flash_attn")
    except ImportError as error:
        raise PeerMissing(f"fa3: vLLM's FlashAttention cannot be loaded: {error}") from error
    if not module.is_fa_version_supported(3):
        raise PeerMissing(f"fa3: {module.fa_version_unsupported_reason(3)}")
    return module


class FlashAttention3:
    """Layers of one step for ``flash_attn_varlen_func``.

    Args:
        module: of ``load_flash_attention``.
        layers: block tables; a schedule is made for each.
        cache: keys and values ``[blocks, B, kv_heads, D]``.
        query, out: ``[sequences, heads, D]``, heads of the sequence's KV heads.
        plan: how it is called.
    """

    def __init__(
        self,
        module: Any,
        layers: list[Sequences],
        cache: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        out: torch.Tensor,
        plan: FlashPlan,
    ) -> None:
        self.call, self.plan, self.query, self.out = module.flash_attn_varlen_func, plan, query, out
        self.keys, self.values = cache
        device = query.device
        self.starts = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=device)
        self.tables = [layer.table for layer in layers]
        self.longest = [max(layer.lengths) for layer in layers]
        # Layers of equal lengths share one tensor of them, and one schedule.
        lengths: dict[tuple[int, ...], torch.Tensor] = {}
        schedules: dict[tuple[int, ...], torch.Tensor | None] = {}
        for key, longest in zip((tuple(layer.lengths) for layer in layers), self.longest, strict=True):
            if key not in lengths:
                lengths[key] = torch.tensor(key, dtype=torch.int32, device=device)
                schedules[key] = self._schedule(module, lengths[key], longest)
        self.lengths = [lengths[tuple(layer.lengths)] for layer in layers]
        self.schedules = [schedules[tuple(layer.lengths)] for layer in layers]

    def _schedule(self, module: Any, lengths: torch.Tensor, longest: int) -> torch.Tensor | None:
        if not self.plan.ahead:
            return None
        return module.get_scheduler_metadata(
            batch_size=len(lengths),
            max_seqlen_q=1,
            max_seqlen_k=longest,
            num_heads_q=self.query.shape[1],
            num_heads_kv=self.keys.shape[2],
            headdim=self.query.shape[2],
            cache_seqlens=lengths,
            qkv_dtype=self.query.dtype,
            cu_seqlens_q=self.starts,
            page_size=self.keys.shape[1],
            causal=True,
            window_size=(-1, -1),
            num_splits=self.plan.splits,
        )

    def attend(self, layer: int) -> None:
        """One layer."""
        self.call(
            q=self.query,
            k=self.keys,
            v=self.values,
            out=self.out,
            cu_seqlens_q=self.starts,
            max_seqlen_q=1,
            seqused_k=self.lengths[layer],
            max_seqlen_k=self.longest[layer],
            softmax_scale=self.query.shape[2] ** -0.5,
            causal=True,
            window_size=[-1, -1],
            block_table=self.tables[layer],
            softcap=0.0,
            scheduler_metadata=self.schedules[layer],
            fa_version=3,
            num_splits=self.plan.splits,
        )

    def step(self) -> None:
        """All layers."""
        for layer in range(len(self.tables)):
            self.attend(layer)


DECODE_MODULE = (
    torch.bfloat16,
    torch.bfloat16,
    torch.bfloat16,
    torch.int32,
    HEAD_SIZE,
    HEAD_SIZE,
    0,
    False,
    False,
)
"""What FlashInfer builds a kernel for: elements of queries, cache and output, the tables' integers, the sizes
of a head, no position encoding, no window, no soft cap."""


def load_flashinfer(modules: Path | None) -> Any:
    """FlashInfer with its kernels loaded, from ``modules`` that ``benchmarks/flashinfer_modules.py`` compiled
    ahead, or else compiled now, which takes minutes.

    Raises:
        PeerMissing: it is not there, or its kernels are not and cannot be compiled.
    """
    try:
        module = importlib.import_module("flashinfer")
        environment = importlib.import_module("flashinfer.jit.env")
    except ImportError as error:
        raise PeerMissing(f"flashinfer: it cannot be loaded: {error}") from error
    if modules is not None:
        if not any(modules.glob("*/*.so")):
            raise PeerMissing(f"flashinfer: no library in {modules}")
        # Where FlashInfer looks for libraries that came with it, before it compiles.
        environment.FLASHINFER_AOT_DIR = modules.resolve()
    try:
        module.decode.get_batch_decode_module(*DECODE_MODULE)
        module.decode.get_batch_prefill_module("fa2", *DECODE_MODULE, False)  # scores not in 16 bits
    except RuntimeError as error:
        raise PeerMissing(
            f"flashinfer: no kernels: {error}\nbenchmarks/flashinfer_modules.py compiles them ahead: name "
            "its folder with --flashinfer-modules"
        ) from error
    return module


@dataclass(frozen=True)
class InferPlan:
    """How FlashInfer is called.

    Attributes:
        tensor_cores: its prefill kernel with a single query, or its decode kernel.
        fixed: its mode for CUDA graphs, with a fixed grid and buffers that stay, and ``fast_decode_plan`` as
            vLLM calls it; otherwise the ordinary ``plan``.
    """

    tensor_cores: bool
    fixed: bool

    def __str__(self) -> str:
        cores = "tensor cores" if self.tensor_cores else "CUDA cores"
        return f"{cores}, {'fast plan and fixed grid' if self.fixed else 'ordinary plan'}"


INFER_PLANS = (InferPlan(True, True), InferPlan(False, True), InferPlan(True, False))


class FlashInfer:
    """Layers of one step for ``BatchDecodeWithPagedKVCacheWrapper``, planned one by one.

    Each layer has a wrapper, and so workspaces, of its own: a plan is left in pinned memory from where it is
    copied once the GPU gets there, so the next plan must not overwrite it.

    Args:
        module: of ``load_flashinfer``.
        layers: block tables.
        cache: keys and values ``[blocks, B, 1, D]``.
        query, out: ``[sequences, query heads of a KV head, D]``.
        how: mode.
    """

    def __init__(
        self,
        module: Any,
        layers: list[Sequences],
        cache: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        out: torch.Tensor,
        how: InferPlan,
    ) -> None:
        self.cache, self.query, self.out, self.how = cache, query, out, how
        self.page = cache[0].shape[1]
        self.fast_plan = module.decode.fast_decode_plan
        workspace = torch.zeros(2**29, dtype=torch.uint8, device=query.device)
        self.inputs = [self._inputs(layer) for layer in layers]
        self.wrappers, self.buffers = [], []
        for bounds, indices, last, _ in self.inputs:
            kept = tuple(torch.empty_like(like, device=query.device) for like in (bounds, indices, last))
            names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
            wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=how.fixed,
                use_tensor_cores=how.tensor_cores,
                **(dict(zip(names, kept, strict=True)) if how.fixed else {}),
            )
            self.wrappers.append(wrapper)
            self.buffers.append(kept)
        for layer in range(len(layers)):  # chooses the kernels, and fills the buffers that stay
            self._ordinary_plan(layer)

    def _inputs(self, layer: Sequences) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Bounds, blocks, tokens of the last block, and lengths; all but the blocks on the host, in pinned
        memory, so that their copies wait for nothing."""
        lengths = torch.tensor(layer.lengths, dtype=torch.int32)
        blocks = (lengths + self.page - 1) // self.page
        bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        bounds[1:] = blocks.cumsum(0)
        columns = torch.arange(layer.table.shape[1], device=layer.table.device)
        indices = layer.table[columns < blocks.to(layer.table.device)[:, None]]
        last = lengths - (blocks - 1) * self.page
        if torch.cuda.is_available():
            bounds, last, lengths = bounds.pin_memory(), last.pin_memory(), lengths.pin_memory()
        return bounds, indices, last, lengths

    def _sizes(self) -> tuple[int, int, int, int]:
        """Query heads, KV heads, elements of a head, tokens of a block."""
        return self.query.shape[1], 1, self.query.shape[2], self.page

    def _ordinary_plan(self, layer: int) -> None:
        bounds, indices, last, lengths = self.inputs[layer]
        types = {"q_data_type": self.query.dtype, "kv_data_type": self.query.dtype}
        scale = self.query.shape[2] ** -0.5
        self.wrappers[layer].plan(
            bounds, indices, last, *self._sizes(), **types, sm_scale=scale, seq_lens=lengths
        )

    def plan(self, layer: int) -> None:
        """Plan one layer for its lengths: arithmetic on the host and copies to the GPU."""
        if not self.how.fixed:
            self._ordinary_plan(layer)
            return
        bounds, indices, last, _ = self.inputs[layer]
        # New lengths reach the GPU; the blocks that sequences hold already stay there, as in vLLM.
        self.buffers[layer][0].copy_(bounds, non_blocking=True)
        self.buffers[layer][2].copy_(last, non_blocking=True)
        self.fast_plan(
            self.wrappers[layer],
            bounds,
            indices,
            last,
            *self._sizes(),
            q_data_type=self.query.dtype,
            kv_data_type=self.query.dtype,
            sm_scale=self.query.shape[2] ** -0.5,
        )

    def attend(self, layer: int) -> None:
        """One layer that is planned."""
        self.wrappers[layer].run(self.query, self.cache, out=self.out)

    def plan_all(self) -> None:
        """Plans of all layers."""
        for layer in range(len(self.wrappers)):
            self.plan(layer)

    def step(self) -> None:
        """All layers, planned already."""
        for layer in range(len(self.wrappers)):
            self.attend(layer)

    def planned_step(self) -> None:
        """Plan and run one layer after another: a plan's host work overlaps the layer before it."""
        for layer in range(len(self.wrappers)):
            self.plan(layer)
            self.attend(layer)

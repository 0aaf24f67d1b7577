"""Wide steps: prefill steps that cross seal boundaries, which are then sealed inside the layers.

A token sees what its position says, whatever the step: between two boundaries a request's tokens see the
chunks that were sealed before. So in each layer, part after part, the chunk that is due is sealed, the part's
keys and values are written, and its queries attend. Where FlashAttention is at hand all parts go through one
call of it, over page tables that say what each sees (:mod:`kernels.wide`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata

from kernels import KernelError, RaggedLayout, ragged_append_attention, ragged_seal
from kernels.cuda.wide_calls import PackedCalls
from kernels.wide import Sequences, WidePlan, WideRequest, staging_room
from kernels.wide_calls import Others, WideCalls, WideTask, wide_calls
from tangram.mean_queries import Asked
from tangram.seal_meter import SealMeter

logger = init_logger(__name__)

LARGEST_PAGE_3 = 64
"""Tokens of a page that FlashAttention 3 can be given, at most; see :func:`flash_version`."""

Heads = tuple[torch.Tensor, torch.Tensor]
"""(head_tier, head_member) of a layer, int32 [kv_heads] each."""


@dataclass(frozen=True)
class Scoring:
    """How a layer's scores become weights; see :func:`kernels.ragged_attention`."""

    scale: float
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class Bounds:
    """A step on the host: each request's cached tokens before and after it, and where its tokens begin."""

    starts: list[int]
    ends: list[int]
    tokens: list[int]

    @classmethod
    def of(cls, common: CommonAttentionMetadata) -> Bounds:
        """Read without waiting for the device, where vLLM knows the lengths on the host."""
        count = common.num_reqs
        lengths = common.seq_lens_cpu_upper_bound
        ends = (common.seq_lens if lengths is None else lengths)[:count].tolist()
        tokens = common.query_start_loc_cpu[: count + 1].tolist()
        starts = [end - (tokens[i + 1] - tokens[i]) for i, end in enumerate(ends)]
        return cls(starts, ends, tokens)

    def wide(self, layout: RaggedLayout) -> list[WideRequest]:
        """The requests that cross a boundary."""
        return [
            WideRequest(row, self.tokens[row], start, end)
            for row, (start, end) in enumerate(zip(self.starts, self.ends, strict=True))
            if end > layout.step_end(start)
        ]


@dataclass(frozen=True)
class Part:
    """Tokens of neighbouring requests that cross no boundary, or of one request between two.

    Attributes:
        tokens, rows: where they lie in the step and in the batch.
        query_start_loc, seq_lens: int32, as of a batch of their own.
        chunk: to seal before, if one is due; due: the same as int32 [1, 2].
    """

    tokens: slice
    rows: slice
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    chunk: int | None = None
    due: torch.Tensor | None = None


def cut(
    layout: RaggedLayout, bounds: Bounds, wide: Sequence[WideRequest], device: torch.device
) -> list[Part]:
    """A step in parts that cross no boundary, in the order of its tokens.

    Args:
        wide: those of ``bounds`` that cross one.
    """
    parts: list[Part] = []

    def add(rows: slice, steps: Sequence[tuple[int, int]], token: int, due: int | None = None) -> None:
        counts = torch.tensor([0, *(end - start for start, end in steps)], dtype=torch.int32)
        lengths = torch.tensor([end for _, end in steps], dtype=torch.int32)
        total = int(counts.sum())
        which = None if due is None else torch.tensor([[0, due]], dtype=torch.int32, device=device)
        places = counts.cumsum(0, dtype=torch.int32).to(device)
        parts.append(Part(slice(token, token + total), rows, places, lengths.to(device), due, which))

    steps = list(zip(bounds.starts, bounds.ends, strict=True))
    before = 0
    for one in wide:
        if before < one.row:
            add(slice(before, one.row), steps[before : one.row], bounds.tokens[before])
        due = None
        for begin, end in layout.segments(one.cached, one.length):
            add(slice(one.row, one.row + 1), [(begin, end)], one.token + begin - one.cached, due)
            due = layout.sealed(begin)
        before = one.row + 1
    if before < len(steps):
        add(slice(before, len(steps)), steps[before:], bounds.tokens[before])
    return parts


class WideSteps:
    """Makes wide steps of batches. One per worker.

    Args:
        heads: (query heads, KV heads) of a layer.
        sink: first tokens of a sequence that are always kept.
        pages: staged ones of a step, at most.
        version: of FlashAttention; None where it cannot be used.
        values: whether what is kept depends on the norms of values, too.

    Attributes:
        meter: where the time of seals is counted.
        asked: what heads are asked, if what is kept depends on that.
    """

    def __init__(
        self,
        layout: RaggedLayout,
        heads: tuple[int, int],
        sink: int,
        pages: int,
        version: int | None,
        values: bool = False,
    ) -> None:
        self.layout, self.heads, self.sink, self.pages = layout, heads, sink, pages
        self.version, self.values = version, values
        self.meter: SealMeter | None = None
        self.asked: Asked | None = None
        self.sealing = 0.0  # seconds of the last wide step, over its layers so far
        self._chunks = 0  # that it sealed
        self._room: torch.Tensor | None = None
        self._sequences: Sequences | None = None

    def sequences(self, pool: torch.Tensor) -> Sequences | None:
        """Buffers for FlashAttention over this pool; None where it cannot be used."""
        if self.version is None:
            return None
        if self._sequences is None or self._sequences.pool.data_ptr() != pool.data_ptr():
            try:
                self._sequences = Sequences(pool, self.layout, *self.heads, self.pages, self._room)
            except KernelError as problem:
                logger.warning("wide steps go part by part: %s", problem)
                self.version = self._room = None
                return None
        return self._sequences

    def of(
        self, bounds: Bounds, pool: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> WideStep | None:
        """The step, if a request of it crosses a boundary. It goes part by part if it would stage more than
        there is room for, as a step that our scheduler did not make may.

        Args:
            pool: [pages, group_size, page_tokens, 2 * head_size].
            rows: int32 [requests, width]. seq_lens: int32 [requests], after the step.
        """
        wide = bounds.wide(self.layout)
        if not wide:
            return None
        self._count()
        self._chunks = sum(
            self.layout.sealed(one.length - 1) - self.layout.sealed(one.cached) for one in wide
        )
        sequences = self.sequences(pool)
        plan = None if sequences is None else WidePlan.make(self.layout, self.heads[1], wide, pool.device)
        if plan is not None and plan.pages > self.pages:
            plan = None
        return WideStep(self, bounds, pool, rows, seq_lens, wide, sequences, plan)

    def _count(self) -> None:
        """Tell the meter of the last wide step, whose layers are through."""
        if self.meter is not None:
            for _ in range(self._chunks):
                self.meter.observe(self.sealing / self._chunks)
        self.sealing, self._chunks = 0.0, 0

    def warm_up(self, query: torch.Tensor) -> None:
        """While vLLM measures how much memory a step takes, before there is a cache: take what a wide step
        needs. The staged pages' memory stays, as it does between steps; the rest is given back.

        Args:
            query: [tokens, query heads, head_size].
        """
        if self.version is None:
            return
        if self._room is None and self._sequences is None:
            self._room = staging_room(query, self.layout, self.heads[1], self.pages)
        query.new_empty(2 * query.numel())  # packed queries and their outputs


@dataclass(frozen=True)
class Layer:
    """What a layer brings to a step; see :meth:`WideStep.attend`."""

    out: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    heads: Heads
    scoring: Scoring
    index: int

    def narrow(
        self,
        step: WideStep,
        tokens: slice,
        rows: slice,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        *hints: Any,
    ) -> None:
        """Write and attend tokens of requests that cross no boundary.

        Args:
            tokens, rows: where they lie in the step and in its batch.
            hints: the last arguments of :func:`kernels.ragged_append_attention`.
        """
        batch = (step.pool, step.rows[rows], query_start_loc, seq_lens, *self.heads, step.steps.layout)
        given = (self.out[tokens], self.query[tokens], self.key[tokens], self.value[tokens])
        how = (self.scoring.scale, self.scoring.sinks, self.scoring.soft_cap)
        ragged_append_attention(*given, *batch, *how, *hints)


@dataclass(frozen=True)
class WideStep:
    """One step, for its layers one after another."""

    steps: WideSteps
    bounds: Bounds
    pool: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    wide: list[WideRequest]
    sequences: Sequences | None
    plan: WidePlan | None

    def attend(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_start_loc: torch.Tensor,
        heads: Heads,
        scoring: Scoring,
        index: int = 0,
    ) -> None:
        """Seal, write and attend in one layer.

        Args:
            index: the layer's, among those of the geometry.
            out, query: [tokens, query heads, head_size]; key, value: [tokens, kv_heads, head_size].
            query_start_loc: int32 [requests + 1].
        """
        layer = Layer(out, query, key, value, heads, scoring, index)
        if self.sequences is None or self.plan is None or scoring.sinks is not None:
            for part in self.parts:
                if part.due is not None:
                    self._seal(part, part.due, layer)
                layer.narrow(self, part.tokens, part.rows, part.query_start_loc, part.seq_lens)
            return
        self._at_once(self.sequences, self.plan, layer, query_start_loc)

    @cached_property
    def parts(self) -> list[Part]:
        """For where they go one by one."""
        return cut(self.steps.layout, self.bounds, self.wide, self.pool.device)

    def _seal(self, part: Part, due: torch.Tensor, layer: Layer) -> None:
        steps, rows, asked = self.steps, self.rows[part.rows], None
        with self._sealing():
            if steps.asked is not None and part.chunk is not None:
                asked = steps.asked.of_layer(layer.index, part.chunk)
            how = (self._no_heads, steps.layout, steps.sink)
            ragged_seal(self.pool, rows, due, *how, heads=layer.heads, values=steps.values, asked=asked)

    @contextmanager
    def _sealing(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.steps.sealing += time.perf_counter() - begin

    @cached_property
    def _no_heads(self) -> torch.Tensor:
        """What sealing is given where it is asked about one layer's heads only: int32 [tiers], not read."""
        return self.rows.new_zeros(self.steps.layout.tiers)

    def _at_once(
        self, sequences: Sequences, plan: WidePlan, layer: Layer, query_start_loc: torch.Tensor
    ) -> None:
        """Every segment and KV head of the wide requests is a sequence of one call."""
        own = (layer.out, layer.query, layer.key, layer.value)
        form = (layer.scoring, *((each.shape, each.stride(), each.data_ptr() % 16) for each in own))
        calls = self._calls.get(form)
        if calls is None:
            task = self._task(sequences, plan, layer.scoring, query_start_loc)
            calls = self._calls[form] = wide_calls(task, *own, layer.heads)
        calls.enter(*own, layer.heads)
        if len(plan.due):
            with self._sealing():
                calls.seal(layer.heads, layer.index)
        keys, values = self._pages
        flash()(
            calls.packed,
            keys,
            values,
            max_seqlen_q=plan.most_queries,
            cu_seqlens_q=plan.starts,
            max_seqlen_k=plan.most_keys,
            seqused_k=calls.used,
            softmax_scale=layer.scoring.scale,
            causal=True,
            softcap=layer.scoring.soft_cap,
            block_table=calls.table,
            out=calls.answers,
            num_splits=1,
            fa_version=self.steps.version,
        )
        calls.leave(layer.out)

    @cached_property
    def _calls(self) -> dict[Any, WideCalls | PackedCalls]:
        """By the form of a layer's tensors."""
        return {}

    @cached_property
    def _pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sequences is None:
            raise KernelError("a step that goes part by part has no staged pages")
        return self.sequences.pages_view()

    def _task(
        self, sequences: Sequences, plan: WidePlan, scoring: Scoring, query_start_loc: torch.Tensor
    ) -> WideTask:
        others = None
        if self.others:
            hints = (max(self.others), 1 in self.others)
            others = Others(query_start_loc, self.other_lens, *hints)
        asked = None if self.steps.asked is None else self.steps.asked.of_layers(plan.chunks)
        how = (self.steps.sink, scoring.scale, scoring.soft_cap, self.steps.values, asked)
        return WideTask(sequences, plan, self.rows, others, *how)

    @cached_property
    def others(self) -> list[int]:
        """New tokens of each request that crosses no boundary."""
        wide = {one.row for one in self.wide}
        steps = enumerate(zip(self.bounds.starts, self.bounds.ends, strict=True))
        return [end - start for row, (start, end) in steps if row not in wide and end > start]

    @cached_property
    def other_lens(self) -> torch.Tensor:
        """int32 [requests]: lengths, but 0 for wide requests, which the kernels then skip."""
        keep = torch.ones(self.seq_lens.shape[0], dtype=torch.int32)
        keep[[one.row for one in self.wide]] = 0
        host = keep.pin_memory() if self.seq_lens.is_cuda else keep
        return self.seq_lens * host.to(self.seq_lens.device, non_blocking=True)


def flash() -> Callable[..., Any]:
    """vLLM's FlashAttention over page tables."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    call: Callable[..., Any] = flash_attn_varlen_func
    return call


def flash_version(device: torch.device, dtype: torch.dtype, layout: RaggedLayout) -> int | None:
    """Which FlashAttention of vLLM's takes such a cache; None where none does. Version 3 fetches pages that
    are whole tiles of keys through a descriptor of the cache, which ends where our staged pages lie: it would
    read zeros there. The smallest tile of a causal step is 80 tokens."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    if layout.head_size % 8 or layout.head_size > 256 or layout.page_tokens % 16:
        return None
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version: int | None = get_flash_attn_version(head_size=layout.head_size)
    if version == 3 and layout.page_tokens > LARGEST_PAGE_3:
        from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

        version = 2 if is_fa_version_supported(2) else None
    return version if version in (2, 3) else None

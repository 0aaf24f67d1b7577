"""Steps that cross seal boundaries: all at once, as FlashAttention is given them, and part by part."""

from __future__ import annotations

import random
import sys
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import set_current_vllm_config

    from tangram import backend
import kernels.wide
from kernels.cuda import dispatch
from kernels.errors import KernelError
from kernels.wide import Sequences, WidePlan, WideRequest, staged_pages
from tangram import wide
from tangram.seal_meter import SealMeter
from tangram.wide import Bounds, Scoring, WideSteps, cut
from tests.kernels.wide_batch import POISON, Batch, layout_of, room_behind
from tests.tangram.simulation import vllm_config

CUDA = torch.cuda.is_available()
GPU = pytest.mark.skipif(not CUDA, reason="needs a GPU")


def bounds(batch: Batch) -> Bounds:
    return Bounds(batch.starts, batch.lengths, batch.tokens)


def attend(
    batch: Batch,
    pool: torch.Tensor,
    version: int | None,
    soft_cap: float = 0.0,
    pages: int | None = None,
    values: bool = False,
    asked: Any = None,
) -> torch.Tensor:
    """The step on a pool; with a version of FlashAttention all at once."""
    heads = (batch.query.shape[1], batch.key.shape[1])
    pages = pages or staged_pages(batch.layout, batch.tokens[-1], 2)
    steps = WideSteps(batch.layout, heads, batch.sink, pages, version, values)
    steps.asked = asked
    step = steps.of(bounds(batch), pool, batch.rows, batch.seq_lens)
    assert step is not None
    out = torch.full_like(batch.query, POISON)
    scoring = Scoring(batch.layout.head_size**-0.5, soft_cap)
    step.attend(out, batch.query, batch.key, batch.value, batch.query_start_loc, batch.heads, scoring, 1)
    return out


class Means:
    """What the heads of two layers are asked behind each chunk."""

    def __init__(self, batch: Batch) -> None:
        self.shape, self.device = (2, batch.key.shape[1], batch.layout.head_size), batch.key.device

    def of_layers(self, chunks: Sequence[int]) -> torch.Tensor:
        draws = [torch.randn(self.shape, generator=torch.Generator().manual_seed(c)) for c in chunks]
        return torch.stack(draws, dim=1).to(self.device)

    def of_layer(self, layer: int, chunk: int) -> torch.Tensor:
        return self.of_layers([chunk])[layer]


def paged(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention in plain torch, on tables that reach the pool and the staged pages."""
    made: list[Sequences] = []
    own_init = Sequences.__init__

    def remembered(sequences: Sequences, *args: Any) -> None:
        own_init(sequences, *args)
        made.append(sequences)

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float,
        softcap: float,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool,
        out: torch.Tensor,
        **_: Any,
    ) -> None:
        assert causal
        sequences = made[-1]
        size, head = k.shape[1], k.shape[3]
        staged = sequences.staged.view(-1, size, 2 * head)

        def page(number: int) -> torch.Tensor:
            if 0 <= number < k.shape[0]:
                return torch.cat((k[number, :, 0], v[number, :, 0]), dim=-1)
            index, rest = divmod(number - sequences.staged_at, size * 2 * head // sequences.unit)
            assert rest == 0
            return staged[index]

        for sequence, used in enumerate(seqused_k.tolist()):
            begin, end = cu_seqlens_q[sequence : sequence + 2].tolist()
            assert end - begin <= max_seqlen_q
            assert used <= max_seqlen_k
            pages = block_table[sequence, : -(-used // size)].tolist()
            both = torch.cat([page(number) for number in pages])[:used].float()
            scores = torch.einsum("qgd,jd->gqj", q[begin:end].float(), both[:, :head]) * softmax_scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            ahead = torch.ones(end - begin, used, dtype=torch.bool).triu(used - (end - begin) + 1)
            weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
            out[begin:end] = torch.einsum("gqj,jd->qgd", weights, both[:, head:]).to(out.dtype)

    monkeypatch.setattr(kernels.wide, "new_room", room_behind)
    monkeypatch.setattr(Sequences, "__init__", remembered)
    monkeypatch.setattr(wide, "flash", lambda: attention)


STEPS = [
    [(0, 200)],
    [(0, 40), (0, 41)],
    [(7, 120), (73, 1), (0, 12), (40, 90), (72, 40)],
    [(39, 2), (104, 1), (104, 65), (130, 33)],
]


@pytest.mark.parametrize("steps", STEPS[:1] + STEPS[2:])
@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_all_at_once_is_part_by_part(
    monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, int]], padding: int, soft_cap: float
) -> None:
    """The same outputs, and pools that are the same to the bit: rings and sealed pages."""
    paged(monkeypatch)
    batch = Batch(layout_of(), steps, padding=padding)
    parted, whole = batch.pool_copy(), batch.pool_copy()
    values, asked = padding > 0, Means(batch) if soft_cap else None
    expected = attend(batch, parted, None, soft_cap, values=values, asked=asked if values else None)
    out = attend(batch, whole, 3, soft_cap, values=values, asked=asked if values else None)
    assert not expected.isnan().any()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    batch.check_alike(whole, parted)
    if values:
        other = attend(batch, batch.pool_copy(), None, soft_cap)
        assert not torch.equal(other, expected), "the values decided nothing"
    if values and asked:
        other = attend(batch, batch.pool_copy(), None, soft_cap, values=True)
        assert not torch.equal(other, expected), "what heads are asked decided nothing"


def test_steps_within_boundaries_are_none_of_ours() -> None:
    batch = Batch(layout_of(), [(0, 40), (39, 1), (40, 32)])
    steps = WideSteps(batch.layout, (6, 3), 2, 100, None)
    assert steps.of(bounds(batch), batch.pool, batch.rows, batch.seq_lens) is None


@pytest.mark.parametrize("seed", range(20))
def test_parts_cross_nothing_and_cover_the_step_in_order(seed: int) -> None:
    rng = random.Random(seed)
    page, chunk, window = rng.choice([1, 2, 4]), rng.choice([8, 16, 32]), rng.choice([0, 4, 9])
    layout = layout_of(page=page, chunk=chunk, window=window)
    starts = [rng.choice([0, 3, 40, 77]) for _ in range(rng.randint(1, 8))]
    counts = [rng.choice([0, 1, 2, 30, 100]) for _ in starts]
    tokens = [sum(counts[:i]) for i in range(len(counts) + 1)]
    step = Bounds(starts, [s + c for s, c in zip(starts, counts, strict=True)], tokens)
    at, computed = 0, list(starts)
    for part in cut(layout, step, step.wide(layout), torch.device("cpu")):
        assert part.tokens.start == at
        at = part.tokens.stop
        steps = part.query_start_loc.diff().tolist()
        for row, count, length in zip(
            range(*part.rows.indices(99)), steps, part.seq_lens.tolist(), strict=True
        ):
            assert length == computed[row] + count <= layout.step_end(computed[row])
            sealed_here = layout.sealed(computed[row]) > layout.sealed(max(computed[row] - 1, starts[row]))
            assert (part.due is not None) == (sealed_here and computed[row] > starts[row])
            computed[row] = length
    assert at == tokens[-1]
    assert computed == step.ends


@pytest.mark.parametrize("seed", range(10))
def test_the_buffer_holds_what_the_scheduler_may_ask_for(seed: int) -> None:
    rng = random.Random(seed)
    layout, budget = layout_of(chunk=32, window=rng.choice([0, 8, 40])), rng.choice([64, 200, 1000])
    wide_ones, token, least = [], 0, rng.choice([4, 8, 32])
    while (most := budget - token) >= least:
        new, cached = rng.choice([least, rng.randint(least, most)]), rng.randint(0, 300)
        if cached + new > layout.step_end(cached):
            wide_ones.append(WideRequest(len(wide_ones), token, cached, cached + new))
        token += new
    plan = WidePlan.make(layout, 2, wide_ones, torch.device("cpu"))
    assert plan.pages <= staged_pages(layout, budget, least)


def test_a_step_larger_than_the_buffer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(layout_of(), [(0, 200)])
    monkeypatch.setattr(kernels.wide, "new_room", room_behind)
    sequences = Sequences(batch.pool_copy(), batch.layout, 6, 3, 49)
    plan = WidePlan.make(batch.layout, 3, batch.wide(), torch.device("cpu"))
    with pytest.raises(KernelError, match="there is room for"):
        sequences.stage(batch.query, batch.key, batch.value, batch.rows, *batch.heads, plan)


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("head_size", "page", "chunk", "window", "group"),
    [
        (64, 16, 64, 32, 1),
        (128, 16, 512, 128, 4),
        (96, 32, 128, 64, 3),
        (128, 64, 256, 0, 8),
        (256, 16, 64, 16, 2),
        (64, 128, 256, 128, 2),
        (128, 128, 512, 128, 4),
    ],
)
@pytest.mark.parametrize("padding", [0, 72])
def test_on_a_gpu_flash_attention_agrees_with_our_own_kernels(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    head_size: int,
    page: int,
    chunk: int,
    window: int,
    group: int,
    padding: int,
) -> None:
    monkeypatch.setenv("TANGRAM_KERNELS", "native")
    dispatch.native.cache_clear()
    layout = layout_of(head_size, page, chunk, window)
    version = wide.flash_version(torch.device("cuda"), dtype, layout)
    if version is None:
        pytest.skip("no FlashAttention here")
    steps = [(a * chunk // 32, max(1, b * chunk // 32)) for a, b in [s for one in STEPS for s in one]]
    steps += [(3 * chunk + 5, 1), (chunk, 0)]
    batch = Batch(layout, steps, dtype=dtype, device="cuda", group=group, padding=padding)
    parted, whole = batch.pool_copy(), batch.pool_copy()
    values, asked = padding > 0, Means(batch) if padding and page < 64 else None
    expected = attend(batch, parted, None, values=values, asked=asked)
    out = attend(batch, whole, version, values=values, asked=asked)
    assert not expected.isnan().any()
    difference = (out.double() - expected.double()).norm() / expected.double().norm()
    assert difference < (6e-3 if dtype == torch.bfloat16 else 1e-3)
    batch.check_alike(whole, parted)
    dispatch.native.cache_clear()


@pytest.mark.parametrize("others", [[], [(50, 1), (12, 0)], [(50, 1), (41, 7)]])
@pytest.mark.parametrize("launch", ["separate", "fused", "dependent"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_layers_of_a_step_share_their_calls_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, device: str, launch: str, others: list[tuple[int, int]]
) -> None:
    """Layers of the same form, at other addresses, and one whose tensors lie otherwise."""
    monkeypatch.setattr(dispatch, "launch", lambda: launch)
    if device == "cpu":
        paged(monkeypatch)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layout = layout_of(*((16, 4) if device == "cpu" else (64, 16, 32, 8)))
    batch = Batch(layout, [*STEPS[0], *others, (40, 90)], kv_heads=6, dtype=dtype, device=device)
    outs, pools = [], []
    for version in (None, 3):
        pool, out = batch.pool_copy(), torch.full_like(batch.query, POISON)
        pages = staged_pages(layout, batch.tokens[-1], 2)
        step = WideSteps(layout, (4, 2), batch.sink, pages, version).of(
            bounds(batch), pool, batch.rows, batch.seq_lens
        )
        assert step is not None
        for first in (0, 2, 4):
            some, theirs = slice(first, first + 2), slice(2 * first, 2 * first + 4)
            given = [batch.query[:, theirs], batch.key[:, some], batch.value[:, some]]
            given = [tensor.contiguous() for tensor in given] if first == 4 else given
            heads = (batch.heads[0][some], batch.heads[1][some])
            step.attend(out[:, theirs], *given, batch.query_start_loc, heads, Scoring(0.2))
        outs.append(out)
        pools.append(pool)
    assert torch.equal(outs[0].isnan(), outs[1].isnan())
    close = 1e-5 if device == "cpu" else 2e-2
    torch.testing.assert_close(outs[1], outs[0], rtol=close, atol=close, equal_nan=True)
    batch.check_alike(pools[1], pools[0])


def test_more_than_the_buffer_holds_goes_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine does not end over it; what a request sees is the same."""
    paged(monkeypatch)
    batch = Batch(layout_of(), STEPS[2])
    expected, out = attend(batch, batch.pool_copy(), None), attend(batch, batch.pool_copy(), 3, pages=3)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("hopper", "older", "page", "version"),
    [
        (True, True, 16, 3),
        (True, True, 64, 3),
        (True, True, 128, 2),
        (True, True, 256, 2),
        (True, False, 128, None),
        (False, True, 128, 2),
        (True, True, 8, None),
    ],
)
def test_which_flash_attention_takes_a_page(
    monkeypatch: pytest.MonkeyPatch, hopper: bool, older: bool, page: int, version: int | None
) -> None:
    """Version 3 reads pages of whole tiles through a descriptor, which does not reach the staged ones."""
    utils, interface = ModuleType("fa_utils"), ModuleType("flash_attn_interface")
    utils.get_flash_attn_version = lambda **_: 3 if hopper else 2  # type: ignore[attr-defined]
    interface.is_fa_version_supported = lambda _: older  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.fa_utils", utils)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", ModuleType("vllm_flash_attn"))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", interface)
    layout = layout_of(64, page, 512, 128)
    assert wide.flash_version(torch.device("cuda"), torch.bfloat16, layout) == version
    assert wide.flash_version(torch.device("cpu"), torch.bfloat16, layout) is None


def test_memory_of_wide_steps_is_taken_while_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a cache; it is kept, and what the steps stage is staged there."""
    paged(monkeypatch)
    batch, taken = Batch(layout_of(), STEPS[2]), []
    pool = batch.pool_copy()

    def room(_: torch.Tensor, elements: int) -> torch.Tensor:
        taken.append(room_behind(pool, elements))
        return taken[-1]

    monkeypatch.setattr(kernels.wide, "new_room", room)
    heads, pages = (batch.query.shape[1], batch.key.shape[1]), staged_pages(batch.layout, 300, 2)
    steps = WideSteps(batch.layout, heads, batch.sink, pages, 3)
    for _ in range(4):  # layers
        steps.warm_up(batch.query)
    (own,) = taken
    assert steps.of(bounds(batch), pool, batch.rows, batch.seq_lens) is not None
    assert len(taken) == 1
    staged = steps.sequences(pool).staged  # type: ignore[union-attr]
    assert staged.shape[0] == pages
    assert own.data_ptr() <= staged.data_ptr()
    assert staged.data_ptr() + staged.nbytes <= own.data_ptr() + own.nbytes
    without = WideSteps(batch.layout, heads, batch.sink, pages, None)
    without.warm_up(batch.query)
    assert len(taken) == 1


def test_layers_take_it_before_anybody_builds_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM measures memory by a forward pass without a cache, when there are no metadata builders yet."""
    taken: list[int] = []

    def room(like: torch.Tensor, elements: int) -> torch.Tensor:
        taken.append(elements)
        return torch.empty(elements, dtype=like.dtype)

    monkeypatch.setattr(kernels.wide, "new_room", room)
    monkeypatch.setattr(backend, "implementation", lambda *_: "native")
    monkeypatch.setattr(backend, "flash_version", lambda *_: 3)
    for setting, times in (("on", 1), ("off", 0)):
        taken.clear()
        config = vllm_config(tmp_path, 512, {"wide_steps": setting}, max_num_batched_tokens=256)
        with set_current_vllm_config(config):
            layers = [backend.RaggedImpl(4, 8, 0.3, 2) for _ in range(3)]
        query, key = torch.empty(256, 4, 8), torch.empty(256, 2, 8)
        for layer in layers:
            layer.forward(None, query, key, key, torch.empty(0), None, query)
        assert len(taken) == times
        least, raw = max(16, 64 // 4), -(-(64 + 32) // 16) + 1
        pages = 256 // 16 + 256 // least * raw
        assert taken == [(pages * 2 + 1) * 16 * 2 * 8] * times
        kept = weakref.ref(layers[0].wide)
        assert all(layer.wide is kept() for layer in layers)
        del layers, layer
        assert kept() is None, "an engine that ends leaves its memory behind"


def test_a_buffer_out_of_a_tables_reach_is_said_and_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels.wide, "LARGEST_INDEX", 10)
    batch = Batch(layout_of(), [(0, 200)])
    expected, out = attend(batch, batch.pool_copy(), None), attend(batch, batch.pool_copy(), 3)
    assert torch.equal(out, expected)
    assert "too far apart in memory" in caplog.text


def test_chunks_that_are_sealed_in_layers_are_counted_once() -> None:
    """When the next wide step begins, all layers of the last one are through."""
    batch = Batch(layout_of(), [(7, 120), (0, 12), (40, 90)])
    steps = WideSteps(batch.layout, (6, 3), 2, 100, None)
    steps.meter = SealMeter()
    for seals in (0, 5):
        step = steps.of(bounds(batch), batch.pool_copy(), batch.rows, batch.seq_lens)
        assert step is not None
        assert steps.meter.to_dict()["seals"] == seals
        out = torch.empty_like(batch.query)
        for _ in range(4):  # layers
            step.attend(
                out, batch.query, batch.key, batch.value, batch.query_start_loc, batch.heads, Scoring(0.25)
            )
    assert steps.meter.to_dict()["seconds"] > 0

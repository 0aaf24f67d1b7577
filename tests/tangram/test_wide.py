"""Steps that cross seal boundaries: all at once, as FlashAttention is given them, and part by part."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kernels import RaggedLayout, ragged_append, ragged_seal
from kernels.cuda import dispatch
from kernels.errors import KernelError
from kernels.wide import Sequences, WidePlan, WideRequest, staged_pages
from tangram import wide
from tangram.wide import Bounds, Scoring, WideSteps, cut

POISON = float("nan")
CUDA = torch.cuda.is_available()


def layout_of(head_size: int = 16, page: int = 4, chunk: int = 32, window: int = 8) -> RaggedLayout:
    slots = -(-(chunk + window) // page) + 2
    return RaggedLayout(page, slots, chunk, window, (page, chunk // 2, chunk), head_size)


class Batch:
    """Requests whose first tokens are in the cache, and a step of theirs. Other slots are poisoned.

    Args:
        steps: (cached tokens, new tokens) of each request.
    """

    def __init__(
        self,
        layout: RaggedLayout,
        steps: list[tuple[int, int]],
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        kv_heads: int = 3,
        group: int = 2,
        padding: int = 0,
        sink: int = 2,
    ) -> None:
        self.layout, self.sink, self.group = layout, sink, group
        random = torch.Generator().manual_seed(len(steps) + layout.head_size)
        lengths = [cached + new for cached, new in steps]
        width = layout.width(max(lengths))
        pages, members = width * len(steps) + 1, kv_heads
        page = members * layout.page_tokens * 2 * layout.head_size
        storage = torch.full((pages * (page + padding),), POISON, dtype=dtype, device=device)
        shape = (pages, members, layout.page_tokens, 2 * layout.head_size)
        self.pool = storage.as_strided(shape, (page + padding, page // members, 2 * layout.head_size, 1))
        order = torch.randperm(pages - 1, generator=random).add(1).to(torch.int32)
        self.rows = order.view(len(steps), width).to(device)
        self.heads = (
            torch.arange(kv_heads, dtype=torch.int32, device=device) % layout.tiers,
            torch.arange(kv_heads, dtype=torch.int32, device=device).flip(0).contiguous(),
        )
        tokens = [0]
        for _, new in steps:
            tokens.append(tokens[-1] + new)
        self.bounds = Bounds([cached for cached, _ in steps], lengths, tokens)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.starts = torch.tensor(tokens, dtype=torch.int32, device=device)

        def states(count: int, heads: int) -> torch.Tensor:
            plain = torch.randn(count, heads, layout.head_size, generator=random)
            return (plain + 0.3 * torch.randn(layout.head_size, generator=random)).to(dtype).to(device)

        for row, (cached, _) in enumerate(steps):
            begin = 0
            while begin < cached:  # as narrow steps would
                end = min(cached, layout.step_end(begin))
                self._seal(row, begin)
                new = (torch.tensor([0, end - begin]), torch.tensor([end]))
                tables = (table.to(torch.int32).to(device) for table in new)
                own = (states(end - begin, kv_heads), states(end - begin, kv_heads))
                ragged_append(*own, self.pool, self.rows[row : row + 1], *tables, *self.heads, layout)
                begin = end
            self._seal(row, cached)
        self.query = states(tokens[-1], kv_heads * group)
        self.key, self.value = states(tokens[-1], kv_heads), states(tokens[-1], kv_heads)

    def _seal(self, row: int, tokens: int) -> None:
        chunk, rest = divmod(tokens - self.layout.window, self.layout.chunk)
        if rest == 0 and chunk >= 1:
            due = torch.tensor([[0, chunk - 1]], dtype=torch.int32, device=self.pool.device)
            none = torch.zeros(self.layout.tiers, dtype=torch.int32, device=self.pool.device)
            row_alone = self.rows[row : row + 1]
            ragged_seal(self.pool, row_alone, due, none, self.layout, self.sink, heads=self.heads)

    def attend(self, pool: torch.Tensor, version: int | None, soft_cap: float = 0.0) -> torch.Tensor:
        """The step on a pool; with a version all at once."""
        heads = (self.query.shape[1], self.key.shape[1])
        steps = WideSteps(self.layout, heads, self.sink, self.bounds.tokens[-1], version)
        step = steps.of(self.bounds, pool, self.rows, self.seq_lens)
        assert step is not None
        out = torch.full_like(self.query, POISON)
        scoring = Scoring(self.layout.head_size**-0.5, soft_cap)
        step.attend(out, self.query, self.key, self.value, self.starts, self.heads, scoring)
        return out

    def pool_copy(self) -> torch.Tensor:
        """With the same strides."""
        size = self.pool.untyped_storage().nbytes() // self.pool.element_size()
        storage = torch.empty(size, dtype=self.pool.dtype, device=self.pool.device)
        return storage.as_strided(self.pool.shape, self.pool.stride()).copy_(self.pool)

    def check_alike(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Sealed pages, and all that a ring can still hold, are the same to the bit."""
        layout = self.layout
        for row, length in zip(self.rows.long(), self.bounds.ends, strict=True):
            sealed = row[layout.ring_pages : layout.width(max(0, length - 1))]
            assert torch.equal(one[sealed].isnan(), other[sealed].isnan())
            assert torch.equal(one[sealed].nan_to_num(), other[sealed].nan_to_num())
            oldest = max(0, -(-length // layout.page_tokens) - layout.ring_slots) * layout.page_tokens
            for tier, member in zip(*(part.tolist() for part in self.heads), strict=True):
                at = torch.arange(oldest, length)
                entries = at // layout.page_tokens % layout.ring_slots * layout.tiers + tier
                ring = (row[entries], member, at % layout.page_tokens)
                assert torch.equal(one[ring].nan_to_num(), other[ring].nan_to_num())


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
    expected = batch.attend(parted, None, soft_cap)
    out = batch.attend(whole, 3, soft_cap)
    assert not expected.isnan().any()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    batch.check_alike(whole, parted)


def test_steps_within_boundaries_are_none_of_ours() -> None:
    batch = Batch(layout_of(), [(0, 40), (39, 1), (40, 32)])
    steps = WideSteps(batch.layout, (6, 3), 2, 100, None)
    assert steps.of(batch.bounds, batch.pool, batch.rows, batch.seq_lens) is None


@pytest.mark.parametrize("seed", range(20))
def test_parts_cross_nothing_and_cover_the_step_in_order(seed: int) -> None:
    rng = random.Random(seed)
    page, chunk, window = rng.choice([1, 2, 4]), rng.choice([8, 16, 32]), rng.choice([0, 4, 9])
    layout = layout_of(page=page, chunk=chunk, window=window)
    starts = [rng.choice([0, 3, 40, 77]) for _ in range(rng.randint(1, 8))]
    counts = [rng.choice([0, 1, 2, 30, 100]) for _ in starts]
    tokens = [sum(counts[:i]) for i in range(len(counts) + 1)]
    bounds = Bounds(starts, [s + c for s, c in zip(starts, counts, strict=True)], tokens)
    at, computed = 0, list(starts)
    for part in cut(layout, bounds, torch.device("cpu")):
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
    assert computed == bounds.ends


@pytest.mark.parametrize("seed", range(10))
def test_the_buffer_holds_what_the_scheduler_may_ask_for(seed: int) -> None:
    """Wide requests have a chunk of new tokens at the least."""
    rng = random.Random(seed)
    layout, budget = layout_of(chunk=32, window=rng.choice([0, 8, 40])), rng.choice([64, 200, 1000])
    wide_ones, token = [], 0
    while (most := budget - token) >= layout.chunk:
        new, cached = rng.choice([layout.chunk, rng.randint(layout.chunk, most)]), rng.randint(0, 300)
        if cached + new > layout.step_end(cached):
            wide_ones.append(WideRequest(len(wide_ones), token, cached, cached + new))
        token += new
    plan = WidePlan.make(layout, 2, wide_ones, torch.device("cpu"))
    assert plan.pages <= staged_pages(layout, budget)


def test_a_step_larger_than_the_buffer_is_refused() -> None:
    batch = Batch(layout_of(), [(0, 200)])
    sequences = Sequences(batch.pool, batch.layout, 6, 3, 40)
    plan = WidePlan.make(batch.layout, 3, batch.bounds.wide(batch.layout), torch.device("cpu"))
    with pytest.raises(KernelError, match="there is room for"):
        sequences.stage(batch.query, batch.key, batch.value, batch.rows, *batch.heads, plan)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("head_size", "page", "chunk", "window", "group"),
    [
        (64, 16, 64, 32, 1),
        (128, 16, 512, 128, 4),
        (96, 32, 128, 64, 3),
        (128, 64, 256, 0, 8),
        (256, 16, 64, 16, 2),
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
    version = wide.flash_version(torch.device("cuda"), dtype, head_size)
    if version is None:
        pytest.skip("no FlashAttention here")
    steps = [(a * chunk // 32, max(1, b * chunk // 32)) for a, b in [s for one in STEPS for s in one]]
    steps += [(3 * chunk + 5, 1), (chunk, 0)]
    layout = layout_of(head_size, page, chunk, window)
    batch = Batch(layout, steps, dtype=dtype, device="cuda", group=group, padding=padding)
    parted, whole = batch.pool_copy(), batch.pool_copy()
    expected, out = batch.attend(parted, None), batch.attend(whole, version)
    assert not expected.isnan().any()
    difference = (out.double() - expected.double()).norm() / expected.double().norm()
    assert difference < (6e-3 if dtype == torch.bfloat16 else 1e-3)
    batch.check_alike(whole, parted)
    dispatch.native.cache_clear()

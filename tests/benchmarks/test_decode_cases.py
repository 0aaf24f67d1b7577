"""The benchmarks' block tables and calls of other kernels, and the arithmetic of their tables."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cuda_decode, decode_report, peers
from benchmarks.budgets import (
    CHUNK,
    KV_HEADS,
    LAYERS,
    SPREAD,
    even_layout,
    geometry_layout,
    layout_of,
    longest_keep,
    model_geometry,
    model_needs,
    spread_geometry,
    tier_lengths,
)
from benchmarks.cases import (
    Case,
    by_head,
    cache_views,
    row_entries,
    spread_case,
    stock_sequences,
    whole_model,
)
from benchmarks.checks import Disagreement, check, relative_error
from benchmarks.peers import INFER_PLANS, PLANS, FlashAttention3, FlashInfer
from kernels import ragged_gather
from tests.benchmarks.imitated_peers import FlashAttentionModule, FlashInferModule

LENGTHS = [1, 640, 641, 1500]


@pytest.fixture(scope="module")
def memory() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(24 * 2**20, generator=generator).to(torch.bfloat16)


@pytest.fixture
def case(memory: torch.Tensor) -> Case:
    return spread_case(layout_of(SPREAD[0.25]), LENGTHS, memory)


def test_row_entries_are_those_of_the_layout() -> None:
    layout = layout_of(SPREAD[0.25])
    for tokens in (1, 16, 17, 639, 640, 641, 1152, 1153, 5000):
        sealed = layout.sealed(tokens - 1)
        for tier in range(layout.tiers):
            kept = [entry for chunk in range(sealed) for entry in layout.kept_entries(chunk, tier)]
            wanted = [*kept, *layout.raw_entries(sealed, tokens, tier)]
            assert row_entries(layout, tokens, tier).tolist() == wanted


@pytest.mark.parametrize("layer", [0, 2])
def test_block_tables_name_what_the_heads_hold(case: Case, layer: int) -> None:
    keys, values = case.cache()
    sequences = case.sequences()[layer]
    tier, member = case.tables[layer]
    for request, tokens in enumerate(case.lengths):
        sealed = case.layout.sealed(tokens - 1)
        held = ragged_gather(case.pool, case.rows[request], tier, member, case.layout, tokens, sealed)
        for head, (key, value) in enumerate(held):
            sequence = request * KV_HEADS + head
            length = sequences.lengths[sequence]
            blocks = sequences.table[sequence, : -(-length // 16)].long()
            assert torch.equal(keys[blocks].flatten(0, 2)[:length], key)
            assert torch.equal(values[blocks].flatten(0, 2)[:length], value)


def test_layers_of_a_case_read_different_memory(case: Case) -> None:
    blocks = [set(layer.table.flatten().tolist()) - {0} for layer in case.sequences()]
    assert len(blocks) > 1
    assert len(set.union(*blocks)) == sum(map(len, blocks))


def test_layer_bytes_count_what_is_read(memory: torch.Tensor) -> None:
    layout = layout_of(SPREAD[0.25])
    case = spread_case(layout, [1500, 700], memory)
    assert case.layer_bytes == sum(tier_lengths(layout, 1500) + tier_lengths(layout, 700)) * 512
    lengths = case.sequences()[0].lengths
    assert sum(lengths) * 512 == case.layer_bytes


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_flash_attention_does_our_work(case: Case, plan: peers.FlashPlan) -> None:
    out = torch.empty_like(case.out)
    module = FlashAttentionModule()
    peer = FlashAttention3(module, case.sequences(), case.cache(), by_head(case.query), by_head(out), plan)
    assert len(module.schedules) == int(plan.ahead)  # all layers have the same lengths
    assert check("fa3", case, peer.attend, out) < 1e-2


def test_layers_of_a_model_have_schedules_of_their_own() -> None:
    geometry = model_geometry(0.25)
    memory = torch.randn(100 * 2**20, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    case = whole_model(geometry, [1300], memory)
    out, module = torch.empty_like(case.out), FlashAttentionModule()
    peer = FlashAttention3(
        module, case.sequences(), case.cache(), by_head(case.query), by_head(out), peers.STOCK_PLAN
    )
    assert len(module.schedules) > LAYERS // 2
    assert check("fa3", case, peer.attend, out) < 1e-2


@pytest.mark.parametrize("plan", INFER_PLANS, ids=str)
def test_flashinfer_does_our_work(case: Case, plan: peers.InferPlan) -> None:
    out, module = torch.empty_like(case.out), FlashInferModule()
    layers = case.sequences()
    peer = FlashInfer(module, layers, case.cache(), by_head(case.query), by_head(out), plan)
    peer.plan_all()
    assert module.fast_plans == (len(layers) if plan.fixed else 0)
    assert check("flashinfer", case, peer.attend, out) < 1e-2


def test_other_work_is_an_error(case: Case) -> None:
    out = torch.empty_like(case.out)
    layers = case.sequences()
    for layer in layers:
        layer.table[-1, 0] = layer.table[-1, 1]  # one block of 16 tokens twice, in one head's sequence
    peer = FlashAttention3(
        FlashAttentionModule(), layers, case.cache(), by_head(case.query), by_head(out), PLANS[0]
    )
    with pytest.raises(Disagreement, match="fa3: its output differs"):
        check("fa3", case, peer.attend, out)


def test_an_output_that_was_not_written_is_an_error(case: Case) -> None:
    def nothing(layer: int) -> None:
        pass

    with pytest.raises(Disagreement):
        check("nobody", case, nothing, torch.empty_like(case.out))


def test_relative_error_is_the_worst_heads() -> None:
    wanted = torch.ones(2, 3, 4)
    got = wanted.clone()
    got[1, 2] *= 1.5
    assert relative_error(got, wanted) == pytest.approx(0.5)


def test_stock_layout_has_as_many_bytes(case: Case, memory: torch.Tensor) -> None:
    layers, total = stock_sequences(case, memory, 3)
    assert len(layers) == 3
    assert total == pytest.approx(case.layer_bytes, rel=0.01)
    used = [
        layer.table[request, : -(-length // 16)].tolist()
        for layer in layers
        for request, length in enumerate(layer.lengths)
    ]
    blocks = [block for one in used for block in one]
    assert len(set(blocks)) == len(blocks)
    keys, _ = cache_views(memory, 16, KV_HEADS, 128)
    assert max(blocks) < keys.shape[0]


def test_cache_views_separate_keys_and_values() -> None:
    memory = torch.arange(2 * 3 * 16 * 8, dtype=torch.float32)
    keys, values = cache_views(memory, 16, 3, 4)
    raw = memory.view(2, 3, 16, 8)
    assert torch.equal(keys, raw[..., :4].transpose(1, 2))
    assert torch.equal(values, raw[..., 4:].transpose(1, 2))
    single, _ = cache_views(memory, 16, 1, 4)
    assert single.stride() == (128, 8, 4, 1)
    assert torch.equal(single[:, :, 0], memory.view(6, 16, 8)[..., :4])


def test_model_budgets_are_what_the_text_says() -> None:
    flat = torch.tensor(model_needs()).flatten()
    assert len(flat) == LAYERS * KV_HEADS
    assert float(flat.std()) == pytest.approx(0.35, abs=0.01)
    for retention in (0.5, 0.25):
        geometry = model_geometry(retention)
        assert geometry.budget == pytest.approx(retention, abs=0.02)
        assert geometry.num_tiers == 6
        assert longest_keep("model", retention) >= max(geometry.keep)
    assert longest_keep("spread", 0.25) == max(spread_geometry(0.25).keep) == 352
    assert longest_keep("spread", 1.0) == CHUNK


@pytest.mark.parametrize("layout", [layout_of(SPREAD[0.25]), geometry_layout(model_geometry(0.5))])
def test_even_layout_keeps_as_much(layout: object) -> None:
    even = even_layout(layout)  # type: ignore[arg-type]
    assert sum(even.keep) == sum(layout.keep)  # type: ignore[attr-defined]
    assert max(even.keep) - min(even.keep) <= 16


def row(batch: int, **times: float) -> dict[str, object]:
    """A measured row of the bars: 1 GB a layer, a copy at 4 TB/s."""
    return {
        "budgets": "spread",
        "context": 32768,
        "batch": batch,
        "retention": 0.25,
        "bytes": 10**9,
        "even_bytes": 10**9,
        "copy_bytes_a_second": 4e12,
        "us": {"ours": 260.0, "ours_host": 270.0, "even": 255.0} | times,
    }


def test_bars_of_a_row() -> None:
    judged = decode_report.bars([row(64, fa3=310.0, flashinfer=300.0), row(8, fa3=310.0)])
    assert [bar.passed for bar in judged] == [True, True, True, True, False]
    assert [round(bar.value, 3) for bar in judged] == [0.962, 1.02, 1.192, 1.111, 1.192]
    assert str(judged[-1]).startswith("MISS  spread budgets, batch 8")


def test_bars_leave_out_what_was_not_measured() -> None:
    assert len(decode_report.bars([row(64)])) == 2
    assert decode_report.bars([row(8), row(1, fa3=1.0), row(64) | {"context": 8192}]) == []


def test_ways_name_the_chosen_and_the_worst_error() -> None:
    measured = row(8, fa3=1.0) | {"how": {"ours": "graph", "fa3": "32 splits"}}
    text = decode_report.ways(measured | {"relative_errors": {"fa3": 0.002, "fa3_even": 0.004}})
    assert text == "spread budgets, batch 8: fa3: 32 splits; outputs differ by at most 4.0e-03"
    assert decode_report.ways(row(8) | {"how": {}, "relative_errors": {}}).endswith("no peers")


def test_lines_have_the_headings_columns() -> None:
    text = decode_report.line(row(64, fa3=310.0))
    assert len(text.split()) == 4 + 3 + len(decode_report.TITLES)
    assert text.split()[-1] == "-"


def test_alternating_takes_turns() -> None:
    order: list[str] = []

    def sampler(name: str, values: list[float]) -> Callable[[], float]:
        def sample() -> float:
            order.append(name)
            return values.pop(0)

        return sample

    both = {"a": sampler("a", [3.0, 1.0, 2.0]), "b": sampler("b", [6.0, 9.0, 7.0])}
    assert cuda_decode.alternate(both, 3) == {"a": 2.0, "b": 7.0}
    assert order == ["a", "b"] * 3


def test_the_whole_command_runs_with_its_peers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    monkeypatch.setattr(cuda_decode, "load_flash_attention", FlashAttentionModule)
    monkeypatch.setattr(cuda_decode, "load_flashinfer", lambda modules: FlashInferModule())
    report = tmp_path / "decode.json"  # type: ignore[operator]
    options = [
        "--contexts",
        "200",
        "--batches",
        "1",
        "--retentions",
        "0.25",
        "--gib",
        "0.012",
        "--rounds",
        "1",
    ]
    monkeypatch.setattr(
        "sys.argv", ["cuda_decode.py", *options, "--budgets", "spread", "--json", str(report)]
    )
    cuda_decode.main()
    shown = capsys.readouterr().out
    assert "left out" not in shown
    written = cuda_decode.json.loads(report.read_text())
    (only,) = written["cases"]
    assert set(only["us"]) == {*decode_report.COLUMNS, "ours_host"}
    assert all(took > 0 for took in only["us"].values())
    assert only["relative_errors"]["fa3"] < 1e-2


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(peers.importlib, "import_module", absent)
    for name in ("fa3", "flashinfer"):
        monkeypatch.setattr(cuda_decode.sys, "argv", ["cuda_decode.py", "--peers", name])
        with pytest.raises(SystemExit, match=f"^{name}: "):
            cuda_decode.main()


def test_a_peer_without_its_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*what: object) -> None:
        raise RuntimeError("JIT compilation is disabled")

    flashinfer = SimpleNamespace(decode=SimpleNamespace(get_batch_decode_module=build))
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: flashinfer)
    monkeypatch.setattr(cuda_decode.sys, "argv", ["cuda_decode.py", "--peers", "flashinfer"])
    with pytest.raises(
        SystemExit, match=r"^flashinfer: no kernels: JIT compilation .*\n.*--flashinfer-modules$"
    ):
        cuda_decode.main()


def test_rows_of_the_bars_come_first() -> None:
    parser_defaults = {
        "budgets": ["spread", "model"],
        "contexts": [2048, 8192, 32768, 131072],
        "batches": [1, 8, 64, 256],
        "retentions": [1.0, 0.5, 0.25],
    }
    every = cuda_decode.settings(cuda_decode.argparse.Namespace(**parser_defaults))
    assert {(one.context, one.retention) for one in every[:4]} == {(32768, 0.25)}
    assert {one.batch for one in every[:4]} == {64, 8}
    assert len(every) == len(set(every)) == 4 * 4 * 3 + 4 * 4 * 2
    assert random.choice(every).lengths[0] > 0

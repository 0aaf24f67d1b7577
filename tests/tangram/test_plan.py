"""`tangram plan`: parameters as published, pools page by page, any configuration, words for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tangram.cli import main
from tangram.config import TangramConfig
from tangram.errors import ConfigError, UnsupportedError
from tangram.plan.cards import CARDS, GIB, card
from tangram.plan.facts import facts_of, parameters, read_facts
from tangram.plan.known import KNOWN
from tangram.plan.sizing import budget, length_that_fits, longest, make_plan, usable_bytes
from tangram.profile import build_geometry
from tests.tree import ROOT

PUBLISHED = {  # billions, as the models' cards say
    "Qwen/Qwen3-0.6B": 0.6,
    "Qwen/Qwen3-4B-Instruct-2507": 4.0,
    "Qwen/Qwen3-8B": 8.2,
    "Qwen/Qwen3-14B": 14.8,
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30.5,
    "Qwen/Qwen2.5-7B-Instruct": 7.6,
    "meta-llama/Llama-3.1-8B-Instruct": 8.0,
    "meta-llama/Llama-3.2-1B-Instruct": 1.2,
    "meta-llama/Llama-3.2-3B-Instruct": 3.2,
}
FOUR_B = "Qwen/Qwen3-4B-Instruct-2507"


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_the_models_publish(name: str) -> None:
    assert parameters(KNOWN[name]) / 1e9 == pytest.approx(PUBLISHED[name], abs=0.06)


def test_a_card_is_a_name_or_a_size() -> None:
    assert card("A100-80") is CARDS["a100-80"]
    assert card("24").memory_bytes == 24 * GIB
    for wrong in ("gtx", "0", "-3", "nan"):
        with pytest.raises(ConfigError, match="GiB of memory"):
            card(wrong)


@pytest.mark.parametrize("pool_mib", [0, 100, 1000, 12345])
def test_what_fits_is_counted_page_by_page(pool_mib: int) -> None:
    config = TangramConfig(retention=0.25)
    facts = read_facts(FOUR_B)
    geometry = build_geometry(config, facts.shape)
    pool = pool_mib << 20
    pages = max(0, pool // geometry.page_bytes - 1)  # vLLM keeps one back
    assert usable_bytes(geometry, pool) == pages * geometry.page_bytes
    fit = longest(geometry, pool, 262144)
    assert geometry.pages(fit) <= pages
    assert fit == 262144 or geometry.pages(fit + 1) > pages
    plan = make_plan(facts, config, pool, lengths=[4096])
    assert plan.longest == fit
    (at,) = plan.prediction.at
    one, idle = geometry.pages(4096), geometry.idle_pages(4096)
    assert at.conversations == (0 if pages < one else (pages - one) // idle + 1)
    assert plan.full[4096] == pages * geometry.page_bytes // geometry.full_bytes(4096)
    assert length_that_fits(facts, config, pool, 262144) == fit // 1024 * 1024


def test_memory_is_split_into_weights_working_memory_and_pool() -> None:
    facts = read_facts(FOUR_B)
    spent = budget(CARDS["a100-80"], facts)
    assert spent.pool == spent.usable - spent.weights - spent.working
    assert spent.weights == 2 * parameters(KNOWN[FOUR_B])
    assert budget(CARDS["a100-80"], facts, 0.5, 1 * GIB, 2 * GIB).pool == 40 * GIB - 3 * GIB
    with pytest.raises(ConfigError, match="utilization"):
        budget(CARDS["l4"], facts, 1.5)


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**KNOWN["Qwen/Qwen3-0.6B"], **changes}))
    return folder


def test_weights_of_a_directory_are_its_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    assert not read_facts(str(folder)).measured
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    facts = read_facts(str(folder))
    assert (facts.weight_bytes, facts.measured) == (1000, True)
    assert read_facts(str(folder / "config.json")).shape.layers == 28
    assert read_facts(str(folder), "float32").shape.itemsize == 4


@pytest.mark.parametrize(
    ("quantised", "bits"), [({"quant_method": "fp8"}, 8), ({"quant_method": "awq", "bits": 4}, 4)]
)
def test_quantised_weights(quantised: dict[str, Any], bits: float) -> None:
    config = KNOWN["Qwen/Qwen3-0.6B"]
    facts = facts_of({**config, "quantization_config": quantised}, "m")
    assert facts.weight_bytes == int(parameters(config) * bits / 8)
    with pytest.raises(ConfigError, match="--weights-gib: is needed"):
        facts_of({**config, "quantization_config": {"quant_method": "odd"}}, "m")


def test_sliding_windows_and_text_parts_of_a_configuration() -> None:
    types = ["sliding_attention", "full_attention"] * 14
    config = {**KNOWN["Qwen/Qwen3-0.6B"], "layer_types": types, "sliding_window": 512}
    shape = facts_of({"text_config": config, "model_type": "both"}, "m").shape
    assert (shape.layers, shape.window_layers, shape.window_span) == (14, 14, 512)
    assert facts_of({**config, "use_sliding_window": False}, "m").shape.window_layers == 0
    with pytest.raises(UnsupportedError, match="linear_attention"):
        facts_of({**config, "layer_types": ["linear_attention"] * 28}, "m")


def test_layers_that_only_the_model_s_code_knows_are_looked_up() -> None:
    gemma = {
        "model_type": "gemma2",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "sliding_window": 64,
        "tie_word_embeddings": True,
    }
    shape = facts_of(gemma, "m").shape
    assert (shape.layers, shape.window_layers) == (2, 2)


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="--model"):
        read_facts(str(tmp_path))


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--gpu", "a100-80", "--model", FOUR_B, "--retention", "0.25"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "A100 80 GB" in printed
    assert "262,144 tokens, fits" in printed
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"]
    assert f"{data['prediction']['conversations_at']['65536']:,}" in printed
    assert main(["plan", "--gpu", "l4", "--model", FOUR_B]) == 1
    assert "--max-model-len" in capsys.readouterr().out
    assert main(["plan", "--gpu", "8", "--model", FOUR_B]) == 1
    assert "does not fit this card" in capsys.readouterr().out
    assert main(["plan", "--gpu", "l4", "--model", "/no/such"]) == 2
    assert "MODEL" in capsys.readouterr().err


def test_two_cards_hold_the_weights_once_and_more_than_twice_the_conversations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, two = read_facts(FOUR_B), read_facts(FOUR_B, ranks=2)
    here, there = (budget(CARDS["a100-80"], facts) for facts in (one, two))
    assert there.pool == 2 * here.pool + here.weights
    assert make_plan(two, TangramConfig(), there.pool).prediction.geometry.ranks == 2
    assert main(["plan", "--gpu", "l4", "--model", FOUR_B]) == 1
    capsys.readouterr()
    command = ["plan", "--gpu", "l4", "--model", FOUR_B, "--tensor-parallel-size", "2", "--retention", "0.25"]
    assert main(command) == 0
    assert "2 x L4 24 GB" in capsys.readouterr().out
    assert main([*command, "--kv-cache-gib", "5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["gpus"], data["pool_bytes"]) == (2, 10 * GIB)
    assert main([*command[:5], "--tensor-parallel-size", "3"]) == 2
    assert "--tensor-parallel-size: must divide the 8 KV heads" in capsys.readouterr().err
    assert main(["plan", "--gpu", "8", "--model", "Qwen/Qwen3-32B", "--tensor-parallel-size", "2"]) == 1
    assert "does not fit these cards" in capsys.readouterr().out


def table() -> list[str]:
    """The rows of docs/sizing.md, worked out anew."""
    rows = []
    for name in ("l4", "a100-40", "a100-80", "h200"):
        for model in ("Qwen/Qwen3-0.6B", FOUR_B, "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"):
            facts = read_facts(model)
            pool = budget(CARDS[name], facts).pool
            cells = []
            for retention in (0.5, 0.25):
                plan = make_plan(
                    facts, TangramConfig(retention=retention, profile=None), pool, lengths=[16384]
                )
                cells.append(f"{plan.prediction.at[0].conversations:,}")
            longest_one = make_plan(facts, TangramConfig(retention=0.25, profile=None), pool).longest
            short = model.split("/")[1]
            rows.append(
                f"| {CARDS[name].title} | {short} | {pool / GIB:.1f} | {plan.full[16384]:,} | {cells[0]} | "
                f"{cells[1]} | {longest_one:,} |"
            )
    return rows


def test_the_table_of_the_document_is_what_the_formula_says() -> None:
    text = (ROOT / "docs" / "sizing.md").read_text()
    for row in table():
        assert row in text, row

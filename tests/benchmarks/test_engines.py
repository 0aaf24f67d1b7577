"""What a benchmark's engines are made of: the model, the profile, the plugin of a checkout."""

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engines
from tangram.config import TangramConfig
from tangram.profile import Profile


def test_the_profile_fits_the_model_and_its_heads_differ(tmp_path: Path) -> None:
    config = engines.write_model(tmp_path, tiny=False, positions=131072)
    assert json.loads((tmp_path / "config.json").read_text()) == config
    assert config["max_position_embeddings"] == 131072
    profile = Profile.load(
        tmp_path / "profile.json", config["num_hidden_layers"], config["num_key_value_heads"]
    )
    budgets = sorted(sum(profile.mean, ()))
    assert len(budgets) == 36 * 8
    assert sum(budgets) / len(budgets) == pytest.approx(0.25, abs=0.001)
    assert (budgets[0], budgets[-1]) == (0.04, 0.7)
    assert profile.mean[0] != profile.mean[1]


def test_bytes_of_a_token() -> None:
    assert engines.kv_bytes(engines.MODEL) == 147_456


def test_what_an_engines_cache_holds(tmp_path: Path) -> None:
    config = engines.write_model(tmp_path, tiny=False)
    profile = str(tmp_path / "profile.json")
    held = {name: engines.cache_of(name, config, profile, 16384)(9984) for name in engines.ENGINES}
    assert held["stock"] == 9984 * 147_456
    # Of 9984 tokens 19 chunks are sealed, and of the ring no more is held than the other 256 take.
    assert 1.0 <= held["tangram 1.0"] / held["stock"] < 1.01
    kept = (256 + 19 * 512 * 0.25) / 9984
    assert held["tangram 0.25"] / held["stock"] == pytest.approx(kept, rel=0.05)


def test_an_engines_name_may_go_on_with_settings(tmp_path: Path) -> None:
    assert engines.parts_of("tangram 0.25 chunk=256 scorer=snapkv") == (
        0.25,
        {"chunk": 256, "scorer": "snapkv"},
    )
    assert engines.parts_of("stock") == (None, {})
    for wrong in ("tangram", "tangram 0.3", "stock chunk=256", "tangram 0.25 chunk"):
        with pytest.raises(argparse.ArgumentTypeError, match="is none of stock"):
            engines.engine_name(wrong)
    config = engines.write_model(tmp_path, tiny=False)
    profile = str(tmp_path / "profile.json")
    short, usual = (
        engines.cache_of(name, config, profile, 16384)(640 + 9984)
        for name in ("tangram 1.0 chunk=256", "tangram 1.0")
    )
    assert short <= usual


def test_vllm_finds_the_plugin_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    first, *others = engines.environment(tmp_path)["PYTHONPATH"].split(":")
    assert others == [str(engines.ROOT), "elsewhere"]
    (found,) = importlib.metadata.distributions(path=[first])
    assert found.metadata["Name"] == "tangram-chat"
    points = {(p.group, p.name, p.value) for p in found.entry_points}
    assert ("vllm.general_plugins", "tangram", "tangram.plugin:register") in points


def test_an_installed_plugin_is_left_alone(tmp_path: Path) -> None:
    assert engines.environment(tmp_path)["PYTHONPATH"].split(":")[0] == str(engines.ROOT)


def test_the_plugin_is_told_its_retention_and_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_PLUGINS", "TANGRAM", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "before")
    options = engines.plugin_options(0.25, "heads.json", own_core=True)
    config = TangramConfig.from_additional_config(options["additional_config"])
    assert (config.retention, config.profile) == (0.25, "heads.json")
    assert engines.os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "before"
    assert engines.plugin_options(None) == {}
    assert engines.os.environ["VLLM_PLUGINS"] == ""
    assert engines.os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


CHILD = """
import json, sys
from pathlib import Path
job = json.loads(Path(sys.argv[2]).read_text())
print(json.dumps({"asked": job}), flush=True)
sys.exit(job["status"])
"""


def test_a_child_answers_and_its_failure_ends_the_benchmark(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    job: dict[str, Any] = {"engine": "stock", "status": 0, "tokens": list(range(100_000))}
    assert list(engines.child(str(script), job, tmp_path)) == [{"asked": job}]
    with pytest.raises(SystemExit, match="stock: the engine ended with 3"):
        list(engines.child(str(script), job | {"status": 3}, tmp_path))


def test_only_other_engines_figures_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert engines.earlier(path, True, "rows", ["stock"]) == []
    engines.write_json(path, "b", {"json": path, "seed": 1}, rows=[{"engine": "stock"}, {"engine": "other"}])
    assert json.loads(path.read_text())["arguments"] == {"seed": 1}
    assert engines.earlier(path, True, "rows", ["stock"]) == [{"engine": "other"}]
    assert engines.earlier(path, False, "rows", ["stock"]) == []


def test_where_two_answers_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(engines.ROOT / "benchmarks"))
    import gpu_identity

    one = {"tokens": [1, 2, 3], "likely": [{"1": -0.1}, {"2": -0.5, "7": -0.75}, {"3": -1.0}]}
    two = {"tokens": [1, 7, 3], "likely": [{"1": -0.1}, {"2": -0.6, "7": -0.5}, {"3": -1.0}]}
    assert gpu_identity.parting(one, one) is None
    place = gpu_identity.parting(one, two)
    assert place["position"] == 1
    assert place["tokens"] == [2, 7]
    assert place["preferences"] == pytest.approx([0.25, 0.1])
    assert place["gap"] == pytest.approx(0.25)
    two["likely"][1] = {"7": -0.5}
    assert gpu_identity.parting(one, two)["gap"] is None
    openings, follow_ups = gpu_identity.drawn(13)
    assert (openings, follow_ups) == gpu_identity.drawn(13), "both engines are asked the same"
    assert (len(openings), len(follow_ups)) == (13, len(gpu_identity.QUESTIONS))
    assert min(map(len, openings)) < 32
    assert max(map(len, openings)) > 640 + 3 * 512, "beyond several seal boundaries"
    assert all(
        0 < token < gpu_identity.RANDOM["vocab_size"] for ids in openings + follow_ups for token in ids
    )
    sys.modules.pop("gpu_identity")


def test_only_engines_of_the_plugin_run_once_for_each_way_to_launch() -> None:
    both = ["stock", "tangram 0.25"]
    assert engines.launched(both, [None]) == [("stock", None), ("tangram 0.25", None)]
    ways = [("stock", None), ("tangram 0.25", "separate"), ("tangram 0.25", "fused")]
    assert engines.launched(both, ["separate", "fused"]) == ways

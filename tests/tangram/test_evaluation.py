"""Profiles tried on a model: the passages, the figures against transformers' own attention, and the words."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tangram.calibration import evaluation, room
from tangram.calibration.evaluation import BLOCK, evaluate
from tangram.calibration.framing import Frame, frame_of
from tangram.calibration.passages import SCORED, hash_of, passages
from tangram.calibration.statistics import sign_test
from tangram.calibration.verdict import Figures, difference, sentences
from tangram.cli import main
from tangram.config import TangramConfig
from tangram.errors import ConfigError, ProfileError
from tangram.identity import config_fingerprint, weights_fingerprint
from tangram.profile import Profile
from tests.tangram.calibrated import IDENTITY, made_profile, mean_queries_of, random_model
from tests.tiny_models import random_llama

SMALL = TangramConfig(chunk=128, window=32, rewind=32, retention=0.25, group_size=2, profile=None)


@pytest.fixture(scope="module")
def llama(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama"), bundled_model_dir)


@pytest.fixture(scope="module")
def frame(bundled_model_dir: Path) -> Frame:
    from transformers import AutoTokenizer

    return frame_of(AutoTokenizer.from_pretrained(bundled_model_dir))


@pytest.fixture
def uneven(tmp_path: Path) -> str:
    """A profile of three layers of two heads, written by hand."""
    mean = ((0.9, 0.1), (0.2, 0.7), (0.5, 0.05))
    Profile(mean, ((0.0, 0.0),) * 3).save(tmp_path / "uneven.json")
    return str(tmp_path / "uneven.json")


def test_all_facts_are_sealed_when_they_are_asked_about(frame: Frame) -> None:
    config = TangramConfig()
    every = passages(frame, config, 8192, 4, 6)
    assert hash_of(every) == hash_of(passages(frame, config, 8192, 4, 6)), "the same every time"
    for one in every:
        assert len(one.tokens) == one.first + SCORED
        assert one.first == 2 * config.chunk + config.window
        text = frame.tokenizer.decode(one.tokens[: 2 * config.chunk])
        places = []
        for asked in one.asked:
            question, answer = (frame.tokenizer.decode(ids) for ids in (asked.prompt, asked.answer))
            said = question.rpartition("\n")[2] + answer + "."
            assert text.count(said) == 1
            places.append(text.index(said))
        assert max(places) - min(places) > len(text) / 3, "spread over the text"
    assert len({asked.answer for one in every for asked in one.asked}) == 24


def test_a_shorter_model_reads_one_chunk_and_a_tiny_one_none(frame: Frame) -> None:
    (one,) = passages(frame, TangramConfig(), 1200, 1, 6)
    assert one.first == 512 + 128
    with pytest.raises(ConfigError, match="holds 900 tokens; trying a profile takes 928"):
        passages(frame, TangramConfig(), 900, 1, 6)


def plainly(folder: Path, frame: Frame, config: TangramConfig) -> tuple[float, list[float]]:
    """Loss of the text and of each answer by transformers itself, nothing left out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def losses(tokens: list[int], first: int) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0]
        targets = torch.tensor(tokens[first:])
        return torch.nn.functional.cross_entropy(logits[first - 1 : -1], targets, reduction="none")

    (one,) = passages(frame, config, 2048, 1, 2)
    whole = list(one.tokens)
    answers = [
        float(losses([*whole, *asked.prompt, *asked.answer], len(whole) + len(asked.prompt)).sum())
        for asked in one.asked
    ]
    return float(losses(whole, one.first).mean()), answers


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_with_everything_kept_the_figures_are_the_model_s(
    kind: str, llama: Path, frame: Frame, bundled_model_dir: Path, tmp_path: Path
) -> None:
    folder = llama if kind == "llama" else random_model(kind, tmp_path / kind, bundled_model_dir)
    seen: list[int] = []
    found = evaluate(
        str(folder), ["none"], SMALL, on_progress=lambda now: seen.append(now.done), count=1, facts=2
    )
    text, answers = plainly(folder, frame, SMALL)  # Gemma bends its logits, and has windows
    everything, (even,) = found["everything"], found["profiles"]
    assert everything["text_loss"] == pytest.approx(text, rel=1e-4)
    assert everything["answer_loss"] == pytest.approx(sum(answers) / 2, rel=1e-4)
    assert even["text_loss"] != pytest.approx(text, rel=1e-3), "less is kept"
    assert (everything["right"], everything["asked"]) == (0, 2), "it answers at random"
    assert seen == [0, 1, 2]
    assert found["difference"] is None
    assert found["settings"]["retention"] == 0.25
    assert found["model"]["weights_hash"]


def test_two_profiles_are_compared_and_kept(
    llama: Path,
    uneven: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "evaluate", partial(evaluate, count=2, facts=2))
    out = tmp_path / "found.json"
    settings = json.dumps(SMALL.to_dict() | {"scope": "uniform", "profile": "gone.json"})
    words = ["evaluate", uneven, "none", "--model", str(llama), "--settings", settings]
    assert main([*words, "--out", str(out), "--progress", "json"]) == 0
    shown = capsys.readouterr()
    progress = [json.loads(line.split(" ", 1)[1]) for line in shown.err.splitlines() if "progress" in line]
    assert progress[0] == {"done": 0, "total": 6}
    assert progress[-1] == {"done": 6, "total": 6}
    assert all(a["done"] < b["done"] for a, b in pairwise(progress))
    found = json.loads(out.read_text())
    first, second = found["profiles"]
    assert (first["profile"], second["profile"], second["file_hash"]) == ("uneven.json", "none", None)
    assert len(first["file_hash"]) == 16
    assert first["text_loss"] != second["text_loss"]
    mean = first["text_loss"] - second["text_loss"]
    assert found["difference"]["text_loss"]["mean"] == pytest.approx(mean)
    assert "This model cannot answer the probe even with everything kept (0 of 4)" in shown.out
    assert "uneven.json" in shown.out


def test_the_scorer_of_each_profile_is_named_where_profiles_choose(
    llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoConfig

    identity = replace(
        IDENTITY,
        layers=3,
        kv_heads=2,
        head_size=32,
        config_hash=config_fingerprint(AutoConfig.from_pretrained(llama).get_text_config()),
        weights_hash=weights_fingerprint(str(llama)),
    )
    plain = made_profile(identity=identity)
    plain.save(tmp_path / "plain.json")
    mean_queries_of(plain).save(tmp_path / "asked.json")
    monkeypatch.setattr(evaluation, "evaluate", partial(evaluate, count=1, facts=1))

    def found(*profiles: str, **settings: str) -> tuple[list[dict[str, Any]], list[str]]:
        files = [str(tmp_path / name) if name.endswith(".json") else name for name in profiles]
        out = tmp_path / "found.json"
        words = ["--model", str(llama), "--settings", json.dumps(SMALL.to_dict() | settings)]
        assert main(["evaluate", *files, *words, "--out", str(out)]) == 0
        result = json.loads(out.read_text())
        assert result["settings"]["scorer"] == settings.get("scorer", "auto")
        lines = capsys.readouterr().out.splitlines()
        differ = len({one["scorer"] for one in result["profiles"]}) > 1
        assert any("compares budgets alone" in line for line in lines) is differ
        return result["profiles"], [line.split()[-1] for line in lines[: len(profiles) + 2]]

    (asked, without), last = found("asked.json", "plain.json")
    assert (asked["scorer"], without["scorer"]) == ("keyvalue_query", "keyvalue")
    assert last == ["scorer", "-", "keyvalue_query", "keyvalue"]
    assert asked["text_loss"] != without["text_loss"], "the budgets are the same"
    monkeypatch.setattr(evaluation.shipped, "find", lambda model: SimpleNamespace(file="asked.json"))
    monkeypatch.setattr(evaluation.shipped, "folder", lambda: tmp_path)
    (of_release,), _ = found("auto")
    assert (of_release["profile"], of_release["scorer"]) == ("asked.json", "keyvalue_query")
    (same, even), last = found("asked.json", "none", scorer="keyvalue")
    assert same["scorer"] == even["scorer"] == "keyvalue"
    assert last == ["scorer", "-", "keyvalue", "keyvalue"]
    assert same["text_loss"] == without["text_loss"]


def test_a_scorer_that_lacks_something_is_refused_before_anything_is_read(llama: Path, uneven: str) -> None:
    read: list[object] = []
    asking = replace(SMALL, scorer="keyvalue_query")
    with pytest.raises(ProfileError, match="has none: name one"):
        evaluate(str(llama), [uneven, "none"], asking, on_progress=read.append, count=1, facts=1)
    assert read == []


def test_what_cannot_be_evaluated_is_refused_in_a_line(
    llama: Path, uneven: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, says in (
        ([uneven, uneven, uneven], "at most two"),
        ([uneven, "--retention", "2"], "--retention: must be above 0"),
        (["missing.json"], "missing.json cannot be read"),
        (["auto"], "the release has no profile for the weights of"),
        ([uneven, "--settings", '{"colour": 1}'], "--colour: is no setting"),
    ):
        assert main(["evaluate", "--model", str(llama), *words]) != 0
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["evaluate", "--model", str(llama), uneven, "--settings", "[]"])
    assert "must be a JSON object" in capsys.readouterr().err


def test_memory_decides_the_type_and_refuses_what_does_not_fit(
    bundled_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, size = str(bundled_model_dir), (bundled_model_dir / "model.safetensors").stat().st_size
    for free, expected in (
        (2 * size + room.BESIDE, "float32"),
        (size + room.BESIDE, "bfloat16"),
    ):
        monkeypatch.setattr(room, "available_memory", lambda free=free: int(free / room.SPARE) + 1)
        assert room.compute_type(model, "cpu", "auto") == expected
    with pytest.raises(ConfigError, match=r"needs about 1\.5 GiB of memory"):
        room.compute_type(model, "cpu", "float32")
    monkeypatch.setattr(room, "available_memory", lambda: room.BESIDE)
    with pytest.raises(ConfigError, match="free some"):
        room.compute_type(model, "cpu", "auto")
    assert room.compute_type(model, "cuda", "auto") == "auto", "the GPU's memory is not ours to count"


def figures(right: str, answers: float, block: float) -> Figures:
    told = tuple(one == "x" for one in right)
    return Figures(told, tuple(answers + 0.01 * n for n in range(len(told))), (block, block + 0.1))


def found_of(first: Figures, second: Figures, whole: Figures) -> dict[str, Any]:
    return {"everything": whole.to_dict(), "difference": difference(first, second)}


def test_what_may_be_said() -> None:
    whole = figures("xxxxxxxx", 1.0, 2.0)
    better, worse = figures("xxxxxxx.", 1.0, 2.0), figures(".......x", 3.0, 2.0)
    said = sentences(found_of(better, worse, whole), "new", "old")
    assert said[0] == "No difference can be told from 8 answers.", "7 against 1 happens by chance in 7%"
    none = figures("........", 3.0, 2.0)
    said = sentences(found_of(whole, none, whole), "new", "old")
    assert said[0] == (
        "More answers are right with new: 8 that the other misses, 0 the other way round, of 8."
    )
    assert "-2.000 nats an answer with new" in said[1]
    assert said[1].endswith("lower with new.")
    assert said[2].endswith("no difference can be told.")
    mute = figures("........", 9.0, 2.0)
    said = sentences(found_of(mute, mute, mute), "new", "old")
    assert said[0].startswith("This model cannot answer the probe even with everything kept (0 of 8)")
    assert all(one.endswith("no difference can be told.") for one in said[1:])


def test_the_sign_test_is_exact() -> None:
    assert [sign_test(*pair) for pair in ((0, 0), (3, 3), (6, 0), (5, 1))] == [1.0, 1.0, 0.03125, 0.21875]
    assert SCORED % BLOCK == 0

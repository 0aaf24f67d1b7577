"""A calibration as a whole: samples, what is kept when it is stopped, and the profile at the end."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tangram import cli
from tangram.calibration import conversations, job
from tangram.calibration.framing import frame_of
from tangram.calibration.job import Progress, Stopped, calibrate, state_path
from tangram.calibration.kinds import KINDS
from tangram.calibration.model import Reader, load
from tangram.calibration.oracle import LastQueries
from tangram.calibration.samples import builtin, builtin_text, hash_of
from tangram.calibration.settings import Settings
from tangram.calibration.state import Found, State
from tangram.errors import ConfigError
from tangram.profile import Profile
from tests.tiny_models import random_llama


@pytest.fixture(scope="module")
def folder(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("job"), bundled_model_dir)


@pytest.fixture(autouse=True)
def one_load(folder: Path, monkeypatch: pytest.MonkeyPatch, loaded: dict[str, Reader]) -> None:
    """The model is loaded once for all tests."""

    def load_once(model: str, device: str, dtype: str) -> Reader:
        if model not in loaded:
            loaded[model] = load(model, device, dtype)
        return loaded[model]

    monkeypatch.setattr(job, "load", load_once)


@pytest.fixture(scope="module")
def loaded() -> dict[str, Reader]:
    return {}


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the samples that a model really read."""
    read: list[str] = []
    needs_of = job._needs_of

    def count(settings: Any, reader: Any, frame: Any, sample: Any) -> Any:
        read.append(sample.kind)
        return needs_of(settings, reader, frame, sample)

    monkeypatch.setattr(job, "_needs_of", count)
    return read


def settings_of(folder: Path, **changed: Any) -> Settings:
    return Settings(str(folder), 0.25, samples=3, length=640, device="cpu", **changed)


def test_a_profile_holds_what_the_samples_needed(folder: Path, tmp_path: Path) -> None:
    told: list[Progress] = []
    out = tmp_path / "new" / "p.json"
    profile = calibrate(settings_of(folder), out, told.append)
    assert told == [Progress(1, 3, "prose"), Progress(2, 3, "dialogue"), Progress(3, 3, "code")]
    assert Profile.load(out, 3, 2) == profile
    known = profile.calibration
    assert known is not None
    needs = np.array(known.needs)
    assert needs.shape == (3, 3, 2)
    np.testing.assert_allclose(needs.mean(axis=(1, 2)), 0.25, atol=1e-3)
    np.testing.assert_allclose(profile.mean, needs.mean(axis=0))
    np.testing.assert_allclose(profile.std, needs.std(axis=0, ddof=1))
    np.testing.assert_allclose(known.least, needs.min(axis=0))
    np.testing.assert_allclose(known.most, needs.max(axis=0))
    assert known.model.name == folder.name
    assert known.model.weights_hash is not None
    assert not state_path(out).exists()
    assert known.settings["oracle"] == "kvzip"


def test_the_same_command_gives_the_same_profile(folder: Path, tmp_path: Path) -> None:
    files = []
    for name in ("a.json", "b.json"):
        calibrate(settings_of(folder, oracle="keydiff"), tmp_path / name)
        files.append(json.loads((tmp_path / name).read_text()))
        del files[-1]["calibration"]["created"], files[-1]["checksum"]
    assert files[0] == files[1]
    other = calibrate(settings_of(folder, oracle="keydiff", seed=1), tmp_path / "c.json")
    assert other.calibration is not None
    assert other.calibration.samples_hash != files[0]["calibration"]["samples_hash"]


def test_several_retentions_are_each_as_if_alone(folder: Path, tmp_path: Path, judged: list[str]) -> None:
    both = calibrate(settings_of(folder, others=(0.5,)), tmp_path / "both.json")
    assert len(judged) == 3, "samples are read once"
    for retention in (0.25, 0.5):
        alone = calibrate(replace(settings_of(folder), retention=retention), tmp_path / "one.json")
        assert (both.at(retention).mean, both.at(retention).std) == (alone.mean, alone.std)


def test_needs_by_keys_are_those_of_the_chunks_the_engine_seals(folder: Path, tmp_path: Path) -> None:
    settings = replace(settings_of(folder), length=1200, samples=1, oracle="snapkv")
    known = calibrate(settings, tmp_path / "p.json").calibration
    assert known is not None
    assert known.key_needs is not None
    reader = load(str(folder), "cpu")
    frame = frame_of(reader.tokenizer)
    (sample,) = job.choose(settings, reader, frame)
    cache = reader.new_cache()
    reader.read([*frame.before, *sample.tokens], cache, LastQueries((), 1))
    found = []
    for start in (0, 512):
        keys = torch.cat([cache.layers[layer].keys[0, :, start : start + 512] for layer in range(3)])
        units = torch.nn.functional.normalize(keys, dim=-1)
        anchor = torch.nn.functional.normalize(units.mean(dim=1, keepdim=True), dim=-1)
        scores = -(units * anchor).sum(dim=-1)
        best = scores.flatten().topk(6 * 512 // 2).indices // 512
        found.append(torch.bincount(best, minlength=6) / 512)
    expected = torch.stack(found).mean(dim=0).reshape(3, 2)
    np.testing.assert_allclose(known.key_needs.needs[0], expected, atol=2e-3)


@pytest.mark.parametrize(("oracle", "read"), [("kvzip", None), ("snapkv", 640)])
def test_mean_queries_are_those_of_the_model_without_rotation(
    folder: Path, tmp_path: Path, oracle: str, read: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers' own projections, of the text alone (a scorer reads up to the last boundary): what
    is asked while it is repeated does not count, nor how it was cut into steps."""
    monkeypatch.setattr("tangram.calibration.model.READ_STEP", 300)
    known = calibrate(replace(settings_of(folder), samples=2, oracle=oracle), tmp_path / "p.json").calibration
    assert known is not None
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).model
    reader = load(str(folder), "cpu")
    frame, found = frame_of(reader.tokenizer), []
    for sample in job.choose(replace(settings_of(folder), samples=2), reader, frame):
        ids = torch.tensor([[*frame.before, *sample.tokens][:read]])
        with torch.inference_mode():
            states = model(ids, output_hidden_states=True).hidden_states
            asked = [
                layer.self_attn.q_proj(layer.input_layernorm(state))[0].mean(dim=0)
                for layer, state in zip(model.layers, states, strict=False)
            ]
        size = reader.identity.head_size
        found.append(torch.stack(asked).view(3, 2, -1, size).mean(dim=2))
    expected = torch.stack(found).mean(dim=0)
    np.testing.assert_allclose(known.mean_queries, expected, rtol=2e-3, atol=1e-4)


CONVERSATIONS = [json.dumps({"text": builtin_text(4, number, 9000)[1]}) for number in range(3)]


def test_conversations_come_from_the_product(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [*CONVERSATIONS, json.dumps({"text": "too short"})]
    script = f"import sys; sys.stdout.write({chr(10).join(lines)!r})"
    monkeypatch.setattr(conversations, "COMMAND", (sys.executable, "-c", script))
    said, told = list[str](), list[Progress]()
    settings = settings_of(folder, data="conversations", oracle="keydiff")
    profile = calibrate(replace(settings, samples=9), tmp_path / "p.json", told.append, said.append)
    assert said == ["conversations has 3 samples, all are used"]
    assert {progress.kind for progress in told} == {"conversations"}
    assert profile.calibration is not None
    assert profile.calibration.settings["data"] == "conversations"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("", "nobody has allowed their conversations to be used"),
        ("print()", "nobody has allowed their conversations to be used"),
        ("""print('{"text": "short"}')""", "no conversation is long enough: at least 640 tokens"),
        ("import sys; sys.exit('no module named app')", "cannot be read: no module named app"),
    ],
)
def test_without_conversations_it_says_why(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    monkeypatch.setattr(conversations, "COMMAND", (sys.executable, "-c", script))
    with pytest.raises(ConfigError, match=r"^data: ") as error:
        calibrate(settings_of(folder, data="conversations"), tmp_path / "p.json")
    assert says in str(error.value)


def stop_after(count: int) -> Callable[[], bool]:
    asked = iter(range(1000))
    return lambda: next(asked) >= count


def test_a_stopped_calibration_goes_on(folder: Path, tmp_path: Path, judged: list[str]) -> None:
    settings, out, said = settings_of(folder), tmp_path / "p.json", list[str]()
    whole = calibrate(settings, tmp_path / "whole.json")
    judged.clear()
    with pytest.raises(Stopped):
        calibrate(settings, out, stop=stop_after(2))
    assert judged == ["prose", "dialogue"]
    assert not out.exists()
    judged.clear()
    resumed = calibrate(settings, out, say=said.append)
    assert judged == ["code"]
    assert said == ["going on: 2 of 3 samples were done before"]
    assert (resumed.mean, resumed.std) == (whole.mean, whole.std)


def test_a_line_that_was_cut_off_is_read_again(folder: Path, tmp_path: Path, judged: list[str]) -> None:
    settings, out = settings_of(folder), tmp_path / "p.json"
    with pytest.raises(Stopped):
        calibrate(settings, out, stop=stop_after(2))
    state = state_path(out)
    state.write_text(state.read_text()[:-20])
    judged.clear()
    calibrate(settings, out)
    assert judged == ["dialogue", "code"]


@pytest.mark.parametrize("changed", [{"retention": 0.5}, {"scope": "layer"}, {"oracle": "keydiff"}])
def test_other_settings_start_anew_and_say_so(
    folder: Path, tmp_path: Path, judged: list[str], changed: dict[str, Any]
) -> None:
    settings, out, said = settings_of(folder), tmp_path / "p.json", list[str]()
    with pytest.raises(Stopped):
        calibrate(settings, out, stop=stop_after(1))
    judged.clear()
    calibrate(replace(settings, **changed), out, say=said.append)
    assert len(judged) == 3
    (name,) = changed
    state = state_path(out)
    assert said == [
        f"{state} was made with other settings ({name}): starting anew, it is kept as {state}.old"
    ]
    assert '"sample"' in Path(f"{state}.old").read_text()


def test_more_samples_go_on_where_fewer_ended(folder: Path, tmp_path: Path, judged: list[str]) -> None:
    settings, out = settings_of(folder), tmp_path / "p.json"
    with pytest.raises(Stopped):
        calibrate(settings, out, stop=stop_after(2))
    judged.clear()
    calibrate(replace(settings, samples=4), out)
    assert judged == ["code", "tables"]


@pytest.mark.parametrize("content", ["", "{", "[]\n", "null\n", '{"a": 1}\n[3]\n'])
def test_a_damaged_state_starts_anew(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s"
    path.write_text(content)
    state, why = State.open(path, {"a": 1})
    assert (state.found, why) == ({}, f"{path} is damaged: starting anew, it is kept as {path}.old")
    found = Found([[[0.5]], [[0.25]]], [[0.4]])
    state.add("k", found)
    assert State.open(path, {"a": 1})[0].found == {"k": found}


def words(text: str) -> list[int]:
    """A tokenizer that takes the words apart."""
    return [zlib.crc32(word.encode()) % 50000 for word in text.split()]


def test_built_in_samples_are_varied_and_long_enough() -> None:
    samples = builtin(words, 10, 3000, seed=0)
    assert [sample.kind for sample in samples] == list(KINDS) * 2
    assert {len(sample.tokens) for sample in samples} == {3000}
    assert len({sample.key for sample in samples}) == 10
    assert samples == builtin(words, 10, 3000, seed=0)
    assert hash_of(samples) != hash_of(builtin(words, 10, 3000, seed=1))


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_every_text_is_whole(kind: int) -> None:
    for number in range(kind, 50, len(KINDS)):
        found, text = builtin_text(3, number, 20000)
        assert len(text) >= 20000
        if found != "code":
            assert "{" not in text, "a place that nobody filled"
    assert builtin_text(3, kind, 5000)[1] in builtin_text(3, kind, 20000)[1], "longer ones begin alike"


def test_one_s_own_texts(folder: Path, tmp_path: Path) -> None:
    data, said = tmp_path / "d.jsonl", list[str]()
    data.write_text("".join(json.dumps({"text": builtin_text(9, n, 6000)[1]}) + "\n\n" for n in range(2)))
    profile = calibrate(settings_of(folder, data=str(data)), tmp_path / "p.json", say=said.append)
    assert said == [f"{data} has 2 samples, all are used"]
    assert profile.calibration is not None
    assert (profile.calibration.samples, profile.calibration.settings["data"]) == (2, "d.jsonl")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty: one JSON object with a 'text' a line"),
        (b"\n \n", "is empty"),
        (b'{"text": "a"}\n{"text": \n', "line 2: this is not JSON"),
        (b'{"text": "a"}\n\n["text"]\n', "line 3: an object with a 'text'"),
        (b'{"text": 7}\n', "line 1: an object with a 'text'"),
        (b'{"text": " "}\n', "line 1: an object with a 'text'"),
        (b'{"text": "short"}\n', "line 1: the text has 1 tokens, at least 640"),
        (b"\xff\xfe\n", "is not UTF-8 text"),
    ],
)
def test_files_that_are_wrong_are_refused(
    folder: Path, tmp_path: Path, content: bytes | None, says: str
) -> None:
    data = tmp_path / "d.jsonl"
    if content is not None:
        data.write_bytes(content)
    with pytest.raises(ConfigError, match=r"data: .*d\.jsonl") as error:
        calibrate(settings_of(folder, data=str(data)), tmp_path / "p.json")
    assert says in str(error.value)


def test_a_text_longer_than_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"length: must be at most \d+, not 2000: .* holds 2048 tokens"):
        calibrate(replace(settings_of(folder), length=2000), tmp_path / "p.json")
    calibrate(replace(settings_of(folder), length=2000, oracle="keydiff", samples=1), tmp_path / "p.json")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"retention": 1.0}, "retention: must be above 0 and below 1, not 1"),
        ({"retention": float("nan")}, "retention: must be"),
        ({"others": (0.5, 1.5)}, "retention: must be above 0 and below 1, not 1.5"),
        ({"others": (0.25,)}, "retention: names a share twice"),
        ({"samples": 0}, "samples: must be at least 1"),
        ({"oracle": "tova"}, "oracle: must be one of kvzip"),
        ({"scope": "uniform"}, "scope: must be one of model, layer"),
        ({"alpha": -1.0}, "alpha: must be from 0 to 10"),
        ({"length": 100}, "length: must be at least 640"),
    ],
)
def test_settings_that_cannot_work(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        replace(Settings("m", 0.25), **changed)
    assert says in str(error.value)


def command(folder: Path, out: Path, *more: str) -> list[str]:
    options = ["--model", str(folder), "--retention", "0.25", "--out", str(out), "--device", "cpu"]
    return ["calibrate", *options, "--samples", "1", "--length", "640", *more]


def test_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.json"
    assert cli.main(command(folder, out, "--oracle", "keydiff")) == 0
    told = capsys.readouterr()
    assert "sample 1 of 1 (prose)" in told.err
    assert f"{out}: 3 layers x 2 KV heads" in told.out
    assert cli.main(["profile", "check", str(out), "--model", str(folder)]) == 0
    assert capsys.readouterr().out == f"{out}: 1 samples are few: spread and coverage are uncertain\n"
    assert cli.main(command(tmp_path / "none", out)) == 2
    assert "tangram: error: MODEL: there is no directory" in capsys.readouterr().err
    assert cli.main(command(folder, out, "--samples", "0")) == 2
    assert "tangram: error: --samples: must be at least 1, not 0\n" in capsys.readouterr().err
    assert cli.main(command(folder, out, "--tensor-parallel-size", "2")) == 2
    assert "is no option of tangram calibrate" in capsys.readouterr().err
    assert cli.main(command(folder, tmp_path)) == 2
    assert "is a directory" in capsys.readouterr().err
    for wrong, says in (
        ("--oracle=h2o", "invalid choice: 'h2o'"),
        ("--retention=half", "must be a share such"),
    ):
        with pytest.raises(SystemExit):
            cli.main(command(folder, out, wrong))
        assert says in capsys.readouterr().err


def test_programs_get_lines_of_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--oracle", "keydiff", "--samples", "2", "--progress", "json", "--retention", "0.5,0.25"]
    assert cli.main(command(folder, tmp_path / "p.json", *more)) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tangram-progress ")]
    told = [json.loads(line.removeprefix("tangram-progress ")) for line in lines]
    assert told == [
        {"done": 1, "total": 2, "kind": "prose", "new": True},
        {"done": 2, "total": 2, "kind": "dialogue", "new": True},
    ]


def test_a_terminal_gets_a_bar(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(command(folder, tmp_path / "p.json", "--oracle", "keydiff", "--samples", "2")) == 0
    told = capsys.readouterr().err
    assert "tangram calibrate: 100%" in told
    assert "2/2" in told
    assert "sample 2 of 2" not in told


def test_ctrl_c_keeps_what_was_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_of, out = job._needs_of, tmp_path / "p.json"

    def interrupted(*given: Any) -> Any:
        if given[-1].kind == "dialogue":
            raise KeyboardInterrupt
        return needs_of(*given)

    monkeypatch.setattr(job, "_needs_of", interrupted)
    assert cli.main(command(folder, out, "--samples", "2")) == 130
    assert f"what was found is in {state_path(out)}, and the same command goes on" in capsys.readouterr().err
    monkeypatch.setattr(job, "_needs_of", needs_of)
    assert cli.main(command(folder, out, "--samples", "2")) == 0
    assert "going on: 1 of 2 samples were done before" in capsys.readouterr().err

"""``tangram profile add-queries``: what it adds is what a calibration notes, and nothing else changes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, CohereConfig, CohereForCausalLM

from tangram import cli
from tangram.calibration import completion
from tangram.calibration.attention import Watcher
from tangram.calibration.completion import Wanted, add_queries
from tangram.calibration.job import Progress, calibrate
from tangram.calibration.model import Reader, load
from tangram.calibration.samples import builtin_text
from tangram.calibration.settings import Settings
from tangram.config import TangramConfig
from tangram.errors import ConfigError, ProfileError, UnsupportedError
from tangram.identity import config_fingerprint, weights_fingerprint
from tangram.profile import ModelShape, Profile, in_force, load_profile_file
from tests.tangram.calibrated import TOKENIZER_FILES, random_model
from tests.tiny_models import LLAMA, random_llama, write_config

SAMPLES, LENGTH = 3, 1300


@pytest.fixture(scope="module")
def folder(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("queries"), bundled_model_dir)


def settings_of(folder: Path, **changed: Any) -> Settings:
    return replace(Settings(str(folder), 0.25, samples=SAMPLES, length=LENGTH, device="cpu"), **changed)


def without(profile: Profile) -> Profile:
    """As an earlier release would have calibrated it."""
    assert profile.calibration is not None
    return replace(profile, calibration=replace(profile.calibration, mean_queries=None))


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """A calibration of this release."""
    settings = settings_of(folder, oracle="keydiff", seed=5, others=(0.5,))
    return calibrate(settings, tmp_path_factory.mktemp("whole") / "p.json")


@pytest.fixture
def path(whole: Profile, tmp_path: Path) -> Path:
    without(whole).save(tmp_path / "p.json")
    return tmp_path / "p.json"


def entries(path: Path) -> dict[str, Any]:
    """What a file holds, but for the mean queries, where they come from, and the checksum."""
    data: dict[str, Any] = json.loads(path.read_text())
    del data["checksum"]
    for name in ("mean_queries", "queries_from"):
        data["calibration"].pop(name, None)
    return data


@pytest.mark.parametrize("oracle", ["kvzip", "snapkv"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_mean_queries_are_those_that_a_calibration_notes(
    bundled_model_dir: Path, tmp_path: Path, oracle: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last digit: also of a model with sliding windows, and by an oracle that reads up to the last
    boundary only."""
    monkeypatch.setattr("tangram.calibration.model.READ_STEP", 300)
    folder = tmp_path / "m"
    make = random_llama if kind == "llama" else lambda *given: random_model("gemma2", *given)
    make(folder, bundled_model_dir)
    length = 900 if oracle == "kvzip" else LENGTH  # the model has to hold what asks it to repeat, too
    full = calibrate(settings_of(folder, oracle=oracle, seed=2, length=length), tmp_path / "full.json")
    path = tmp_path / "p.json"
    without(full).save(path)
    before = entries(path)
    completed = add_queries(path, path, Wanted(str(folder), device="cpu"))
    assert completed.mean_queries() == full.mean_queries()
    assert load_profile_file(path) == completed
    assert entries(path) == before
    known = completed.calibration
    assert known is not None
    origin = known.queries_from
    assert origin is not None
    assert (origin.samples, origin.samples_hash) == (SAMPLES, known.samples_hash)
    assert (origin.data, origin.length, origin.seed, origin.dtype) == ("builtin", length, 2, "float32")


def test_each_text_is_read_once(folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, steps = Reader.read, list[tuple[int, bool]]()

    def count(reader: Reader, tokens: Any, cache: Any, watcher: Watcher, ends: Any = ()) -> None:
        steps.append((len(tokens), watcher.wants_weights))
        read(reader, tokens, cache, watcher, ends)

    monkeypatch.setattr(Reader, "read", count)
    told: list[Progress] = []
    add_queries(path, path, Wanted(str(folder), samples=2), told.append)
    assert steps == [(1152, False)] * 2, "up to the last boundary, no weights"
    assert told == [Progress(1, 2, "prose"), Progress(2, 2, "dialogue")]


def test_one_s_own_texts_and_other_numbers_of_them(
    folder: Path, path: Path, whole: Profile, tmp_path: Path
) -> None:
    data, said = tmp_path / "d.jsonl", list[str]()
    data.write_text("".join(json.dumps({"text": builtin_text(9, n, 9000)[1]}) + "\n" for n in range(3)))
    wanted = Wanted(str(folder), data=str(data), samples=7)
    found = add_queries(path, tmp_path / "q.json", wanted, say=said.append)
    assert said == [
        f"{data} has 3 samples, all are used",
        f"these are not the texts that {path} was calibrated with",
    ]
    settings = settings_of(folder, oracle="keydiff", seed=5, data=str(data))
    full = calibrate(settings, tmp_path / "full.json")
    assert found.mean_queries() == full.mean_queries() != whole.mean_queries()
    assert found.calibration is not None
    assert found.calibration.queries_from is not None
    assert found.calibration.queries_from.data == "d.jsonl"

    without(full).save(path)
    with pytest.raises(ConfigError, match=r"data: must be given: .* calibrated with d\.jsonl; builtin reads"):
        add_queries(path, path, Wanted(str(folder)))
    said.clear()
    found = add_queries(path, path, Wanted(str(folder), data=str(data)), say=said.append)
    assert (said, found.mean_queries()) == ([], full.mean_queries())


def test_texts_that_are_not_the_same_any_more_are_said_to_be(
    folder: Path, path: Path, whole: Profile
) -> None:
    assert whole.calibration is not None
    replace(without(whole), calibration=replace(whole.calibration, mean_queries=None, samples_hash="x")).save(
        path
    )
    said: list[str] = []
    add_queries(path, path, Wanted(str(folder)), say=said.append)
    assert said == [f"these are not the texts that {path} was calibrated with"]


def test_what_an_engine_would_refuse_is_refused_in_the_same_words(
    folder: Path, path: Path, bundled_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any weights are loaded."""
    before = path.read_bytes()
    monkeypatch.setattr("tangram.calibration.model._load_model", None)
    others = [
        random_llama(tmp_path / name, bundled_model_dir, seed=1) for name in ("weights", "shape", "rows")
    ]
    config = LLAMA | {"vocab_size": 49152, "tie_word_embeddings": False}
    write_config(others[1], **config | {"intermediate_size": 256})
    write_config(others[2], **config | {"num_hidden_layers": 2})
    for other, says in zip(
        others, ("other weights", "another shape", "'mean' must be 2 layers"), strict=True
    ):
        text = AutoConfig.from_pretrained(other).get_text_config()
        hashes = {"config_hash": config_fingerprint(text), "weights_hash": weights_fingerprint(str(other))}
        shape = ModelShape("m", text.num_hidden_layers, 2, 32, 4, "float32", 2048, **hashes)
        with pytest.raises(ProfileError, match=says) as served:
            in_force(TangramConfig(profile=str(path)), shape)
        with pytest.raises(ProfileError) as refused:
            add_queries(path, path, Wanted(str(other)))
        assert str(refused.value) == str(served.value)
    assert path.read_bytes() == before


def test_weights_that_came_while_the_model_was_loaded_are_compared(
    folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = load(str(folder), "cpu")
    unknown = replace(reader, identity=replace(reader.identity, weights_hash=None))
    monkeypatch.setattr(completion, "load", lambda *_: unknown)
    monkeypatch.setattr(completion, "weights_fingerprint", lambda _: "x" * 32)
    with pytest.raises(ProfileError, match="other weights"):
        add_queries(path, path, Wanted(str(folder)))


def test_a_model_whose_rotation_is_not_known_is_refused(
    folder: Path, path: Path, bundled_model_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "cohere"
    sizes = {name: LLAMA[name] for name in ("hidden_size", "intermediate_size", "max_position_embeddings")}
    sizes |= {name: LLAMA[name] for name in ("num_hidden_layers", "num_attention_heads")}
    config = CohereConfig(vocab_size=49152, num_key_value_heads=2, **sizes)
    CohereForCausalLM(config).save_pretrained(other)
    for name in TOKENIZER_FILES:
        (other / name).write_bytes((bundled_model_dir / name).read_bytes())
    full = calibrate(settings_of(other, oracle="keydiff", samples=1, length=640), tmp_path / "full.json")
    assert full.calibration is not None
    assert full.calibration.mean_queries is None
    full.save(path)
    before = path.read_bytes()
    with pytest.raises(UnsupportedError, match="cohere can have no mean queries: how models of type cohere"):
        add_queries(path, path, Wanted(str(other)))
    assert path.read_bytes() == before


def test_settings_that_only_the_profile_can_have_are_its_fault(
    folder: Path, path: Path, whole: Profile
) -> None:
    assert whole.calibration is not None
    for changed, says in (
        ({"oracle": "h2o"}, "oracle: must be one of"),
        ({"length": 2049}, "length: must be"),
    ):
        known = replace(whole.calibration, mean_queries=None, settings=whole.calibration.settings | changed)
        replace(whole, calibration=known).save(path)
        with pytest.raises(ProfileError, match=f"p.json was calibrated in a way .* repeated: {says}"):
            add_queries(path, path, Wanted(str(folder)))


def test_what_fails_half_way_leaves_the_file(
    folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, asked, read = path.read_bytes(), completion.asked, list[str]()

    def fails(*given: Any) -> Any:
        read.append("")
        if len(read) == 2:
            raise MemoryError
        return asked(*given)

    monkeypatch.setattr(completion, "asked", fails)
    with pytest.raises(MemoryError):
        add_queries(path, path, Wanted(str(folder)))

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(completion, "asked", interrupted)
    assert cli.main(["profile", "add-queries", str(path), "--model", str(folder)]) == 130
    assert "tangram: stopped; nothing was written\n" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == ["p.json"]


def test_the_command_line(
    folder: Path, path: Path, whole: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(file: Path, *more: str, model: Path = folder) -> tuple[int, str, str]:
        status = cli.main(["profile", "add-queries", str(file), "--model", str(model), *more])
        told = capsys.readouterr()
        return status, told.out, told.err

    before, out = path.read_bytes(), tmp_path / "new" / "q.json"
    status, told, err = run(path, "--output", str(out), "--device", "cpu", "--dtype", "float32")
    assert (status, path.read_bytes()) == (0, before)
    assert told.splitlines() == [
        f"{out}: mean queries of 3 layers x 2 KV heads",
        f"Serve with `--tangram-profile {out}`: the scorer auto is keyvalue_query then.",
    ]
    assert [line.split(",")[0] for line in err.splitlines()] == [
        "tangram: sample 1 of 3 (prose)",
        "tangram: sample 2 of 3 (dialogue)",
        "tangram: sample 3 of 3 (code)",
    ]
    assert load_profile_file(out).mean_queries() == whole.mean_queries()

    status, _, err = run(out)
    assert (status, err) == (
        2,
        f"tangram: error: profile {out} has mean queries already; --force finds them anew\n",
    )
    assert run(out, "--force", "--samples", "1")[0] == 0
    assert load_profile_file(out).mean_queries() != whole.mean_queries()
    assert cli.main(["profile", "show", str(out)]) == 0
    assert f"from\n         1 samples of {LENGTH} tokens, builtin, seed 5\n" in capsys.readouterr().out
    assert run(out, "--force")[0] == 0
    assert cli.main(["profile", "show", str(out)]) == 0
    assert "computed in float32, from\n         the same samples\n" in capsys.readouterr().out

    hand = tmp_path / "hand.json"
    Profile(((0.1, 0.9),), ((0.0, 0.0),)).save(hand)
    (tmp_path / "cut.json").write_bytes(before[:-100])
    for given, says in (
        ([path, "--samples", "0"], "--samples: must be at least 1, not 0"),
        (
            [path, "--data", str(tmp_path / "none")],
            f"--data: {tmp_path / 'none'} cannot be read: No such file or directory",
        ),
        ([path, "--output", str(tmp_path)], f"--output: {tmp_path} is a directory, a file name is wanted"),
        ([hand], f"profile {hand} was not calibrated, so nothing can be added to it: calibrate one"),
        ([tmp_path / "cut.json"], f"profile {tmp_path / 'cut.json'} is damaged: it is not JSON"),
        ([tmp_path / "gone"], f"profile {tmp_path / 'gone'} cannot be read: No such file or directory"),
        ([path, "--retention", "0.5"], "--retention: is no option of tangram profile; see its --help"),
    ):
        status, told, err = run(*given)
        assert (status, told, err) == (2, "", f"tangram: error: {says}\n")
    status, _, err = run(path, model=tmp_path / "none")
    assert status == 2
    assert err.startswith("tangram: error: MODEL: there is no directory")
    with pytest.raises(SystemExit):
        run(path, "--samples", "many")
    assert path.read_bytes() == before


def test_programs_get_lines_of_json_and_terminals_a_bar(
    folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["profile", "add-queries", str(path), "--model", str(folder), "--samples", "2", "--force"]
    assert cli.main([*command, "--progress", "json"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line.removeprefix("tangram-progress ")) for line in lines] == [
        {"done": 1, "total": 2, "kind": "prose", "new": True},
        {"done": 2, "total": 2, "kind": "dialogue", "new": True},
    ]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(command) == 0
    told = capsys.readouterr().err
    assert "tangram profile add-queries: 100%" in told
    assert "2/2" in told

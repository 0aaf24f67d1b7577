"""Calibrated profile files: what they keep, and which are refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tangram import cli
from tangram.config import TangramConfig
from tangram.errors import ProfileError
from tangram.identity import config_fingerprint, weights_fingerprint
from tangram.profile import ModelShape, Profile, in_force, load_of_model
from tangram.profile_file import QueryOrigin
from tests.tangram.calibrated import IDENTITY, also_at, key_needs_of, made_profile, mean_queries_of
from tests.tiny_models import LLAMA, random_llama, write_config

ORIGIN: dict[str, Any] = {"samples": 3, "samples_hash": "q" * 32, "data": "d.jsonl", "length": 700, "seed": 1}
ORIGIN |= {"dtype": "float32", "created": "2026-02-01T00:00:00+00:00", "tool": "0"}
SHAPE = ModelShape("m", 4, 3, 64, 2, "bfloat16", 8192)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made_profile().save(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_a_file_keeps_all_that_is_known(path: Path) -> None:
    assert Profile.load(path, 4, 3) == replace(made_profile(), source=str(path))
    assert not path.with_name("p.json.new").exists()
    longest = max(path.read_text().splitlines(), key=len)
    assert len(longest) < 120, "a row of a table is a line"


def test_text_that_looks_like_a_row_is_kept(tmp_path: Path) -> None:
    named = made_profile(identity=replace(IDENTITY, name="a [ 1,  2 ] b"))
    named.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json", 4, 3).calibration == named.calibration


def test_all_that_may_be_missing_is_kept(tmp_path: Path) -> None:
    profile = mean_queries_of(key_needs_of(also_at(made_profile(), 0.5)))
    assert profile.calibration is not None
    known = replace(profile.calibration, queries_from=QueryOrigin(**ORIGIN))
    profile = replace(profile, calibration=known)
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json", 4, 3) == replace(profile, source=str(tmp_path / "p.json"))


def test_needs_at_the_nearest_retention_count() -> None:
    quarter, half = made_profile(), made_profile(seed=9)
    both = also_at(quarter, 0.5)
    for retention, expected in ((0.1, quarter), (0.25, quarter), (0.35, quarter), (0.36, half), (0.9, half)):
        assert both.at(retention).mean == expected.mean, retention
        assert both.budgets(retention, 1.0) == expected.budgets(retention, 1.0)
    at_half = both.at(0.5)
    assert at_half.calibration is not None
    assert half.calibration is not None
    assert at_half.calibration.settings["retention"] == 0.5
    assert at_half.calibration.needs == half.calibration.needs
    assert at_half.at(0.25) == both, "nothing is lost on the way"
    assert quarter.at(0.9) is quarter


def tampered(path: Path, change: Callable[[dict[str, Any]], Any], seal: bool) -> str:
    """What is said of the file after a change, with a checksum that fits it again or not."""
    data = json.loads(path.read_text())
    change(data)
    if seal:
        del data["checksum"]
        data["checksum"] = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError) as error:
        Profile.load(path, 4, 3)
    return str(error.value)


def test_a_single_changed_digit_is_noticed(path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["mean"][1][1] += 0.001

    assert tampered(path, change, seal=False) == (
        f"profile {path} is damaged: its contents do not fit its checksum"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(version=3), "has version 3, this release reads 1 and 2"),
        (lambda d: d.update(version=True), "has version True, this release reads"),
        (lambda d: d.update(calibration=[]), "'calibration' must be an object"),
        (lambda d: d["calibration"].update(model=None), "'model' must have exactly the fields"),
        (lambda d: d["calibration"]["model"].update(layers="4"), "'model.layers' is '4'"),
        (lambda d: d["calibration"]["model"].update(layers=5), "'mean' must be 5 layers x 3 KV heads"),
        (lambda d: d["calibration"]["settings"].pop("oracle"), "'settings' must have oracle"),
        (lambda d: d["calibration"]["settings"].update(seed=True), "'settings' must have oracle"),
        (lambda d: d["calibration"].update(samples=9), "a table for each of its 'samples'"),
        (lambda d: d["calibration"]["needs"].pop(), "a table for each of its 'samples'"),
        (lambda d: d["calibration"]["needs"][2][0].pop(), "'needs' must be 4 layers x 3 KV heads"),
        (lambda d: d["calibration"]["min"][0].__setitem__(0, -1), "'min' has -1, not a share"),
        (lambda d: d["calibration"].update(created=5), "'created' must be a text"),
        (lambda d: d.update(floor=True), "'floor' must be from 0"),
        (lambda d: d["calibration"].update(others={}), "'others' must be a list of objects"),
        (lambda d: d["calibration"].update(others=[{"retention": 2}]), "'retention' must be above 0"),
        (lambda d: d["calibration"].update(key_needs=[]), "'key_needs' must be an object"),
        (
            lambda d: d["calibration"].update(key_needs={"scorer": "k", "needs": []}),
            "'key_needs' must have a",
        ),
        *(
            (
                lambda d, value=value: d["calibration"].update(mean_queries=value),
                "'mean_queries' must be numbers (float32) of 4 layers x 3 KV heads x 64",
            )
            for value in (
                {},
                [],
                [[[0.5] * 64] * 3] * 3,
                [[[0.5] * 64] * 2] * 4,
                [[[0.5] * 63] * 3] * 4,
                [[[True] * 64] * 3] * 4,
                [[[1e39] * 64] * 3] * 4,
                [[["0"] * 64] * 3] * 4,
                [[[1e999] * 64] * 3] * 4,
                [[[10**400] * 64] * 3] * 4,
                [[0.5] * 3] * 4,
            )
        ),
        *(
            (
                lambda d, value=value: d["calibration"].update(queries_from=value),
                "'queries_from' must have samples, samples_hash, data, length, seed, dtype, created, tool",
            )
            for value in ([], {}, ORIGIN | {"samples": "3"}, ORIGIN | {"seed": True}, ORIGIN | {"tool": None})
        ),
    ],
)
def test_bad_files_are_refused(path: Path, change: Callable[[dict[str, Any]], Any], says: str) -> None:
    assert says in tampered(path, change, seal=True)


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        (Profile.uniform(4, 3), r"no profile decides \(none is named, or the scope is uniform\): name one"),
        (
            replace(made_profile(), source="p.json"),
            "the profile p.json has none: `tangram profile add-queries` adds them",
        ),
        (
            Profile(made_profile().mean, made_profile().std, source="p.json"),
            "the profile p.json has none: name one",
        ),
    ],
)
def test_mean_queries_that_are_missing_are_said_to_be(profile: Profile, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        profile.mean_queries()
    assert len(mean_queries_of(made_profile()).mean_queries()) == 4


def test_a_file_that_was_cut_off_is_refused(path: Path) -> None:
    path.write_text(path.read_text()[:-100])
    with pytest.raises(ProfileError, match="damaged: it is not JSON"):
        Profile.load(path, 4, 3)


def test_version_1_still_loads(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    old = {"format": "tangram-profile", "version": 1, "mean": [[0.5] * 3] * 4, "std": [[0.0] * 3] * 4}
    path.write_text(json.dumps(old))
    profile = Profile.load(path, 4, 3)
    assert (profile.calibration, profile.floor) == (None, 0.05)
    config = TangramConfig(profile=str(path))
    known = replace(SHAPE, config_hash="x", weights_hash="y")
    assert in_force(config, known) == profile, "it names no model, so there is nothing to compare"


@pytest.mark.parametrize(
    ("config_hash", "weights_hash", "says"),
    [
        ("c" * 32, "w" * 32, None),
        (None, None, None),
        ("c" * 32, None, None),
        ("x", "w" * 32, "calibrated on m (LlamaForCausalLM), which has another shape"),
        ("c" * 32, "x", "calibrated on m, which has the same shape but other weights"),
    ],
)
def test_another_model_s_profile_is_refused(
    path: Path, config_hash: str | None, weights_hash: str | None, says: str | None
) -> None:
    config = TangramConfig(profile=str(path))
    shape = replace(SHAPE, config_hash=config_hash, weights_hash=weights_hash)
    if says is None:
        assert in_force(config, shape).calibration is not None
        return
    with pytest.raises(ProfileError) as error:
        in_force(config, shape)
    assert says in str(error.value)


def test_fingerprints_of_weights(tmp_path: Path, bundled_model_dir: Path) -> None:
    first = random_llama(tmp_path / "a", bundled_model_dir, seed=0)
    again = random_llama(tmp_path / "b", bundled_model_dir, seed=0)
    other = random_llama(tmp_path / "c", bundled_model_dir, seed=1)
    found = weights_fingerprint(str(first))
    assert found is not None
    assert found == weights_fingerprint(str(again))
    assert found != weights_fingerprint(str(other))
    assert weights_fingerprint(str(tmp_path)) is None
    (first / "model.safetensors").write_bytes(b"\xff" * 100)
    assert weights_fingerprint(str(first)) is None


def test_weights_in_several_files_are_found_by_their_index(tmp_path: Path, bundled_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = random_llama(tmp_path / "whole", bundled_model_dir)
    model = AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(tmp_path / "parts", max_shard_size="5MB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").exists()
    parts = weights_fingerprint(str(tmp_path / "parts"))
    assert parts == weights_fingerprint(str(whole))
    next((tmp_path / "parts").glob("model-*.safetensors")).unlink()
    assert weights_fingerprint(str(tmp_path / "parts")) is None


def test_engine_and_calibration_agree_on_a_model(tmp_path: Path, bundled_model_dir: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.engine.arg_utils import EngineArgs

        from tangram.runtime import Runtime
    from transformers import AutoConfig

    folder = random_llama(tmp_path / "m", bundled_model_dir)
    text = AutoConfig.from_pretrained(folder).get_text_config()
    identity = replace(
        IDENTITY,
        layers=3,
        kv_heads=2,
        head_size=32,
        config_hash=config_fingerprint(text),
        weights_hash=weights_fingerprint(str(folder)),
    )
    path = tmp_path / "p.json"
    made_profile(identity=identity).save(path)

    def start(model: Path, **more: Any) -> Runtime:
        options = {"profile": str(path), "retention": 0.25} | more
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what vLLM imports warns of much
            args = EngineArgs(
                model=str(model), block_size=16, enforce_eager=True, additional_config={"tangram": options}
            )
            args.scheduler_cls = "tangram.scheduler.TangramScheduler"
            return Runtime.from_vllm(args.create_engine_config())

    without = start(folder)
    assert without.profile.calibration is not None
    assert without.scorer == "keyvalue"
    with pytest.raises(ProfileError, match=r"p\.json has none: `tangram profile add-queries` adds"):
        start(folder, scorer="keyvalue_query")
    assert start(folder, scorer="keyvalue_query", retention=1.0), "nothing is ranked"
    mean_queries_of(made_profile(identity=identity)).save(path)
    assert start(folder, scorer="keyvalue_query").profile.mean_queries()
    assert start(folder).scorer == "keyvalue_query"
    assert start(folder, scope="uniform").scorer == start(folder, profile="none").scorer == "keyvalue"
    with pytest.raises(ProfileError, match="other weights"):
        start(random_llama(tmp_path / "other", bundled_model_dir, seed=1))
    write_config(folder, **LLAMA | {"vocab_size": 49152, "intermediate_size": 256})
    with pytest.raises(ProfileError, match="another shape"):
        start(folder)


def test_show_tells_all_and_retunes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    for part in ("LlamaForCausalLM", "8 samples of 2048 tokens", "oracle   kvzip", "head   2 |", "131072"):
        assert part in shown
    assert "(longer than the model)" in shown
    assert "Advice: alpha" in shown
    assert "retention 0.25, alpha 1, scope model, groups of 2" in shown
    budgets = Profile.load(path, 4, 3).budgets(0.25, 1.0)
    assert " ".join(f"{share:.2f}" for share in budgets[2]) in shown
    options = ["--retention", "0.5", "--alpha", "2", "--group-size", "1", "--scope", "layer"]
    assert cli.main(["profile", "show", str(path), *options]) == 0
    retuned = capsys.readouterr().out
    assert "retention 0.5, alpha 2, scope layer, groups of 1" in retuned
    budgets = Profile.load(path, 4, 3).budgets(0.5, 2.0)
    assert " ".join(f"{share:.2f}" for share in budgets[2]) in retuned


def test_show_of_a_profile_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hand.json"
    Profile(((0.1, 0.9),), ((0.0, 0.0),)).save(path)
    assert cli.main(["profile", "show", str(path)]) == 0
    assert "names no model and no samples" in capsys.readouterr().out
    assert cli.main(["profile", "check", str(path)]) == 0
    assert "names no model" in capsys.readouterr().out
    assert cli.main(["profile", "check", str(path), "--model", "m"]) == 2
    assert "names no model that m could be compared with" in capsys.readouterr().err


def test_diff_names_the_heads_that_differ_most(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", "diff", str(path), str(path)]) == 0
    same = capsys.readouterr().out
    assert "agree in rank by 1.000" in same
    assert "differ by 0.000 on average, 0.000 at most" in same
    changed = made_profile()
    mean = [list(row) for row in changed.mean]
    mean[3][1] = 1.0 - mean[3][1]
    assert changed.calibration is not None
    known = replace(changed.calibration, settings=changed.calibration.settings | {"oracle": "keydiff"})
    replace(changed, mean=tuple(map(tuple, mean)), calibration=known).save(tmp_path / "q.json")
    assert cli.main(["profile", "diff", str(path), str(tmp_path / "q.json")]) == 0
    differing = capsys.readouterr().out
    assert "oracle: kvzip in A, keydiff in B" in differing
    assert differing.splitlines()[differing.splitlines().index("layer  head      A      B") + 1][:11] == (
        "    3     1"
    )
    Profile(((0.1, 0.9),), ((0.0, 0.0),)).save(tmp_path / "small.json")
    assert cli.main(["profile", "diff", str(path), str(tmp_path / "small.json")]) == 2
    assert "they cannot be compared" in capsys.readouterr().err


def test_diff_tells_which_one_has_mean_queries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(tmp_path / name) for name in ("plain.json", "asked.json")]
    made_profile().save(names[0])
    mean_queries_of(made_profile()).save(names[1])
    assert cli.main(["profile", "diff", *names]) == 0
    assert "mean queries: none in A, held in B" in capsys.readouterr().out.splitlines()


def test_mean_queries_are_of_heads_as_wide_as_the_model_s(tmp_path: Path) -> None:
    """No fingerprint of a configuration has the width of a head, and weights may not be at hand."""
    wider = replace(IDENTITY, head_size=2 * IDENTITY.head_size, weights_hash=None)
    for profile, fits in ((made_profile(), True), (mean_queries_of(made_profile()), False)):
        profile.save(tmp_path / "p.json")
        load_of_model(tmp_path / "p.json", IDENTITY)
        if fits:
            load_of_model(tmp_path / "p.json", wider)
            continue
        with pytest.raises(ProfileError, match="of KV heads of size 64, and this model's are of 128"):
            load_of_model(tmp_path / "p.json", wider)


def test_check_names_what_weakens_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    made_profile(3).save(path)
    assert cli.main(["profile", "check", str(path)]) == 0
    weak = capsys.readouterr().out
    assert "no mean queries, so that the scorer auto is keyvalue" in weak
    assert "3 samples are few" in weak
    assert "a safety margin (alpha) of 1 covers" in weak
    sure = made_profile(40)
    assert sure.calibration is not None
    known = replace(sure.calibration, settings=sure.calibration.settings | {"alpha": 2.0})
    mean_queries_of(replace(sure, calibration=known)).save(path)
    assert cli.main(["profile", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: in order\n"
    path.write_text("{")
    assert cli.main(["profile", "check", str(path)]) == 2
    assert capsys.readouterr().err == f"tangram: error: profile {path} is damaged: it is not JSON\n"


def test_looking_at_a_profile_loads_no_engine(path: Path) -> None:
    code = (
        "import sys; from tangram.cli import main; "
        f"main(['profile', 'show', {str(path)!r}]); "
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

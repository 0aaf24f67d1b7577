"""Profiles of the release: chosen by the model's identity, and only for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.ship_profile import main as ship
from tangram import cli, shipped
from tangram.config import TangramConfig
from tangram.errors import ProfileError
from tangram.identity import weights_fingerprint
from tangram.profile import load_profile_file
from tests.tangram.calibrated import IDENTITY, made_profile
from tests.tiny_models import random_llama


@pytest.fixture(scope="module")
def model(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("shipped"), bundled_model_dir)


@pytest.fixture
def release(model: Path, tmp_path: Path) -> Path:
    """A folder with a profile for ``model``, under a hub id, and one for other weights."""
    weights = weights_fingerprint(str(model))
    for name, of in (("Tiny", weights), ("Other", "f" * 32)):
        made_profile(identity=replace(IDENTITY, name=name, weights_hash=of)).save(tmp_path / f"{name}.json")
        more = ["--hub-id", f"org/{name}"]
        assert ship([str(tmp_path / f"{name}.json"), *more, "--folder", str(tmp_path / "release")]) == 0
    return tmp_path / "release"


def chosen(model: str, release: Path, **options: Any) -> str | None:
    settled = shipped.settled(TangramConfig(), model, where=release, **options)
    return None if settled.profile is None else Path(settled.profile).name


def test_the_weights_decide(model: Path, release: Path, bundled_model_dir: Path) -> None:
    assert chosen(str(model), release) == "tiny.json"
    assert chosen(str(bundled_model_dir), release) is None, "other weights"
    assert chosen(str(model), release / "none") is None
    assert chosen(str(model), release, reshaped=True) is None


def test_a_hub_id_decides_while_the_weights_are_not_here(
    release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "weights_fingerprint", lambda model, revision: None)
    assert chosen("org/Tiny", release) == "tiny.json"
    assert chosen("another/Tiny", release) is None
    assert chosen("org/Tiny", release, revision="main") is None, "another revision may be other weights"
    monkeypatch.setattr(shipped, "weights_fingerprint", lambda model, revision: "0" * 32)
    assert chosen("org/Tiny", release) is None, "they are here, and others"


def test_what_was_asked_for_stays(model: Path, release: Path) -> None:
    for asked in ("mine.json", None):
        config = TangramConfig(profile=asked)
        assert shipped.settled(config, str(model), where=release) is config


def test_what_is_told() -> None:
    auto, none = TangramConfig(), TangramConfig(profile=None)
    assert "what tiny.json says" in shipped.told(auto, replace(auto, profile="x/tiny.json"))
    assert "`tangram calibrate` makes one" in shipped.told(auto, none)
    for quiet in ({"scope": "uniform"}, {"retention": 1.0}, {"profile": None}, {"profile": "p"}):
        assert shipped.told(replace(auto, **quiet), none) == ""


@pytest.mark.parametrize("content", ["{", '{"a": 1}', "[1]", '[{"file": "a"}]'])
def test_a_damaged_index_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ProfileError, match="install this release again"):
        shipped.index(tmp_path)


def test_the_release_s_own_index_names_its_files() -> None:
    entries = shipped.index()
    assert entries
    files = {path.name for path in shipped.folder().glob("*.json")} - {"index.json"}
    assert {entry.file for entry in entries} == files
    for entry in entries:
        known = load_profile_file(shipped.folder() / entry.file).calibration
        assert known is not None
        found = (known.model.name, known.model.config_hash, known.model.weights_hash)
        assert found == (entry.model, entry.config_hash, entry.weights_hash)
        assert known.key_needs is not None
        assert {known.settings["retention"], *(other.retention for other in known.others)} == {0.5, 0.25}


def test_the_bundled_model_has_one(bundled_model_dir: Path) -> None:
    found = shipped.find(str(bundled_model_dir))
    assert found is not None
    assert found.model == bundled_model_dir.name


def test_serve_gives_it_to_the_engine(
    model: Path, release: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shipped, "folder", lambda: release)
    commands: list[list[str]] = []

    class Served(Exception):
        pass

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        commands.append(command)
        raise Served

    monkeypatch.setattr(os, "execve", execve)
    for more in ([], ["--hf-overrides", "{}"], ["--tangram-profile", "none"]):
        with pytest.raises(Served):
            cli.main(["serve", str(model), *more])
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("tangram: ") for line in said] == [True, True]
    profiles = [
        json.loads(command[command.index("--additional-config") + 1])["tangram"]["profile"]
        for command in commands
    ]
    assert profiles == [str(release / "tiny.json"), None, None]


def test_a_profile_without_weights_is_not_shipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_profile(identity=replace(IDENTITY, weights_hash=None)).save(tmp_path / "p.json")
    assert ship([str(tmp_path / "p.json"), "--folder", str(tmp_path / "release")]) == 1
    assert "names no weights" in capsys.readouterr().err
    for seed, weights in ((0, "a"), (1, "a"), (2, "b")):
        made_profile(seed=seed, identity=replace(IDENTITY, weights_hash=weights)).save(tmp_path / "p.json")
        assert ship([str(tmp_path / "p.json"), "--folder", str(tmp_path / "release")]) == (weights == "b")
    assert "other weights" in capsys.readouterr().err
    (entry,) = shipped.index(tmp_path / "release")
    assert load_profile_file(tmp_path / "release" / entry.file).mean == made_profile(seed=1).mean


def test_the_script_runs_by_itself(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "ship_profile.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, "cannot be read" in done.stderr) == (1, True)

"""Drift in a real engine: text like the calibration's, and text that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tangram.calibration.framing import encode
from tangram.calibration.job import calibrate
from tangram.calibration.model import load
from tangram.calibration.samples import builtin
from tangram.calibration.settings import Settings
from tangram.profile import Profile
from tests.engine.children import run_child
from tests.tiny_models import random_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LENGTH = 1216  # two sealed chunks


def serve(folder: Path, model: Path, waves: Any, name: str, **tangram: Any) -> list[dict[str, Any]]:
    given = folder / f"{name}.job"
    engine = {"model": str(model), "dtype": "float32", "max_model_len": 2048, "max_num_batched_tokens": 512}
    given.write_text(json.dumps({"engine": engine, "tangram": tangram, "waves": waves}))
    found: list[dict[str, Any]] = run_child("drift_child.py", given, folder)["waves"]
    return found


def test_drift_tells_other_text_from_text_like_the_calibration_s(
    bundled_model_dir: Path, tmp_path: Path
) -> None:
    model = random_llama(tmp_path / "model", bundled_model_dir)
    settings = Settings(
        str(model), 0.25, samples=10, length=LENGTH, oracle="keydiff", device="cpu", others=(0.5,)
    )
    profile = calibrate(settings, tmp_path / "p.json")
    tokenizer = load(str(model), "cpu").tokenizer
    like = builtin(lambda text: encode(tokenizer, text), 20, LENGTH, seed=5)
    unlike = [[1000 + number] * LENGTH for number in range(40)]
    waves = [[list(sample.tokens) for sample in like], unlike]
    options = {"retention": 0.25, "profile": str(tmp_path / "p.json"), "drift_every": 1}
    alike, other = serve(tmp_path, model, waves, "watched", **options)
    assert 20 <= alike["drift"]["chunks"] <= 40, "one a step, where several are sealed at once"
    assert alike["drift"]["reference"] == "profile"
    assert alike["drift"]["drift"] < 1.5, "another seed's texts of the same kinds"
    assert alike["warnings"] == []
    assert other["drift"]["drift"] > 2.5
    assert len(other["warnings"]) == 1
    assert "Calibrate again" in other["warnings"][0]
    known = profile.calibration
    assert known is not None
    assert known.key_needs is not None
    np.testing.assert_allclose(
        np.array(alike["drift"]["live"]), np.mean(known.key_needs.needs, axis=0), atol=0.05
    )

    # A profile without needs by keys: the first chunks are what later ones are compared with.
    Profile(profile.mean, profile.std, profile.floor).save(tmp_path / "bare.json")
    bare = options | {"profile": str(tmp_path / "bare.json")}
    first, second = serve(tmp_path, model, [[*waves[0], *waves[0][:8]], unlike], "bare", **bare)
    assert first["drift"]["reference"] == "first chunks"
    assert second["drift"]["drift"] > 2

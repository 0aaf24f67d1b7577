"""The tab "Profiles": what it shows, what its form takes, and who may use it."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from admin.engine_panels import change_panel
from admin.errors import TuneError
from admin.evaluation_panels import evaluation_panel, result_panel
from admin.profile_panels import (
    calibration_panel,
    comparison_panel,
    profiles_table,
    state_notice,
    title,
)
from admin.profiles_tab import buttons, form_options
from app.calibration import Calibration
from app.calibration_record import CalibrationRecord, CalibrationState
from app.engine_change import PROFILE, EngineChange
from app.evaluation import EvaluationRecord
from app.profiles import ProfileEntry
from tangram.calibration.verdict import Figures, difference
from tangram.profile import Profile
from tangram.profile_summary import compare, costs, describe
from tests.admin.conftest import Bench, Installed
from tests.admin.support import Person
from tests.admin.test_page import Viewer, sampled
from tests.app.test_calibration import FAKE
from tests.tangram.calibrated import IDENTITY, also_at, key_needs_of, made_profile

RECORD = CalibrationRecord("o.json", "Model <1>", "/m", {}, "u", started=1000, done=3, total=12)


def entry_of(path: Path, profile: Profile, shipped: bool = False) -> ProfileEntry:
    profile.save(path)
    return ProfileEntry(path.name, path, shipped, describe(path))


def test_the_list_says_what_each_profile_is_based_on(tmp_path: Path) -> None:
    named = made_profile(samples=12, identity=replace(IDENTITY, name="<b>m</b>"))
    whole = entry_of(tmp_path / "a.json", key_needs_of(also_at(named, 0.5)), shipped=True)
    hand = entry_of(tmp_path / "hand.json", Profile(named.mean, named.std))
    bad = ProfileEntry("bad.json", tmp_path / "bad.json", False, {}, "profile bad.json is <damaged>")
    text = profiles_table([whole, hand, bad], str(whole.path))
    assert "&lt;b&gt;m&lt;/b&gt;, 2026-01-01 00:00" in text
    assert "12 texts of 2,048 tokens (builtin), judged by kvzip at 25% and 50%" in text
    assert "no reference for drift" not in text
    assert text.count("in use") == text.count("shipped") == 1
    assert "written by hand" in text
    assert "is &lt;damaged&gt;" in text
    assert (title(hand), title(bad)) == ("hand.json", "bad.json")
    bare = entry_of(tmp_path / "bare.json", named)
    assert "no reference for drift" in profiles_table([bare], None)
    assert "Calibrate one" in profiles_table([], None)


def test_an_engine_without_a_profile_is_noticed() -> None:
    assert "all heads keep the same" in state_notice(None, ready=True)
    assert state_notice("p.json", ready=True) == state_notice(None, ready=False) == ""


def test_how_a_calibration_goes_and_ends() -> None:
    assert calibration_panel(None) == ""
    assert "loading the model" in calibration_panel(replace(RECORD, done=0, total=0))
    going = calibration_panel(replace(RECORD, remaining_seconds=95.0))
    assert "Calibrating Model &lt;1&gt;: 3 of 12 texts, about 1 min 35 s left" in going
    assert 'aria-valuenow="25"' in going
    cancelled = replace(RECORD, state=CalibrationState.CANCELLED)
    assert "Cancelled at 3 of 12 texts" in calibration_panel(cancelled)
    failed = replace(RECORD, state=CalibrationState.FAILED, message="no <memory>")
    assert "failed. no &lt;memory&gt;" in calibration_panel(failed)
    done = replace(RECORD, state=CalibrationState.DONE, ended=62_000)
    assert "on 3 texts in 1 min 1 s: o.json" in calibration_panel(done)

    def shown(record: CalibrationRecord | None) -> list[bool]:
        return [update["visible"] for update in buttons(record)]

    assert shown(None) == shown(done) == [True, False, False, False]
    assert shown(RECORD) == [False, True, False, False]
    assert shown(cancelled) == shown(failed) == [True, False, True, True]


def test_how_a_change_of_profile_goes_and_ends() -> None:
    assert change_panel(None, "") == ""
    assert "so far: loading the model" in change_panel(EngineChange(PROFILE, "p", 0.0), "loading the model")
    ended = EngineChange(PROFILE, "p", 0.0, "failed", "It went back.", 7.0)
    assert "It went back. (7 s)" in change_panel(ended, "")


def test_how_trying_goes_and_ends() -> None:
    assert evaluation_panel(None) == ""
    going = EvaluationRecord("<p>.json", "none", 0)
    assert "Trying &lt;p&gt;.json against equal budgets: loading the model" in evaluation_panel(going)
    half = replace(going, done=3, total=12, remaining_seconds=95.0)
    assert "3 of 12 readings, about 1 min 35 s left" in evaluation_panel(half)
    assert 'aria-valuenow="25"' in evaluation_panel(half)
    ended = replace(half, state=CalibrationState.CANCELLED)
    assert "was cancelled at 3 of 12 readings" in evaluation_panel(ended)
    failed = replace(half, state=CalibrationState.FAILED, message="no <memory>")
    assert "failed. no &lt;memory&gt;" in evaluation_panel(failed)
    assert evaluation_panel(replace(half, state=CalibrationState.DONE)) == "", "its result is shown instead"


def test_a_model_that_answers_nothing_is_said_to(tmp_path: Path) -> None:
    assert result_panel(None) == ""
    mute = Figures((False,) * 6, (9.0,) * 6, (2.0, 2.1))
    found: dict[str, Any] = {
        "created": "2026-11-30T12:17:33+00:00",
        "model": {"name": "<m>"},
        "settings": {"retention": 0.25, "alpha": 1.0},
        "dtype": "float32",
        "seconds": 188.0,
        "probe": {"passages": 1, "tokens": 1344},
        "everything": mute.to_dict(),
        "profiles": [{"profile": name} | mute.to_dict() for name in ("p.json", "none")],
        "difference": difference(mute, mute),
    }
    text = result_panel(found)
    assert "This model cannot answer the probe even with everything kept (0 of 6); loss is compared" in text
    assert text.count("0 of 6</td>") == 3
    assert "p.json against equal budgets, at retention 25%" in text
    assert "&lt;m&gt; in float32, 2026-11-30 12:17 UTC, 3 min 8 s." in text
    assert "ranked by" not in text, "an earlier release did not tell"

    def told(*scorers: str) -> str:
        named = [one | {"scorer": by} for one, by in zip(found["profiles"], scorers, strict=True)]
        return result_panel(found | {"profiles": named})

    assert "safety margin 1, ranked by keydiff, on 1 texts" in told("keydiff", "keydiff")
    differ = told("keyvalue_query", "<b>")
    assert "safety margin 1, ranked by keyvalue_query against &lt;b&gt;, on 1 texts" in differ


def test_a_comparison_in_words_and_tables(tmp_path: Path) -> None:
    made_profile().save(tmp_path / "a.json")
    made_profile(samples=9, seed=1).save(tmp_path / "b.json")
    text = comparison_panel("chosen", "other", compare(tmp_path / "a.json", tmp_path / "b.json", 0.25, 1.0))
    assert "At retention <b>25%</b>" in text
    assert text.count("KV head") == 5
    assert "<td>Texts read</td><td class=num>8</td><td class=num>9</td>" in text
    assert "The heads' order agrees by" in text


def test_a_comparison_with_equal_budgets(tmp_path: Path) -> None:
    """Every head keeps the retention itself, and there is no order of heads to agree with."""
    path = tmp_path / "a.json"
    made_profile().save(path)
    found = compare(path, None, 0.25, 1.0)
    assert [budget for row in found["second"] for budget in row] == pytest.approx([0.25] * 12)
    assert found["rank_correlation"] is None
    config = {"retention": 0.25, "group_size": 1, "scope": "model"}
    held, equal = costs(path, config, (4096,)), costs(path, config, (4096,), equal=True)
    assert 0 < equal[4096] != held[4096] > 0
    text = comparison_panel("chosen", "equal", found, (held, equal))
    assert "Predicted memory of</th><th class=num>chosen</th><th class=num>equal</th>" in text
    assert "order" not in text
    assert "None" not in text


def test_the_form_s_values() -> None:
    assert form_options(50, 2048, " 50, 12.5% ", "kvzip", 1.5, "builtin") == {
        "samples": 50,
        "length": 2048,
        "retention": [0.5, 0.125],
        "oracle": "kvzip",
        "alpha": 1.5,
        "data": "builtin",
    }
    for values, says in (
        ((0, 2048, "50", "kvzip", 1, "builtin"), "Texts must be a whole number"),
        ((5, 0.5, "50", "kvzip", 1, "builtin"), "Tokens must be a whole number"),
        ((5, 2048, "half", "kvzip", 1, "builtin"), "Retention must be percents"),
        ((5, 2048, "50", "kvzip", None, "builtin"), "Safety margin must be a number"),
    ):
        with pytest.raises(TuneError, match=says):
            form_options(*values)


async def press(viewer: Viewer, number: int, *values: Any) -> httpx.Response:
    return await viewer.http.post(
        "/admin/gradio_api/run/predict",
        json={"fn_index": number, "data": list(values), "session_hash": "s"},
        headers={"origin": "http://localhost"},
    )


def clicks(viewer: Viewer, name: str) -> int:
    """The event of a click on that button."""
    part = viewer.parts[name]
    return next(event["id"] for event in viewer.events if [part, "click"] in event["targets"])


async def test_a_calibration_from_the_page(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_profile(identity=replace(IDENTITY, layers=30, kv_heads=3)).save(tmp_path / "made.json")
    words = (sys.executable, str(FAKE), "quick", str(tmp_path / "made.json"))
    monkeypatch.setattr(Calibration, "command", words)
    await sampled(installed)
    async with installed.client("ann", is_admin=True) as http:
        viewer = await Viewer.open(http)
        start = clicks(viewer, "calibration-start")
        refused = await press(viewer, start, 5, 2048, "none", "kvzip", 1, "builtin")
        assert "Retention must be percents" in refused.text
        begun = await press(viewer, start, 2, 2048, "50, 25", "kvzip", 1, "builtin")
        assert "Calibrating" in begun.text
        record = await installed.services.calibration.wait()
        assert record is not None
        assert record.state is CalibrationState.DONE
        shown = await viewer.send(viewer.opening("profiles"), "Budget", "", -1, "")
        assert "Calibrated fake on 2 texts" in shown["calibration-progress"]
        assert "8 texts of 2,048 tokens" in shown["profile-table"]
        assert "No profile is in use" in shown["profile-state"]
        (entry,) = [one for one in await installed.services.profiles.every() if not one.shipped]
        assert entry.name == record.out


async def test_handlers_refuse_somebody_whose_rights_were_withdrawn(bench: Bench) -> None:
    async with bench.client() as http:
        viewer = await Viewer.open(http)
        bench.person = Person("2", False)
        answers = await asyncio.gather(
            *(press(viewer, clicks(viewer, name)) for name in ("calibration-start", "calibration-cancel"))
        )
        assert {answer.status_code for answer in answers} == {403}
        assert bench.console.calibration.record is None

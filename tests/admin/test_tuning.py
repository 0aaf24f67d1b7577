"""Changing the engine's settings: checked, applied, recorded, or taken back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from admin.errors import TuneError
from admin.tune_tab import form_values
from admin.tuning import TuneService, TuneValues
from app.engine_change import EngineChanges
from app.engine_settings import EngineSettings
from app.errors import EngineStartFailed
from tangram.errors import EngineRejected
from tests.admin.support import Engine, Keeper, Supervisor
from tests.patience import PATIENCE

WANTED = TuneValues(0.25, 20, 1.5)


@pytest.fixture
def changed() -> list[bool]:
    return []


@pytest.fixture
def tuning(supervisor: Supervisor, keeper: Keeper, changed: list[bool]) -> TuneService:
    changes = EngineChanges()
    changes.on_change = lambda: changed.append(True)
    return TuneService(supervisor.reader, EngineSettings(keeper, supervisor), changes)


async def ended(tuning: TuneService) -> Any:
    await tuning.changes.wait(PATIENCE)
    job = tuning.job
    assert job is not None
    assert job.outcome is not None, "the change should have ended"
    return job


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ((0.25, 16, 1), "Retention is in percent here: 25 keeps a quarter"),
        ((0, 16, 1), "Retention must be between 1 and 100 percent"),
        ((-5, 16, 1), "Retention must be between 1 and 100 percent"),
        ((101, 16, 1), "Retention must be between 1 and 100 percent"),
        ((None, 16, 1), "Retention must be a number"),
        ((float("nan"), 16, 1), "Retention must be a number"),
        (("50", 16, 1), "Retention must be a number"),
        ((True, 16, 1), "Retention must be a number"),
        ((50, 0, 1), "Group size must be a whole number of heads, 1 or more"),
        ((50, 2.5, 1), "Group size must be a whole number of heads, 1 or more"),
        ((50, None, 1), "Group size must be a number"),
        ((50, 16, -0.1), "Safety margin must be between 0 and 10"),
        ((50, 16, float("inf")), "Safety margin must be a number"),
    ],
)
def test_bad_values_are_refused_in_a_sentence(values: tuple[Any, Any, Any], sentence: str) -> None:
    with pytest.raises(TuneError, match=sentence):
        form_values(*values)


def test_good_values_are_taken() -> None:
    assert form_values(25, 20.0, 1.5) == WANTED
    assert TuneValues.of_config({"retention": 0.25, "group_size": 20, "alpha": 1.5, "chunk": 512}) == WANTED


def test_a_group_size_that_the_engine_chose_stays_its_choice() -> None:
    running = TuneValues.of_config({"retention": 0.5, "group_size": None, "alpha": 1.0})
    assert running == TuneValues(0.5, None, 1.0)
    assert form_values(50, 15, 1.0, 15) == running
    assert running.to_dict() == {"retention": 0.5, "alpha": 1.0}
    assert form_values(50, 16, 1.0, 15) == TuneValues(0.5, 16, 1.0)


async def test_apply_restarts_stores_and_records(
    tuning: TuneService, supervisor: Supervisor, keeper: Keeper, engine: Engine, changed: list[bool]
) -> None:
    keeper.settings["engine"] = {"retention": 0.5, "group_size": 16, "alpha": 1.0, "scorer": "keydiff"}
    before = dict(keeper.settings["engine"])
    await tuning.apply("ann", WANTED)
    job = await ended(tuning)
    after = {**before, **WANTED.to_dict()}
    assert job.outcome == "applied"
    assert supervisor.applied == [after], "what else was stored stays in force"
    assert keeper.settings["engine"] == after
    assert keeper.audit == [("ann", "engine.tune", before, after)]
    assert engine.data["config"]["retention"] == 0.25
    assert changed == [True]


async def test_nothing_is_stored_before_the_engine_is_ready(
    tuning: TuneService, supervisor: Supervisor, keeper: Keeper
) -> None:
    supervisor.gate.clear()
    await tuning.apply("ann", WANTED)
    await tuning.changes.wait(0.01)
    job = tuning.job
    assert job is not None
    assert job.outcome is None
    assert tuning.changes.running
    assert keeper.settings == {}
    with pytest.raises(TuneError, match="is being changed already"):
        await tuning.apply("bob", WANTED)
    supervisor.gate.set()
    assert (await ended(tuning)).outcome == "applied"
    assert not tuning.changes.running
    assert len(keeper.audit) == 1


async def test_an_engine_that_does_not_come_up_goes_back(
    tuning: TuneService, supervisor: Supervisor, keeper: Keeper, engine: Engine, changed: list[bool]
) -> None:
    supervisor.refuse = "ValueError: not enough memory for one conversation"
    await tuning.apply("ann", WANTED)
    job = await ended(tuning)
    assert job.outcome == "failed"
    assert "went back to the previous ones" in job.message
    assert "not enough memory" in job.message
    assert keeper.settings == {}
    [(user, action, before, after)] = keeper.audit
    assert (user, action, before) == ("ann", "engine.tune_failed", None)
    assert after == {**WANTED.to_dict(), "error": supervisor.refuse}
    assert engine.data["config"]["retention"] == 0.5
    assert changed == [True]
    supervisor.refuse = ""
    await tuning.apply("ann", WANTED)
    assert (await ended(tuning)).outcome == "applied", "a failure does not block the next try"


async def test_a_failure_without_way_back_is_told(
    tuning: TuneService, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(_: Any) -> None:
        await supervisor.stop()
        raise EngineStartFailed("gone", rolled_back=False)

    monkeypatch.setattr(supervisor, "restart", lost)
    await tuning.apply("ann", WANTED)
    assert "neither with these settings nor with the previous ones" in (await ended(tuning)).message


async def test_an_engine_that_runs_elsewhere_is_left_alone(
    tuning: TuneService, supervisor: Supervisor, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def elsewhere(_: Any) -> None:
        raise EngineStartFailed("This engine runs outside the app: restart it there.")

    monkeypatch.setattr(supervisor, "restart", elsewhere)
    await tuning.apply("ann", WANTED)
    assert (await ended(tuning)).message == (
        "Nothing was changed. This engine runs outside the app: restart it there."
    )
    assert keeper.settings == {}


async def test_values_that_the_engine_refuses_restart_nothing(
    tuning: TuneService, supervisor: Supervisor
) -> None:
    with pytest.raises(TuneError, match="Group size: must be at most 90"):
        await tuning.apply("ann", TuneValues(0.5, 400, 1.0))
    with pytest.raises(TuneError, match="Group size: must be at most 90"):
        await tuning.preview(TuneValues(0.5, 400, 1.0))
    with pytest.raises(TuneError, match="Group size: must be at most 90"):
        await tuning.check(TuneValues(0.5, 400, 1.0))
    assert supervisor.applied == []
    assert tuning.job is None


async def test_an_engine_that_is_away_can_still_be_given_new_values(
    tuning: TuneService, supervisor: Supervisor, engine: Engine
) -> None:
    engine.up = False
    with pytest.raises(TuneError, match="cannot be asked now"):
        await tuning.preview(WANTED)
    await tuning.apply("ann", WANTED)
    assert (await ended(tuning)).outcome == "applied"
    assert supervisor.applied == [WANTED.to_dict()]


async def test_an_engine_that_cannot_look_has_not_refused(
    tuning: TuneService, supervisor: Supervisor, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy(**_: float) -> dict[str, Any]:
        raise EngineRejected(503, "the scheduler does not answer")

    monkeypatch.setattr(engine, "preview", busy)
    with pytest.raises(TuneError, match="cannot be asked now: the scheduler"):
        await tuning.preview(WANTED)
    await tuning.apply("ann", WANTED)
    assert (await ended(tuning)).outcome == "applied"
    assert supervisor.applied == [WANTED.to_dict()]


async def test_a_full_disk_is_told(tuning: TuneService, keeper: Keeper) -> None:
    keeper.full = True
    await tuning.apply("ann", WANTED)
    job = await ended(tuning)
    assert job.outcome == "failed"
    assert "not stored: disk full" in job.message


async def test_stop_ends_a_change_in_progress(
    tuning: TuneService, supervisor: Supervisor, keeper: Keeper
) -> None:
    supervisor.gate.clear()
    await tuning.apply("ann", WANTED)
    await tuning.changes.wait(0.01)
    await tuning.changes.close()
    assert not tuning.changes.running
    assert keeper.settings == {}
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "engine settings"]

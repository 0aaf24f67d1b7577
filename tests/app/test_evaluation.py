"""Trying a profile as a job of the app, beside an engine that goes on serving."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.calibration import Calibration
from app.calibration_record import CalibrationRecord
from app.errors import AlreadyRunning
from app.evaluation import Evaluation
from db.errors import StorageUnavailable
from tests.app.conftest import Product, eventually
from tests.app.test_calibration import FAKE as FAKE_CALIBRATE
from tests.app.test_profiles import SERVED, keep
from tests.tangram.calibrated import IDENTITY, made_profile

FAKE = Path(__file__).with_name("fake_evaluate.py")
Acting = Callable[[str], None]


@pytest.fixture
def acting(monkeypatch: pytest.MonkeyPatch) -> Acting:
    def act(actions: str) -> None:
        monkeypatch.setattr(Evaluation, "command", (sys.executable, str(FAKE), actions))

    return act


@pytest.fixture
def own(product: Product) -> str:
    path = keep(product.services.settings, "own.json", made_profile(identity=SERVED))
    keep(product.services.settings, "other.json", made_profile(seed=1, identity=SERVED))
    return path.name


async def begin(product: Product, profile: str, **more: Any) -> Any:
    answer = await product.http.post("/api/admin/evaluation", json={"profile": profile, **more})
    return answer.status_code, answer.json()


async def found(product: Product, profile: str) -> Any:
    return (await product.http.get(f"/api/admin/profiles/{profile}/evaluations")).json()


async def test_a_profile_is_tried_against_what_runs(product: Product, own: str, acting: Acting) -> None:
    acting("quick")
    assert (await product.http.get("/api/admin/evaluation")).status_code == 404
    assert await found(product, own) == {}
    status, started = await begin(product, own)
    assert (status, started["profile"], started["other"], started["state"]) == (202, own, "none", "running")
    job = product.services.evaluation
    await job.wait()
    ended = (await product.http.get("/api/admin/evaluation")).json()
    assert (ended["state"], ended["done"], ended["total"], ended["message"]) == ("done", 2, 2, "")
    result = (await found(product, own))["none"]
    config = (await product.services.engine.memory())["config"]
    assert result["settings"] == {"retention": config["retention"], "alpha": config["alpha"]}
    (told,) = [line for line in job.log_tail() if line.startswith("options")]
    assert f"--model {product.services.supervisor.model_source}" in told
    assert not (product.services.settings.profiles_dir / ".evaluation").exists()
    listed = (await product.http.get("/api/admin/profiles")).json()["profiles"]
    assert {one["name"] for one in listed if not one["shipped"]} == {own, "other.json"}, (
        "results are no profiles"
    )
    assert [entry.action for entry in await product.services.store.list_audit()] == ["profile.evaluate"]


async def test_results_go_with_the_files_that_they_are_of(product: Product, own: str, acting: Acting) -> None:
    acting("quick")
    settings = product.services.settings
    for other in ("none", "other.json"):
        await begin(product, own, other=other)
        await product.services.evaluation.wait()
    assert set(await found(product, own)) == {"none", "other.json"}
    keep(settings, "other.json", made_profile(seed=2, identity=SERVED))
    assert set(await found(product, own)) == {"none"}, "what was found of another file is not shown"
    results = settings.profiles_dir / f"{own}.evaluations"
    assert (await product.http.delete(f"/api/admin/profiles/{own}")).status_code == 204
    assert not results.exists()
    keep(settings, own, made_profile(identity=SERVED))
    results.write_text("{ damaged")
    assert await found(product, own) == {}


async def test_cancel_ends_it_and_chat_goes_on(product: Product, own: str, acting: Acting) -> None:
    acting("slow")
    await begin(product, own)
    job = product.services.evaluation
    await eventually(lambda: job.record is not None and job.record.done == 1)
    assert job.record is not None
    assert job.record.remaining_seconds is not None
    assert (await begin(product, own))[0] == 409
    answer = await product.http.post("/api/admin/calibration", json={})
    assert (answer.status_code, "being tried" in answer.text) == (409, True)
    assert product.services.supervisor.status.ready
    cancelled = (await product.http.post("/api/admin/evaluation/cancel")).json()
    assert (cancelled["state"], cancelled["done"]) == ("cancelled", 1)
    assert (await product.http.post("/api/admin/evaluation/cancel")).status_code == 409
    assert await found(product, own) == {}


@pytest.mark.parametrize(
    ("actions", "says"),
    [("refuse", "MODEL: needs about 16.0 GiB of memory"), ("crash", "code 1. RuntimeError: boom")],
)
async def test_a_failure_says_why(
    product: Product, own: str, acting: Acting, actions: str, says: str
) -> None:
    acting(actions)
    await begin(product, own)
    await product.services.evaluation.wait()
    ended = (await product.http.get("/api/admin/evaluation")).json()
    assert ended["state"] == "failed"
    assert says in ended["message"]


async def test_what_makes_no_sense_is_refused(product: Product, own: str, acting: Acting) -> None:
    acting("quick")
    keep(product.services.settings, "small.json", made_profile(identity=IDENTITY))
    for profile, other, status, says in (
        ("gone.json", None, 404, "no profile of that name"),
        (own, "gone.json", 404, "no profile of that name"),
        (own, own, 400, "Choose another one"),
        ("small.json", None, 400, "for another model"),
    ):
        assert (await begin(product, profile, other=other))[0] == status
        assert says in str((await begin(product, profile, other=other))[1])
    assert product.services.evaluation.record is None


async def test_a_new_profile_is_tried_by_itself(
    product: Product, acting: Acting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting("quick")
    made_profile(identity=SERVED).save(tmp_path / "made.json")
    words = (sys.executable, str(FAKE_CALIBRATE), "quick", str(tmp_path / "made.json"))
    monkeypatch.setattr(Calibration, "command", words)
    made = (await product.http.post("/api/admin/calibration", json={"samples": 3})).json()["out"]
    await product.services.calibration.wait()
    await product.services.evaluation.wait()
    assert set(await found(product, made)) == {"none"}


async def test_of_several_at_once_one_begins(
    product: Product, own: str, acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting("slow")
    monkeypatch.setattr(Calibration, "command", (sys.executable, str(FAKE_CALIBRATE), "slow", "-"))
    evaluation, calibration = product.services.evaluation, product.services.calibration
    for jobs in (
        [
            evaluation.start(product.owner, own),
            evaluation.start(product.owner, own),
            calibration.start(product.owner, {"samples": 3}),
        ],
        [calibration.start(product.owner, {"samples": 3}), calibration.start(product.owner, {"samples": 3})],
    ):
        begun = await asyncio.gather(*jobs, return_exceptions=True)
        assert [isinstance(one, AlreadyRunning) for one in begun] == [False, *[True] * (len(jobs) - 1)], begun
        for job in (evaluation, calibration):
            if job.record is not None and job.record.running:
                await job.cancel(product.owner)
    resumed = await asyncio.gather(
        *(calibration.resume(product.owner) for _ in range(2)), return_exceptions=True
    )
    assert [isinstance(one, AlreadyRunning) for one in resumed] == [False, True]
    await calibration.cancel(product.owner)


async def test_an_engine_s_profile_that_is_not_listed_is_not_taken_for_none(
    product: Product, own: str, acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting("quick")
    config = (await product.services.engine.memory())["config"]

    async def elsewhere(job: Evaluation) -> dict[str, Any]:
        return {**config, "scope": "model", "profile": "/elsewhere/their.json"}

    monkeypatch.setattr(Evaluation, "_engine_config", elsewhere)
    status, said = await begin(product, own)
    assert status == 400
    assert "The engine runs with a profile that is not listed here: name another one." in str(said)
    assert (await begin(product, own, other="none"))[0] == 202
    await product.services.evaluation.wait()


async def test_nothing_is_left_of_a_profile_that_was_deleted_meanwhile(
    product: Product, own: str, acting: Acting
) -> None:
    acting("slow")
    job, folder = product.services.evaluation, product.services.settings.profiles_dir
    entry = await product.services.profiles.entry(own)
    assert (await product.http.delete(f"/api/admin/profiles/{own}")).status_code == 204
    out = folder / ".evaluation"
    out.write_text(json.dumps({"profiles": [{"profile": own}, {"profile": "none"}]}))
    with pytest.raises(ValueError, match="the profile was deleted"):
        job._keep(entry, out)
    assert not list(folder.glob("*.evaluations*"))


async def test_a_database_that_is_away_is_no_fault_of_the_calibration(
    product: Product, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*arguments: object) -> None:
        raise StorageUnavailable("away")

    monkeypatch.setattr(product.services.store, "add_audit", away)
    record = CalibrationRecord(out=own, model="m", source="s", options={}, user_id="me", started=0)
    await product.services.evaluation._after_calibration(record)
    assert product.services.evaluation.record is None

"""Calibration as a job: its progress and its ends, and that neither a cancel nor a restart loses anything."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.calibration import Calibration
from app.calibration_record import CalibrationRecord
from app.errors import BadRequest
from app.factory import build_services
from app.settings import Settings
from tests.app.conftest import Product, eventually, running_product
from tests.fake_engine import FakeConfig, FakeEngine, ThreadServer
from tests.tangram.calibrated import made_profile
from tests.tiny_models import random_llama

FAKE = Path(__file__).with_name("fake_calibrate.py")


@pytest.fixture
def acting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    made_profile().save(tmp_path / "made.json")

    def act(actions: str) -> None:
        words = (sys.executable, str(FAKE), actions, str(tmp_path / "made.json"))
        monkeypatch.setattr(Calibration, "command", words)

    return act


async def begin(product: Product, **options: Any) -> Any:
    answer = await product.http.post("/api/admin/calibration", json={"samples": 3, **options})
    assert answer.status_code == 202, answer.text
    return answer.json()


async def now(product: Product, log: int = 0) -> Any:
    return (await product.http.get("/api/admin/calibration", params={"log": log})).json()


async def actions_in(product: Product) -> list[str]:
    return [entry.action for entry in reversed(await product.services.store.list_audit())]


async def test_a_calibration_from_beginning_to_end(product: Product, acting: Callable[[str], None]) -> None:
    acting("quick")
    assert (await product.http.get("/api/admin/calibration")).status_code == 404
    started = await begin(product, retention=[0.5, 0.125], alpha=1.5)
    assert started["state"] == "running"
    assert "source" not in started, "where models lie is nobody's business"
    await product.services.calibration.wait()
    found = await now(product, log=50)
    assert (found["state"], found["done"], found["total"], found["message"]) == ("done", 3, 3, "")
    assert found["ended"] >= found["started"]
    (told,) = [line for line in found["log"] if line.startswith("options")]
    assert "--retention 0.5,0.125" in told
    assert "--data builtin --oracle kvzip --scope model --alpha 1.5 --length 3072" in told
    assert not any("tangram-progress" in line for line in found["log"])
    profiles = (await product.http.get("/api/admin/profiles")).json()["profiles"]
    assert [one["name"] for one in profiles if not one["shipped"]] == [found["out"]]
    assert await actions_in(product) == ["calibration.start"]
    for action in ("cancel", "resume"):
        assert (await product.http.post(f"/api/admin/calibration/{action}")).status_code == 409


async def test_cancel_keeps_what_was_found_and_resume_goes_on(
    product: Product, acting: Callable[[str], None]
) -> None:
    acting("slow")
    await begin(product)
    job = product.services.calibration
    await eventually(lambda: job.record is not None and job.record.done == 1)
    assert job.record is not None
    assert job.record.remaining_seconds is not None
    assert (await product.http.post("/api/admin/calibration", json={})).status_code == 409
    assert (await product.http.delete("/api/admin/calibration")).status_code == 409
    cancelled = (await product.http.post("/api/admin/calibration/cancel")).json()
    assert (cancelled["state"], cancelled["done"]) == ("cancelled", 1)
    state = job.folder / f"{cancelled['out']}.state"
    assert state.exists()
    acting("quick")
    assert (await product.http.post("/api/admin/calibration/resume")).status_code == 202
    await job.wait()
    assert (await now(product))["state"] == "done"
    assert (job.folder / cancelled["out"]).exists()
    assert not state.exists()
    assert await actions_in(product) == [f"calibration.{name}" for name in ("start", "cancel", "resume")]


async def test_discard_forgets(product: Product, acting: Callable[[str], None]) -> None:
    acting("slow")
    await begin(product)
    job = product.services.calibration
    await eventually(lambda: job.record is not None and job.record.done == 1)
    await product.http.post("/api/admin/calibration/cancel")
    assert (await product.http.delete("/api/admin/calibration")).status_code == 204
    assert list(job.folder.iterdir()) == []
    assert (await product.http.get("/api/admin/calibration")).status_code == 404


@pytest.mark.parametrize(
    ("actions", "says"),
    [("refuse", "--length: must be at most 7"), ("crash", "code 1. RuntimeError: out of memory")],
)
async def test_a_failure_says_why(
    product: Product, acting: Callable[[str], None], actions: str, says: str
) -> None:
    acting(actions)
    await begin(product)
    await product.services.calibration.wait()
    found = await now(product)
    assert found["state"] == "failed"
    assert says in found["message"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"retention": []}, "retention"),
        ({"retention": [1.5]}, "retention: must be above 0 and below 1"),
        ({"retention": [0.5, 0.5]}, "retention: names a share twice"),
        ({"length": 100}, "length: must be at least 640"),
        ({"alpha": -1}, "alpha: must be from 0 to 10"),
        ({"data": "/etc/passwd"}, "data"),
        ({"samples": 0}, "samples"),
    ],
)
async def test_options_that_cannot_work_are_refused(
    product: Product, options: dict[str, Any], says: str
) -> None:
    answer = await product.http.post("/api/admin/calibration", json=options)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert product.services.calibration.record is None


async def test_it_goes_on_when_the_app_is_back(settings: Settings, acting: Callable[[str], None]) -> None:
    acting("slow")
    async with running_product(settings) as product:
        out = (await begin(product))["out"]
        job = product.services.calibration
        await eventually(lambda: job.record is not None and job.record.done == 1)
    record = CalibrationRecord.load(settings.profiles_dir / "calibration.json")
    assert record is not None
    assert record.running
    acting("quick")
    async with running_product(settings, build_services(settings)) as product:
        await product.services.calibration.wait()
        found = await now(product)
        assert (found["state"], found["out"], found["done"]) == ("done", out, 3)


def test_a_damaged_record_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    assert CalibrationRecord.load(path) is None
    for content in ("", "[]", '{"out": 1}', '{"state": "x"}'):
        path.write_text(content)
        assert CalibrationRecord.load(path) is None


async def test_the_real_command_on_conversations(
    tmp_path: Path, bundled_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    model = random_llama(tmp_path / "tiny", bundled_model_dir)
    with ThreadServer(FakeEngine(FakeConfig(model=str(model), name="tiny")).app) as engine:
        settings = Settings(home=tmp_path / "home", model=str(model), engine_url=engine.url)
        async with running_product(settings) as product:
            options = {"samples": 2, "length": 640, "oracle": "keydiff", "data": "conversations"}
            await begin(product, **options)
            await product.services.calibration.wait()
            assert "nobody has allowed their conversations" in (await now(product))["message"]
            text = " ".join(f"the {number}th thing that is worth a word" for number in range(200))
            talk = await product.conversation()
            store = product.services.store
            _, reply = await store.add_turn(product.owner, talk, None, text, [1], "tiny")
            await store.finish_reply(product.owner, reply.id, "complete", "SECRET answer", [2], {}, "stop")
            consent = "/api/calibration-consent"
            assert (await product.http.get(consent)).json() == {"given": False, "given_at": None}
            assert (await product.http.put(consent, json={"given": True})).json()["given"] is True
            await begin(product, **options)
            await product.services.calibration.wait()
            found = await now(product, log=100)
            assert found["state"] == "done", found
            assert (found["done"], found["total"]) == (1, 1)
            assert not any("SECRET" in line or "thing" in line for line in found["log"])
            name = found["out"]
            about = (await product.http.get(f"/api/admin/profiles/{name}")).json()["about"]
            assert about["settings"]["data"] == "conversations"
            assert (about["layers"], about["kv_heads"], about["samples"]) == (3, 2, 1)
            assert about["retentions"] == [0.5, 0.25]
            stored = (settings.profiles_dir / name).read_text()
            assert "SECRET" not in stored
            assert json.loads(stored)["calibration"]["key_needs"]["scorer"] == "keydiff"
    await asyncio.sleep(0)


async def test_uploaded_texts_are_checked_kept_and_read(
    product: Product, acting: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    acting("quick")
    calibration = product.services.calibration
    user = (await product.services.store.list_users())[0].id
    refused = await product.http.post("/api/admin/calibration", json={"samples": 3, "data": "uploaded"})
    assert refused.status_code == 400
    assert "No texts were uploaded" in refused.text
    for content, says in (
        (b"", "is empty"),
        (b"\xff", "not UTF-8"),
        (b'{"text": "a"}\nnothing', "Line 2 is not JSON"),
        (b'{"text": ""}', "Line 1 is no object"),
        (b'["text"]', "Line 1 is no object"),
    ):
        with pytest.raises(BadRequest, match=says):
            await calibration.keep_texts(user, content)
    assert not calibration.texts.exists()
    assert await calibration.keep_texts(user, b'{"text": "one"}\n\n{"text": "two"}\n') == 2
    assert calibration.texts.stat().st_mode & 0o777 == 0o600
    await begin(product, data="uploaded")
    record = await calibration.wait()
    assert record is not None
    assert record.options["data"] == "uploaded", "where files lie is nobody's business"
    words = record.words(calibration.folder, {"uploaded": str(calibration.texts)})
    assert words[words.index("--data") + 1] == str(calibration.texts)
    assert "calibration.texts" in await actions_in(product)


async def test_how_long_it_will_take_is_told_by_the_last_one(product: Product, acting: Any) -> None:
    calibration = product.services.calibration
    assert calibration.estimate(50, 3072) is None
    acting("quick")
    await begin(product)
    await calibration.wait()
    record = calibration.record
    assert record is not None
    calibration.record = replace(record, started=0, ended=60_000, done=3, options={"length": 1000})
    assert calibration.estimate(6, 2000) == pytest.approx(240.0)

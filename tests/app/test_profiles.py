"""Profiles of an installation: listed, compared, chosen with a way back, thrown away."""

from __future__ import annotations

import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.factory import build_services
from app.managed_engine import ManagedEngine, Timing
from app.settings import Settings
from tangram.profile import Profile
from tests.app.conftest import Product, running_product
from tests.app.test_supervisor import FAKE
from tests.tangram.calibrated import IDENTITY, key_needs_of, made_profile

QUICK = Timing(backoff=0.05, max_backoff=0.2, stable=60, give_up=3, poll=0.05, health=0.1, sick=3, grace=2.0)
SERVED = replace(IDENTITY, layers=30, kv_heads=3)
"""The shape that the imitated engine has."""


def managed(tmp_path: Path, model: Path, **changed: Any) -> Settings:
    command = shlex.join([sys.executable, str(FAKE)])
    return Settings(home=tmp_path / "home", model=str(model), engine_command=command, **changed)


@asynccontextmanager
async def managed_product(settings: Settings) -> AsyncIterator[Product]:
    engine = ManagedEngine(settings, timing=QUICK)
    settings.make_folders()
    async with running_product(settings, build_services(settings, supervisor=engine)) as product:
        yield product


def keep(settings: Settings, name: str, profile: Profile) -> Path:
    path = settings.profiles_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.save(path)
    return path


async def listed(product: Product) -> Any:
    return (await product.http.get("/api/admin/profiles")).json()


async def choose(product: Product, profile: str) -> Any:
    answer = await product.http.post("/api/admin/profile", json={"profile": profile})
    assert answer.status_code == 202, answer.text
    await product.services.changes.wait()
    return (await listed(product))["activation"]


async def refused(product: Product, method: str, path: str, **options: Any) -> tuple[int, str]:
    answer = await product.http.request(method, f"/api/admin{path}", **options)
    return answer.status_code, answer.json()["error"]["message"]


async def test_choosing_going_back_and_a_restart_of_the_app(tmp_path: Path, bundled_model_dir: Path) -> None:
    settings = managed(tmp_path, bundled_model_dir)
    first = keep(settings, "first.json", made_profile(identity=SERVED))
    second = keep(settings, "second.json", made_profile(identity=SERVED, seed=1))
    async with managed_product(settings) as product:
        found = await listed(product)
        assert (found["in_force"], found["chosen"], found["before"]) == (None, "auto", None)
        assert (await refused(product, "POST", "/profile/back"))[0] == 400
        assert (await choose(product, "first.json"))["outcome"] == "applied"
        found = await listed(product)
        assert (found["in_force"], found["chosen"], found["before"]) == (str(first), "first.json", "auto")
        assert {one["name"] for one in found["profiles"] if one["in_force"]} == {"first.json"}
        await product.services.engine_settings.tune(product.owner, {"retention": 0.25})
        assert (await listed(product))["in_force"] == str(first), "tuning keeps the profile"
        assert (await choose(product, "second.json"))["outcome"] == "applied"
        config = (await product.services.engine.memory())["config"]
        assert (config["profile"], config["retention"]) == (str(second), 0.25)
        assert "in use" in (await refused(product, "DELETE", "/profiles/second.json"))[1]
        assert (await product.http.post("/api/admin/profile/back")).status_code == 202
        await product.services.changes.wait()
        assert (await listed(product))["in_force"] == str(first)
        assert (await product.http.delete("/api/admin/profiles/second.json")).status_code == 204
        assert not second.exists()
        assert "not there any more" in (await refused(product, "POST", "/profile/back"))[1]
        trail = [(one.action, one.after) for one in await product.services.store.list_audit()]
        assert trail[0] == ("profile.discard", None)
        assert trail[1] == ("engine.profile", str(first))
    async with managed_product(settings) as product:
        config = (await product.services.engine.memory())["config"]
        assert (config["profile"], config["retention"]) == (str(first), 0.25)
        assert (await choose(product, "none"))["outcome"] == "applied"
        assert (await listed(product))["in_force"] is None
    other = managed(tmp_path, bundled_model_dir).model_copy(update={"model": f"{bundled_model_dir}/."})
    async with managed_product(other) as product:
        assert (await listed(product))["chosen"] == "auto", "a profile is chosen for one model"


async def test_an_engine_that_does_not_start_goes_back(tmp_path: Path, bundled_model_dir: Path) -> None:
    settings = managed(tmp_path, bundled_model_dir)
    good = keep(settings, "good.json", made_profile(identity=SERVED))
    bad = keep(settings, "bad.json", made_profile(identity=SERVED))
    async with managed_product(settings) as product:
        await choose(product, "good.json")
        entry = await product.services.profiles.entry("bad.json")
        product.services.profiles._begin(product.owner, entry.name, f"{bad}.gone")
        await product.services.changes.wait()
        found = await listed(product)
        assert found["activation"]["outcome"] == "failed"
        assert "cannot be read" in found["activation"]["message"]
        assert "runs with the previous settings again" in found["activation"]["message"]
        assert (found["in_force"], found["chosen"]) == (str(good), "good.json")
        latest = (await product.services.store.list_audit())[0]
        assert latest.action == "engine.profile_failed"


async def test_what_cannot_be_chosen(product: Product, settings: Settings) -> None:
    keep(settings, "other.json", made_profile())
    keep(settings, "damaged.json", made_profile(identity=SERVED)).write_text("{")
    assert await refused(product, "POST", "/profile", json={"profile": "none.json"}) == (
        404,
        "There is no profile of that name.",
    )
    status, says = await refused(product, "POST", "/profile", json={"profile": "other.json"})
    assert (status, "4 layers x 3 KV heads, the served one has 30 x 3" in says) == (400, True)
    status, says = await refused(product, "POST", "/profile", json={"profile": "damaged.json"})
    assert (status, "is damaged" in says) == (400, True)
    for name in ("../chat.sqlite3", "..%2Fdb%2Fchat.sqlite3", "calibration.json"):
        assert (await refused(product, "DELETE", f"/profiles/{name}"))[0] == 404
    # This engine runs outside the app.
    keep(settings, "fits.json", made_profile(identity=SERVED))
    activation = await choose(product, "fits.json")
    assert (activation["outcome"], "runs outside the app" in activation["message"]) == ("failed", True)


async def test_what_is_told_of_profiles(product: Product, settings: Settings) -> None:
    whole = key_needs_of(made_profile(samples=12))
    keep(settings, "a.json", whole)
    keep(settings, "b.json", made_profile(samples=12, seed=1))
    keep(settings, "hand.json", Profile(whole.mean, whole.std))
    keep(settings, "small.json", Profile(((0.5,),), ((0.0,),)))
    every = {one["name"]: one for one in (await listed(product))["profiles"]}
    about = every["a.json"]["about"]
    assert (about["model"], about["samples"], about["watches_drift"]) == ("m", 12, True)
    assert about["settings"]["oracle"] == "kvzip"
    assert 0.9 < about["halves_agree"] <= 1
    assert every["hand.json"]["about"]["model"] is None
    advice = (await product.http.get("/api/admin/profiles/a.json")).json()["advice"]
    assert [one["alpha"] for one in advice["margins"]][:3] == [0.0, 0.5, 1.0]
    path = "/api/admin/profiles/a.json/compare"
    same = (await product.http.get(path, params={"other": "a.json"})).json()
    assert (same["mean_difference"], same["rank_correlation"]) == (0, pytest.approx(1))
    other = (await product.http.get(path, params={"other": "b.json", "retention": 0.25})).json()
    assert other["rank_correlation"] < 0.9
    assert other["largest_difference"] == pytest.approx(
        abs(other["heads"][0]["first"] - other["heads"][0]["second"])
    )
    assert (len(other["first"]), len(other["first"][0]), len(other["heads"])) == (4, 3, 10)
    equal = (await product.http.get(path, params={"other": "none", "retention": 0.25})).json()
    assert (equal["first"], equal["rank_correlation"]) == (other["first"], None)
    for params, says in (
        ({"other": "small.json"}, "cannot be compared"),
        ({"other": "b.json", "retention": 2}, "retention must be"),
        ({"other": "b.json", "alpha": "nan"}, "alpha must be"),
    ):
        assert says in (await refused(product, "GET", "/profiles/a.json/compare", params=params))[1]

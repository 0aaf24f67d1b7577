"""The engine's routes and metrics, on a scheduler and a worker that answer from their real sockets."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import tomllib
import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import State

from tangram import control
from tangram.client import EngineClient
from tangram.config import TangramConfig
from tangram.control import ControlServer
from tangram.drift import LEAST_CHUNKS, DriftMeter, KeyReference
from tangram.endpoints import TangramEndpoints
from tangram.engines import EngineCore
from tangram.errors import EngineRejected, EngineUnavailable
from tangram.metrics import COUNTERS
from tangram.predict import predict
from tangram.profile import ModelShape, Profile, build_geometry, in_force, load_profile
from tangram.runtime import Runtime
from tangram.seal_meter import BOUNDS, SealMeter
from tangram.telemetry import CacheSnapshot, Sequence
from tests.patience import PATIENCE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, about itself
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

SHAPE = ModelShape("m", 4, 3, 64, 2, "bfloat16", 8192)
PROFILE = Profile(
    tuple(tuple(0.1 + 0.07 * (3 * layer + head) for head in range(3)) for layer in range(4)),
    ((0.02,) * 3,) * 4,
    source="p.json",
)
SNAPSHOT = CacheSnapshot(
    5000,
    4000,
    [
        Sequence("run", "running", 2000, 3, 700, None),
        Sequence("idle a/b?c", "resident", 100, 0, 42, 3.5),
        Sequence("prefix", "prefix", 512, 1, 20, 9.0, 4),
    ],
    {name: 100 + index for index, name in enumerate(COUNTERS)},
    {"ring": 500, "sealed": 200, "resident": 42, "prefix": 258, "free": 4000},
    running=1,
    waiting=2,
)


class Engine:
    """The other two processes of an engine, in this one; ``asked``: what was to be evicted."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.meter = SealMeter()
        self.scheduler = ControlServer(
            control.socket_path("t"),
            {"memory": lambda _: SNAPSHOT.to_dict(), "evict": self.evict, "pin": self.pin},
        )
        self.worker = ControlServer(
            control.worker_socket("t"), {"worker": lambda _: self.meter.to_dict() | {"kernels": "native"}}
        )

    def evict(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append({name: value for name, value in asked.items() if name != "call"})
        return {"conversations": 2, "pages": 84}

    def pin(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append({name: value for name, value in asked.items() if name != "call"})
        refused = "there is no room" if asked["sequence"] == "large" else ""
        return {"conversations": int(asked["sequence"] == "x"), "refused": refused}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "socket_path", lambda instance: Path(folder, "tangram", f"{instance}.sock"))
        engine = Engine()
        yield engine
        engine.scheduler.close()
        engine.worker.close()


def runtime(**config: Any) -> Runtime:
    settings = TangramConfig.from_mapping({"group_size": 2, **config})
    profile = in_force(settings, SHAPE, PROFILE)
    return Runtime(settings, SHAPE, profile, build_geometry(settings, SHAPE, profile), "keyvalue")


def attached() -> tuple[TangramEndpoints, httpx.AsyncClient, httpx.ASGITransport]:
    """The routes on an application of their own, and a client of it."""
    endpoints, app = TangramEndpoints(), FastAPI()
    endpoints.attach_router(app)
    transport = httpx.ASGITransport(app=app)
    return endpoints, httpx.AsyncClient(transport=transport, base_url="http://e"), transport


def client(own: Runtime, keys: list[str] | None = None, api_key: str | None = None) -> EngineClient:
    endpoints, _, transport = attached()
    endpoints.serve(own, "t", keys or [])
    return EngineClient("http://e", api_key=api_key, transport=transport)


async def raw(own: Runtime, method: str, path: str, **options: Any) -> httpx.Response:
    instance, keys = options.pop("instance", "t"), options.pop("keys", None)
    endpoints, http, _ = attached()
    endpoints.serve(own, instance, keys or [])
    async with http:
        return await http.request(method, path, **options)


pytestmark = pytest.mark.usefixtures("engine")


def test_the_entry_point_gives_vllm_a_plugin() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    entry = EntryPoint("tangram", project["entry-points"]["vllm.endpoint_plugins"]["tangram"], "")
    plugin = entry.load()()
    assert isinstance(plugin, EndpointPlugin)
    assert plugin.required_tasks == ("generate",)


async def test_status_tells_what_runs() -> None:
    own = runtime(retention=0.25)
    async with client(own) as http:
        status = await http.status()
    assert status["model"]["name"] == "m"
    assert status["config"] == own.config.to_dict()
    assert status["profile"] == "p.json"
    assert status["geometry"]["tiers"] == own.geometry.num_tiers == 6
    assert status["geometry"]["row_width"] == own.geometry.row_width(8192)
    assert status["kernels"] == "native"
    assert status["requests"] == {"running": 1, "waiting": 2}
    assert status["conversations"] == {"running": 1, "resident": 1, "prefix": 1}
    assert status["pool"]["pages"] == SNAPSHOT.pages
    assert status["counters"] == SNAPSHOT.counters
    assert 0 <= status["uptime_seconds"] < 60
    assert status["vllm"].startswith("0.32")


async def test_profile_tells_the_budgets_and_what_they_cost() -> None:
    own = runtime(retention=0.25)
    async with client(own) as http:
        profile = await http.profile()
    assert (profile["source"], profile["scope"], profile["floor"]) == ("p.json", "model", 0.05)
    heads = profile["heads"]
    assert heads["mean"] == [list(row) for row in PROFILE.mean]
    assert heads["std"] == [list(row) for row in PROFILE.std]
    assert heads["need"] == PROFILE.needs(1.0)
    assert heads["budget"] == own.budgets()
    for layer in range(4):
        for head in range(3):
            tier = own.geometry.tiers[heads["tier"][layer][head]]
            assert (layer, head) in tier.heads
            assert heads["keep"][layer][head] == tier.keep
    pool = 5000 * own.geometry.page_bytes
    assert profile["prediction"] == predict(own.config, SHAPE, PROFILE).within(pool).to_dict()


@pytest.mark.parametrize(
    ("scope", "says"),
    [("model", "no profile is shipped for this model and none was named"), ("uniform", "scope uniform uses")],
)
async def test_without_a_profile_nothing_looks_calibrated(scope: str, says: str) -> None:
    own = runtime(retention=0.25, scope=scope)
    own = replace(own, profile=load_profile(own.config, SHAPE))
    own = replace(own, geometry=build_geometry(own.config, SHAPE, own.profile))
    async with client(own) as http:
        profile = await http.profile()
    assert says in profile["source"]
    assert "all heads get the same budget" in profile["source"]
    heads = profile["heads"]
    assert (profile["floor"], heads["mean"], heads["std"], heads["need"]) == (None,) * 4
    assert heads["budget"] == [pytest.approx([0.25] * 3)] * 4
    assert heads["keep"] == [[128] * 3] * 4


async def test_memory_of_all_and_of_one() -> None:
    async with client(runtime()) as http:
        whole = await http.memory()
        assert [sequence["id"] for sequence in whole["sequences"]] == ["run", "idle a/b?c", "prefix"]
        assert whole["pool"]["pages"] == SNAPSHOT.pages
        assert (whole["config"]["scorer"], whole["scorer"]) == ("auto", "keyvalue")
        one = await http.memory("idle a/b?c")
        assert one["heads"]["tokens_kept"] == [[100] * 3] * 4
        with pytest.raises(EngineRejected, match="gone is not in the pool: it was evicted or never") as error:
            await http.memory("gone")
    assert error.value.status == 404


async def test_a_preview_changes_what_was_asked_and_nothing_else() -> None:
    own = runtime()
    pool = 5000 * own.geometry.page_bytes
    async with client(own) as http:
        got = await http.preview(retention=0.25, group_size=5, alpha=2, lengths=[100, 9000])
        same = await http.preview()
    changed = replace(own.config, retention=0.25, group_size=5, alpha=2.0)
    assert got == predict(changed, SHAPE, PROFILE, [100, 9000]).within(pool).to_dict()
    assert same == predict(own.config, SHAPE, PROFILE).within(pool).to_dict()
    assert list(same["bytes_at"]) == ["4096", "8192"], "nothing beyond the model's greatest length"


async def test_previews_across_scopes_use_the_profile_that_would_decide(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    PROFILE.save(path)
    calibrated, uniform = (runtime(profile=str(path), scope=scope) for scope in ("model", "uniform"))
    async with client(calibrated) as http:
        as_uniform, as_model = await http.preview(scope="uniform"), await http.preview(scope="model")
        with pytest.raises(EngineRejected, match="scope: must be one of"):
            await http.preview(scope="head")
    assert as_uniform["heads"]["budget"] == [pytest.approx([0.5] * 3)] * 4
    assert len({tier["keep"] for tier in as_uniform["geometry"]["tiers"]}) == 1
    assert as_model["heads"]["budget"] == calibrated.budgets()
    async with client(uniform) as http:
        assert (await http.preview(scope="model"))["geometry"] == as_model["geometry"]
        assert (await http.preview())["geometry"] == as_uniform["geometry"]
        path.unlink()
        with pytest.raises(EngineRejected, match="cannot be read") as error:
            await http.preview(scope="model")
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "body: must be a JSON object"),
        ("[" * 100_000, "body: must be a JSON object"),
        ("[]", "body: must be a JSON object"),
        (
            '{"chunk": 1}',
            "chunk: cannot be previewed; there are: retention, group_size, alpha, scope, lengths",
        ),
        ('{"group_size": 13}', "group_size: must be at most the model's 12 heads"),
        ('{"retention": "x"}', "retention: must be a number"),
        ('{"lengths": []}', "lengths: must be a list"),
        ('{"lengths": null}', "lengths: must be a list"),
        ('{"lengths": [true]}', "lengths: must be a list"),
        ('{"lengths": [0]}', "lengths: must be a list"),
        ('{"lengths": 4096}', "lengths: must be a list"),
    ],
)
async def test_previews_that_make_no_sense_are_refused(content: str, says: str) -> None:
    answer = await raw(runtime(), "POST", "/tangram/preview", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(says)


async def test_evicting_passes_on_what_was_asked(engine: Engine) -> None:
    engine.asked.clear()
    async with client(runtime()) as http:
        assert await http.evict(sequence="x") == {"conversations": 2, "pages": 84}
        await http.evict(idle_seconds=0)
        await http.evict(everything=True)
    assert engine.asked == [{"sequence": "x"}, {"idle_seconds": 0}, {"all": True}]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "body: must be a JSON object"),
        ("{}", "body: must be one of"),
        ('{"all": true, "sequence": "x"}', "body: must be one of"),
        ('{"call": "memory"}', "body: must be one of"),
        ('{"all": false}', "all: must be true"),
        ('{"all": 1}', "all: must be true"),
        ('{"sequence": ""}', "sequence: must be the id"),
        ('{"sequence": 1}', "sequence: must be the id"),
        ('{"idle_seconds": -1}', "idle_seconds: must be a number"),
        ('{"idle_seconds": true}', "idle_seconds: must be a number"),
        ('{"idle_seconds": NaN}', "idle_seconds: must be a number"),
        ('{"idle_seconds": Infinity}', "idle_seconds: must be a number"),
        ('{"idle_seconds": "\\u00e9"}', "idle_seconds: must be a number"),
    ],
)
async def test_evictions_that_make_no_sense_are_refused(engine: Engine, content: str, says: str) -> None:
    engine.asked.clear()
    answer = await raw(runtime(), "POST", "/tangram/evict", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(says)
    assert engine.asked == []


ROUTES = [
    ("GET", "/tangram/status"),
    ("GET", "/tangram/profile"),
    ("GET", "/tangram/memory"),
    ("POST", "/tangram/preview"),
    ("POST", "/tangram/evict"),
    ("POST", "/tangram/pin"),
]
SENT: dict[str, dict[str, Any]] = {
    "/tangram/evict": {"all": True},
    "/tangram/pin": {"sequence": "x", "pinned": True},
}


async def test_pinning_passes_on_what_was_asked(engine: Engine) -> None:
    engine.asked.clear()
    async with client(runtime()) as http:
        assert await http.pin("x") == {"conversations": 1}
        await http.pin("x", pinned=False)
        for name, status, says in (("gone", 404, "is not in the pool"), ("large", 409, "there is no room")):
            with pytest.raises(EngineRejected, match=says) as error:
                await http.pin(name)
            assert error.value.status == status
    assert engine.asked[:2] == [{"sequence": "x", "pinned": True}, {"sequence": "x", "pinned": False}]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_an_engine_with_a_key_wants_it(engine: Engine, method: str, path: str) -> None:
    engine.asked.clear()
    options: dict[str, Any] = {"keys": ["right", "other"], "json": SENT.get(path, {})}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}):
        answer = await raw(runtime(), method, path, headers=headers, **options)
        assert answer.status_code == 401, headers
        assert "API key" in answer.json()["error"]["message"]
    assert engine.asked == []
    for key in ("right", "other"):
        answer = await raw(runtime(), method, path, headers={"Authorization": f"Bearer {key}"}, **options)
        assert answer.status_code == 200


async def test_the_client_s_key_opens() -> None:
    async with client(runtime(), ["right"], "right") as http:
        assert (await http.status())["kernels"] == "native"


@pytest.mark.parametrize(
    ("option", "variable", "opening"),
    [(["a"], "b", {"a"}), (None, "b", {"b"}), (None, None, {"a", "b", ""}), (["a", "b"], None, {"a", "b"})],
)
async def test_keys_are_taken_as_vllm_takes_them(
    monkeypatch: pytest.MonkeyPatch, option: list[str] | None, variable: str | None, opening: set[str]
) -> None:
    """The option wins over the variable."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    own, watched = runtime(), []
    monkeypatch.setattr(Runtime, "from_vllm", lambda _: own)
    monkeypatch.setattr("tangram.stall.watch", lambda *given: watched.append(given))
    endpoints, http, _ = attached()
    parallel = SimpleNamespace(data_parallel_size=1)
    engine_client = SimpleNamespace(vllm_config=SimpleNamespace(instance_id="t", parallel_config=parallel))
    await endpoints.init_state(engine_client, State(), Namespace(api_key=option))
    async with http:
        codes = {
            key: (await http.get("/tangram/memory", headers={"Authorization": f"Bearer {key}"})).status_code
            for key in ("a", "b", "")
        }
    assert codes == {key: 200 if key in opening else 401 for key in ("a", "b", "")}
    assert len(watched) == 1, "the engine is watched from then on"


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_a_scheduler_the_answer_is_503(method: str, path: str) -> None:
    answer = await raw(runtime(), method, path, json=SENT.get(path, {}), instance="nobody")
    assert answer.status_code == 503
    assert "scheduler does not answer" in answer.json()["error"]["message"]


def samples(text: str, engine: str = "0") -> dict[str, float]:
    """Name and labels of each sample of a rank's, or of none's, to its value; without the rank."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if not family.name.startswith("tangram_") or labels.pop("engine") == engine:
                name = sample.name + "".join(f" {name}={value}" for name, value in sorted(labels.items()))
                assert name not in found
                found[name] = sample.value
    return found


async def test_metrics_are_the_scheduler_s_and_the_worker_s_figures_beside_vllm_s(engine: Engine) -> None:
    engine.meter = SealMeter()
    for seconds in (0.0004, 0.02, 0.02, 7.0):
        engine.meter.observe(seconds)
    answer = await raw(runtime(), "GET", "/metrics", keys=["right"])  # open, as vLLM's own
    assert answer.headers["content-type"].startswith("text/plain")
    got = samples(answer.text)
    assert {kind: got[f"tangram_pages kind={kind}"] for kind in SNAPSHOT.pages} == SNAPSHOT.pages
    assert got["tangram_page_bytes"] == runtime().geometry.page_bytes
    assert got["tangram_conversations_resident"] == 1
    assert got["tangram_sequences_running"] == 1
    assert got["tangram_prefix_rows"] == 1
    assert {name: got[f"tangram_{name}_total"] for name in COUNTERS} == SNAPSHOT.counters
    assert got["tangram_up part=scheduler"] == got["tangram_up part=worker"] == 1
    assert got["tangram_seal_seconds_count"] == 4
    assert got["tangram_seal_seconds_sum"] == pytest.approx(7.0404)
    assert got["tangram_seal_seconds_bucket le=0.0005"] == 1
    assert got["tangram_seal_seconds_bucket le=0.025"] == 3
    assert got["tangram_seal_seconds_bucket le=1.0"] == 3
    assert got["tangram_seal_seconds_bucket le=+Inf"] == 4
    assert "python_info" in answer.text, "what vLLM's registry holds is there too"


async def test_drift_is_told_where_there_is_a_profile(engine: Engine) -> None:
    engine.meter = SealMeter()
    none = await raw(runtime(), "GET", "/metrics")
    assert "budget_drift" not in none.text
    assert (await raw(runtime(), "GET", "/tangram/status")).json()["drift"] is None
    samples_of_two_heads = np.array([[[0.4, 0.6]], [[0.5, 0.5]], [[0.6, 0.4]]])
    engine.meter.drift = DriftMeter(KeyReference.of(samples_of_two_heads), 2.0)
    for _ in range(LEAST_CHUNKS):
        engine.meter.drift.observe(np.array([[0.9, 0.1]]))
    got = samples((await raw(runtime(), "GET", "/metrics")).text)
    # Each sample lies 0.1 x 2/3 from the mean of all, and so 0.1 from the others'; live heads lie 0.4 off.
    assert got["tangram_budget_drift"] == pytest.approx(4.0)
    assert got["tangram_drift_chunks_total"] == LEAST_CHUNKS
    status = (await raw(runtime(), "GET", "/tangram/status")).json()["drift"]
    assert (status["drift"], status["difference"], status["reference"]) == (4.0, 0.4, "profile")
    assert "live" not in status
    assert (await raw(runtime(), "GET", "/tangram/profile")).json()["drift"]["live"] == [[0.9, 0.1]]


def dead(*_: Any, **__: Any) -> dict[str, Any]:
    raise EngineUnavailable("gone")


async def test_what_does_not_answer_keeps_its_last_figures_and_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoints, http, _ = attached()
    endpoints.serve(runtime(), "t", [])
    async with http:
        before = samples((await http.get("/metrics")).text)
        monkeypatch.setattr(EngineCore, "snapshot", dead)
        no_scheduler = samples((await http.get("/metrics")).text)
        monkeypatch.setattr(EngineCore, "worker", dead)
        neither = samples((await http.get("/metrics")).text)
    ours = {name for name in before if name.startswith("tangram_") and "tangram_up" not in name}
    assert ours
    for after, worker in ((no_scheduler, 1), (neither, 0)):
        assert {name: after[name] for name in ours} == {name: before[name] for name in ours}
        assert (after["tangram_up part=scheduler"], after["tangram_up part=worker"]) == (0, worker)


async def test_before_the_first_answer_there_is_only_that_it_is_down() -> None:
    got = samples((await raw(runtime(), "GET", "/metrics", instance="nobody")).text)
    assert {name: value for name, value in got.items() if name.startswith("tangram_")} == {
        "tangram_up part=scheduler": 0,
        "tangram_up part=worker": 0,
    }


async def test_metrics_with_several_api_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """prometheus_client's mode for several processes: figures of others come from files, ours stay true."""
    other = "from prometheus_client import Counter; Counter('vllm:other', 'x').inc(3)"
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", other], env=environment, check=True)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    got = samples((await raw(runtime(), "GET", "/metrics")).text)
    assert got["vllm:other_total"] == 3
    assert got["tangram_pages kind=free"] == 4000
    assert got["tangram_takeovers_total"] == SNAPSHOT.counters["takeovers"]


async def test_a_slow_scheduler_does_not_stop_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints, http, _ = attached()
    endpoints.serve(runtime(), "t", [])
    asked, answer_now = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> CacheSnapshot:
        asked.set()
        if not answer_now.wait(2 * PATIENCE):
            raise EngineUnavailable("the event loop was blocked")
        return SNAPSHOT

    monkeypatch.setattr(EngineCore, "snapshot", slow)
    async with http:
        for path in ("/metrics", "/tangram/memory"):
            asked.clear()
            answer_now.clear()
            answer = asyncio.create_task(http.get(path))
            await asyncio.to_thread(asked.wait, PATIENCE)  # the loop turns on while the scheduler is slow
            answer_now.set()
            response = await answer
            assert response.status_code == 200
            assert 'part="scheduler"} 0' not in response.text


def test_the_meter_counts_what_succeeds() -> None:
    meter = SealMeter()
    with meter.timing():
        pass
    with pytest.raises(ZeroDivisionError), meter.timing():
        _ = 1 / 0
    told = meter.to_dict()
    assert told["seals"] == told["buckets"][-1] == 1
    assert len(told["buckets"]) == len(BOUNDS) + 1
    assert 0 < told["seconds"] < PATIENCE

"""Several engine cores answer as one: each on sockets of its own, the sums true."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tangram import control
from tangram.client import EngineClient
from tangram.control import ControlServer
from tangram.engines import EngineCore, evict, instance_of, merged, merged_workers, of_each, own_instance
from tangram.errors import EngineRejected, EngineUnavailable
from tangram.predict import predict
from tangram.seal_meter import SealMeter
from tangram.telemetry import CacheSnapshot, Sequence, heads_report
from tests.tangram.test_endpoints import PROFILE, SHAPE, attached, runtime, samples

POOLS = (5000, 4000, 300)


def snapshot(core: int) -> CacheSnapshot:
    """A conversation in each, and one of a name that all have."""
    own = Sequence(f"of {core}", "resident", 1000 + core, 1, 100 + core, 2.0, resumes_at=1000)
    runs = Sequence("same", "running", 700, 0, 90, None, 2)
    kinds = {"ring": 90, "resident": 100 + core, "free": POOLS[core] - 190 - core}
    counters = {"takeovers": 10**core, "evictions": core}
    return CacheSnapshot(POOLS[core], kinds["free"], [own, runs], counters, kinds, 1 + core, core)


class Part:
    """A core's scheduler and worker."""

    def __init__(self, core: int) -> None:
        self.core, self.meter, self.asked = core, SealMeter(), list[dict[str, Any]]()
        for _ in range(core + 1):
            self.meter.observe(0.02)
        handlers = {"memory": lambda _: snapshot(core).to_dict(), "evict": self.evict, "pin": self.pin}
        self.servers = [
            ControlServer(control.socket_path(instance_of("several", core)), handlers),
            ControlServer(
                control.worker_socket(instance_of("several", core)),
                {"worker": lambda _: self.meter.to_dict() | {"kernels": "native"}},
            ),
        ]

    def evict(self, call: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(call)
        found = call.get("all") or call.get("sequence") == f"of {self.core}"
        return {"conversations": int(bool(found)), "pages": 100 if found else 0}

    def pin(self, call: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(call)
        full = call["sequence"] == "of 2"
        mine = call["sequence"] == f"of {self.core}"
        return {
            "conversations": int(mine and not full),
            "refused": "there is no room" if mine and full else "",
        }


@pytest.fixture
def parts() -> Iterator[list[Part]]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "socket_path", lambda instance: Path(folder, "tangram", f"{instance}.sock"))
        made = [Part(core) for core in range(3)]
        yield made
        for part in made:
            for server in part.servers:
                server.close()


def client() -> EngineClient:
    endpoints, _, transport = attached()
    endpoints.serve(runtime(), "several", [], 3)
    return EngineClient("http://e", transport=transport)


def test_cores_of_one_instance_have_names_of_their_own() -> None:
    names = [instance_of("abc", core) for core in range(3)]
    assert names[0] == "abc", "an engine of its own is found where it always was"
    assert len(set(names)) == 3
    paths = {str(path(name)) for name in names for path in (control.socket_path, control.worker_socket)}
    assert len(paths) == 6
    # What vLLM leaves of its configuration in the process of a dense model's core.
    parallel = SimpleNamespace(data_parallel_index=2, data_parallel_rank=0, data_parallel_size=1)
    config: Any = SimpleNamespace(instance_id="abc", parallel_config=parallel)
    assert own_instance(config) == names[2]


async def test_memory_is_the_sum_and_tells_the_cores_apart(parts: list[Part]) -> None:
    own = runtime()
    async with client() as http:
        whole, one = await http.memory(), await http.memory("of 1")
        with pytest.raises(EngineRejected, match="is not in the pool"):
            await http.memory("of 3")
    assert [(row["id"], row["engine"]) for row in whole["sequences"]] == [
        (name, core) for core in range(3) for name in (f"of {core}", "same")
    ]
    pool = whole["pool"]
    assert (pool["total_pages"], pool["running_pages"], pool["resident_pages"]) == (9300, 270, 303)
    assert pool["free_pages"] == pool["pages"]["free"] == 9300 - 270 - 303
    assert sum(pool["pages"].values()) == pool["total_pages"]
    assert whole["counters"] == {"takeovers": 111, "evictions": 3}
    assert whole["used_bytes"] == (270 + 303) * own.geometry.page_bytes
    tables = [heads_report(own.geometry, snapshot(core).sequences, own.budgets()) for core in range(3)]
    for name in ("tokens_kept", "pages"):
        for layer in range(SHAPE.layers):
            for head in range(SHAPE.kv_heads):
                assert whole["heads"][name][layer][head] == sum(table[name][layer][head] for table in tables)
    assert [(row["id"], row["engine"]) for row in one["sequences"]] == [("of 1", 1)]
    assert (
        one["heads"]["tokens_kept"]
        == heads_report(own.geometry, snapshot(1).sequences[:1], own.budgets())["tokens_kept"]
    )


async def test_status_counts_all_and_says_what_each_core_has(parts: list[Part]) -> None:
    async with client() as http:
        status = await http.status()
    assert status["requests"] == {"running": 6, "waiting": 3}
    assert status["conversations"] == {"running": 3, "resident": 3, "prefix": 0}
    assert status["seals"] == {"count": 6, "seconds": pytest.approx(0.12)}
    assert [one["engine"] for one in status["engines"]] == [0, 1, 2]
    assert [core["pool"]["total_pages"] for core in status["engines"]] == [*POOLS]
    assert [core["requests"] for core in status["engines"]] == [
        {"running": 1 + core, "waiting": core} for core in range(3)
    ]
    assert [core["conversations"] for core in status["engines"]] == [1, 1, 1]


async def test_predictions_fill_each_pool_by_itself(parts: list[Part]) -> None:
    own = runtime()
    lengths = [900, 8192]
    alone = [
        predict(own.config, SHAPE, PROFILE, lengths).within(pages * own.geometry.page_bytes)
        for pages in POOLS
    ]
    async with client() as http:
        preview, profile = await http.preview(lengths=lengths), await http.profile()
    for place, length in enumerate(lengths):
        fits = [one.at[place].conversations for one in alone]
        assert preview["conversations_at"][str(length)] == sum(fits) > max(fits)
    assert alone[2].at[1].conversations == 0, "the small pool holds none that long, and takes none away"
    assert profile["prediction"]["conversations_at"]["8192"] == preview["conversations_at"]["8192"]


async def test_evicting_and_pinning_find_the_rank(parts: list[Part]) -> None:
    async with client() as http:
        assert await http.evict(sequence="of 2") == {"conversations": 1, "pages": 100}
        assert await http.evict(everything=True) == {"conversations": 3, "pages": 300}
        assert await http.pin("of 1") == {"conversations": 1}
        with pytest.raises(EngineRejected, match="is not in the pool") as gone:
            await http.pin("of 9")
        with pytest.raises(EngineRejected, match="there is no room") as full:
            await http.pin("of 2")
    assert (gone.value.status, full.value.status) == (404, 409)
    assert {len(part.asked) for part in parts} == {5}


async def test_metrics_have_the_core_as_vllm_s_have(parts: list[Part]) -> None:
    async with client() as http:
        text = await http.metrics_text()
        for core in range(3):
            got = samples(text, str(core))
            assert got["tangram_up part=scheduler"] == got["tangram_up part=worker"] == 1
            assert got["tangram_pages kind=resident"] == 100 + core
            assert got["tangram_takeovers_total"] == 10**core
            assert (
                got["tangram_seal_seconds_count"] == got["tangram_seal_seconds_bucket le=0.025"] == core + 1
            )
            assert got["tangram_page_bytes"] == runtime().geometry.page_bytes
        assert text.count("# TYPE tangram_pages ") == 1, "one family, not one for each core"
        parts[1].servers[0].close()
        later = await http.metrics_text()
    assert samples(later, "1")["tangram_up part=scheduler"] == 0
    assert samples(later, "1")["tangram_pages kind=resident"] == 101, "its last ones"
    assert samples(later, "0")["tangram_up part=scheduler"] == 1


async def test_a_sum_without_one_core_is_not_told(parts: list[Part]) -> None:
    async with client() as http:
        parts[2].servers[1].close()
        status = await http.status()
        assert (status["seals"], status["kernels"]) == (None, None)
        parts[2].servers[0].close()
        for ask in (http.memory, http.status, http.profile, http.preview):
            with pytest.raises(EngineRejected, match="scheduler does not answer") as error:
                await ask()
            assert error.value.status == 503
    with pytest.raises(EngineUnavailable):
        of_each([EngineCore("several", 2)], EngineCore.snapshot)


def test_the_drift_is_that_of_the_core_furthest_off() -> None:
    def worker(drift: float | None, chunks: int) -> dict[str, Any]:
        told = {"drift": drift, "chunks": chunks}
        return SealMeter().to_dict() | {"kernels": "native", "drift": told}

    assert merged_workers([worker(1.0, 90), worker(2.5, 10)])["drift"] == {"drift": 2.5, "chunks": 10}
    assert merged_workers([worker(None, 3), worker(None, 5)])["drift"]["chunks"] == 5
    without = SealMeter().to_dict() | {"kernels": "native"}
    assert merged_workers([without] * 2)["drift"] is None
    assert merged_workers([without] * 2)["kernels"] == "native"
    assert (
        merged_workers([without, without | {"kernels": "native, reference"}])["kernels"]
        == "native, reference"
    )


def test_one_core_is_told_as_it_is(parts: list[Part]) -> None:
    assert merged([snapshot(1)]) == snapshot(1)
    (seen,) = of_each([EngineCore("several", 1)], EngineCore.snapshot)
    assert seen == replace(snapshot(1), sequences=[replace(row, engine=1) for row in snapshot(1).sequences])
    assert evict([EngineCore("several", 1)], {"sequence": "of 1"}) == {"conversations": 1, "pages": 100}

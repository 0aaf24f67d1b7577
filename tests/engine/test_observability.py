"""The routes and metrics of a whole `tangram serve`, against the formula; a small model, random weights."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tangram.client import CompletionRequest, EngineClient
from tangram.config import TangramConfig
from tangram.errors import EngineRejected
from tangram.predict import predict
from tangram.profile import ModelShape, Profile
from tests.engine.serving import LASTING, serving
from tests.patience import PATIENCE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
LAYERS, KV_HEADS, HEAD_SIZE = 3, 2, 32
SHAPE = ModelShape("tiny", LAYERS, KV_HEADS, HEAD_SIZE, 4, "float32", 1024)
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "vocab_size": 49152,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
PROFILE = Profile(((0.1, 0.2), (0.3, 0.5), (0.7, 0.9)), ((0.05, 0.0),) * LAYERS)
SETTINGS = {"retention": 0.4, "chunk": 64, "window": 32, "rewind": 32, "group_size": 4, "scorer": "keydiff"}
KEY = "engine-key"
POOL = 32 << 20
PLANNED = ("retention", "chunk", "window", "group_size", "profile")


@dataclass(frozen=True)
class Served:
    url: str
    config: TangramConfig


@pytest.fixture(scope="module")
def served(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    model = folder / "model"
    model.mkdir()
    for path in bundled_model_dir.glob("*token*"):
        shutil.copy(path, model)
    (model / "config.json").write_text(json.dumps(MODEL))
    PROFILE.save(folder / "profile.json")
    config = TangramConfig.from_mapping(SETTINGS | {"profile": str(folder / "profile.json")})
    options = [
        f"--tangram-{name.replace('_', '-')}={getattr(config, name)}" for name in (*SETTINGS, "profile")
    ]
    options += ["--load-format", "dummy", "--seed", "0", "--kv-cache-memory-bytes", str(POOL)]
    with serving(model, options, folder, KEY) as url:
        yield Served(url, config)


async def say(client: EngineClient, prompt: list[int], salt: str, answer: int) -> list[int]:
    """The ids of a greedy answer."""
    request = CompletionRequest(
        "tiny", prompt, answer, temperature=0.0, cache_salt=salt, extra={"ignore_eos": True}
    )
    return [token async for chunk in client.stream(request) for token in chunk.token_ids]


async def metrics(client: EngineClient) -> dict[str, float]:
    """The engine's samples without labels of vLLM's, by name and our labels but the only rank's."""
    return {
        sample.name
        + "".join(f" {value}" for name, value in sample.labels.items() if name != "engine"): sample.value
        for family in text_string_to_metric_families(await client.metrics_text())
        for sample in family.samples
        if sample.name.startswith(("tangram_", "vllm:prompt_tokens"))
    }


async def test_the_routes_and_the_metrics_agree_with_the_formula(served: Served) -> None:
    g = predict(served.config, SHAPE).geometry
    async with EngineClient(served.url, api_key=KEY) as client:
        long, short = list(range(100, 500)), list(range(1000, 1050))
        long += await say(client, long, "anna", 10)
        long += list(range(600, 620))
        long += await say(client, long, "anna", 10)  # continues its row
        short += await say(client, short, "berta", 5)
        held = {len(long) - 1: "anna", len(short) - 1: "berta"}  # the last sampled token was never fed
        pages = sum(map(g.idle_pages, held))

        memory = await client.memory()
        assert {sequence["tokens"] for sequence in memory["sequences"]} == set(held)
        for sequence in memory["sequences"]:
            assert sequence["state"] == "resident"
            assert sequence["pages"] == g.idle_pages(sequence["tokens"])
            assert sequence["sealed_chunks"] == g.sealed(sequence["tokens"])
            assert sequence["resumes_at"] == sequence["tokens"] // g.page_tokens * g.page_tokens
        assert memory["used_bytes"] == pages * g.page_bytes
        assert memory["full_cache_bytes"] == sum(map(g.full_bytes, held))
        for layer, row in enumerate(g.head_tier):
            for head, tier in enumerate(row):
                assert memory["heads"]["tokens_kept"][layer][head] == sum(
                    g.kept_tokens(n // g.page_tokens * g.page_tokens, tier) for n in held
                )
                chunks = sum(map(g.sealed, held))
                raw = (pages - chunks * g.pages_per_chunk) // g.num_tiers
                kept = chunks * g.keep[tier] // g.page_tokens
                assert memory["heads"]["pages"][layer][head] == raw + kept
        assert sum(memory["pool"]["pages"].values()) == memory["pool"]["total_pages"]

        longest = max(memory["sequences"], key=lambda sequence: sequence["tokens"])
        one = await client.memory(longest["id"])
        assert one["sequences"][0]["id"] == longest["id"]
        assert one["heads"]["tokens_kept"][2][1] == g.kept_tokens(longest["resumes_at"], g.head_tier[2][1])
        with pytest.raises(EngineRejected, match="is not in the pool") as error:
            await client.memory("cmpl-unknown")
        assert error.value.status == 404

        profile = await client.profile()
        assert profile["heads"]["mean"] == [list(row) for row in PROFILE.mean]
        pool = memory["pool"]["total_pages"] * g.page_bytes
        assert profile["prediction"] == predict(served.config, SHAPE).within(pool).to_dict()
        assert profile["prediction"]["empty_slots"] == g.keep[1] // g.page_tokens * 2, (
            "six heads in two groups of four"
        )
        preview = await client.preview(retention=0.2, lengths=[len(long) - 1])
        assert preview["pages_at"][str(len(long) - 1)] < g.pages(len(long) - 1)
        assert len(set((await client.preview(scope="uniform"))["heads"]["budget"][0])) == 1

        status = await client.status()
        assert (status["model"]["name"], status["profile"]) == ("tiny", served.config.profile)
        assert status["config"] == served.config.to_dict()
        assert status["kernels"] in ("native", "reference")
        assert status["requests"] == {"running": 0, "waiting": 0}
        assert status["conversations"] == {"running": 0, "resident": 2, "prefix": 0}
        seals = g.sealed(len(long) - 1) + g.sealed(len(short) - 1)
        assert status["counters"]["takeovers"] == 1
        assert status["seals"]["count"] == status["counters"]["seals"] == seals >= 5

        before = await metrics(client)
        assert before["tangram_up scheduler"] == before["tangram_up worker"] == 1
        assert before["tangram_pages resident"] == pages
        assert before["tangram_pages ring"] == before["tangram_pages sealed"] == 0
        assert before["tangram_pages free"] == memory["pool"]["total_pages"] - pages
        assert before["tangram_conversations_resident"] == 2
        assert before["tangram_takeovers_total"] == 1
        assert before["tangram_seal_seconds_count"] == before["tangram_seals_total"] == seals
        assert 0 < before["tangram_seal_seconds_sum"] < 60
        assert any(name.startswith("vllm:prompt_tokens") for name in before), "vLLM's own are still there"

        assert await client.evict(idle_seconds=3600) == {"conversations": 0, "pages": 0}
        assert await client.evict(sequence=longest["id"]) == {
            "conversations": 1,
            "pages": g.idle_pages(len(long) - 1),
        }
        assert await client.evict(everything=True) == {
            "conversations": 1,
            "pages": g.idle_pages(len(short) - 1),
        }
        after = await metrics(client)
        assert after["tangram_pages free"] == memory["pool"]["total_pages"]
        assert after["tangram_conversations_resident"] == 0
        assert after["tangram_evictions_total"] == 2
        assert (await client.memory())["sequences"] == []


async def test_a_running_request_is_seen_and_not_evicted(served: Served) -> None:
    g = predict(served.config, SHAPE).geometry
    async with EngineClient(served.url, api_key=KEY) as client:
        await client.evict(everything=True)
        prompt = list(range(2000, 2300))
        request = CompletionRequest("tiny", prompt, 700, temperature=0.0, cache_salt="c", extra=LASTING)
        async with contextlib.aclosing(client.stream(request)) as stream:  # its end aborts it
            await anext(stream)
            (running,) = (await client.memory())["sequences"]
            evicted = await client.evict(everything=True)
            seen = await metrics(client)
            (still,) = (await client.memory())["sequences"]
        assert running["state"] == still["state"] == "running"
        assert running["pages"] == g.pages(running["tokens"])
        assert evicted == {"conversations": 0, "pages": 0}
        assert seen["tangram_sequences_running"] == 1
        assert seen["tangram_pages ring"] == g.ring_pages
        assert seen["tangram_pages sealed"] % g.pages_per_chunk == 0
        assert seen["tangram_pages sealed"] >= g.sealed(300) * g.pages_per_chunk


async def test_the_key_guards_the_routes(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url, trust_env=False, timeout=PATIENCE) as http:
        for path in ("status", "profile", "memory"):
            assert (await http.get(f"/tangram/{path}")).status_code == 401
        assert (await http.post("/tangram/evict", json={"all": True})).status_code == 401
        assert (await http.post("/tangram/preview", json={})).status_code == 401
        assert (await http.get("/metrics")).status_code == 200


def planned(served: Served, *lengths: int) -> dict[str, Any]:
    """What `tangram plan` says from the model's config.json alone, for the engine's cache and settings."""
    model = Path(str(served.config.profile)).parent / "model"
    options = [f"--{name.replace('_', '-')}={getattr(served.config, name)}" for name in PLANNED]
    command = [sys.executable, "-m", "tangram", "plan", "--model", str(model), *options, "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--kv-cache-gib", str(POOL / 2**30), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TANGRAM_REWIND": str(served.config.rewind)}
    done = subprocess.run(
        [*command, "--lengths", *map(str, lengths)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


async def test_a_plan_predicts_the_pages_that_the_engine_holds(served: Served) -> None:
    async with EngineClient(served.url, api_key=KEY) as client:
        await client.evict(everything=True)
        prompt = list(range(2000, 2300))
        prompt += await say(client, prompt, "dora", 8)
        memory = await client.memory()
        (row,) = memory["sequences"]
        predicted = planned(served, row["tokens"], 1024)["prediction"]
        preview = await client.preview(lengths=[row["tokens"], 1024])
    assert predicted["idle_pages_at"][str(row["tokens"])] == row["pages"]
    for name in ("geometry", "pages_at", "idle_pages_at", "full_bytes_at", "row_width", "conversations_at"):
        assert predicted[name] == preview[name], name
    assert memory["pool"]["total_pages"] == POOL // memory["pool"]["page_bytes"] - 1


async def test_as_many_conversations_fit_as_a_plan_says_and_not_one_more(served: Served) -> None:
    tokens = 1000
    fit = planned(served, tokens)["prediction"]["conversations_at"][str(tokens)]
    assert 5 < fit < 60
    async with EngineClient(served.url, api_key=KEY) as client:
        await client.evict(everything=True)
        before = await metrics(client)

        async def gave_way() -> float:
            """Conversations that gave up pages, all or only those of raw tokens."""
            names, now = ("tangram_evictions_total", "tangram_thinned_total"), await metrics(client)
            return sum(now[name] - before[name] for name in names)

        async def converse(number: int) -> None:
            prompt = [1000 + number, *range(3000, 3000 + tokens - 8)]
            await say(client, prompt, f"guest {number}", 8)  # the last sampled token is never fed

        for number in range(fit):
            await converse(number)
        held = (await client.memory())["sequences"]
        assert [row["tokens"] for row in held] == [tokens] * fit
        assert await gave_way() == 0
        await converse(fit)
        assert await gave_way() >= 1

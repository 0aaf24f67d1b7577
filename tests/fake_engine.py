"""An imitation of the engine's HTTP interface, for tests that want an engine within milliseconds.

It "generates" through the model's real tokenizer and keeps the books that the real engine keeps: resident
sequences by salt, pages by the geometry's formula, aborted requests.

    python tests/fake_engine.py MODEL_DIR --port 8001 [--tangram-retention 0.25 ...]

What it answers is told by words in the last user message (otherwise it repeats it, and some lorem ipsum):
    /say TEXT       TEXT, word for word           /tokens N    N tokens of lorem ipsum
    /delay S        seconds before each token     /prefill S   seconds before the first token
    /die            the process ends after three tokens (in a test's own process: the stream breaks)
    /fail           an error event after three tokens, as when the engine's core dies
    /refuse         400 with a message
An alpha of 99 never becomes ready. Replies wait before their token number `FakeEngine.up_to`, for tests that
look at one that is being written.
"""

# ruff: noqa: E402 - the path comes first, so that it runs as a script
from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from tokenizers import Tokenizer

from app.sse import EventStream
from tangram import telemetry
from tangram.completion import RANK_HEADER
from tangram.geometry import Geometry, Tier
from tangram.predict import measure

LOREM = """lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore
et dolore magna aliqua ut enim ad minim veniam quis nostrud exercitation ullamco laboris nisi""".split()  # noqa: SIM905
LAYERS, KV_HEADS, HEAD_SIZE = 30, 3, 64
BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, float("inf"))
TOTAL_PAGES = 20_000


@dataclass
class FakeConfig:
    """What the command line says."""

    model: str
    name: str = "fake"
    max_model_len: int = 8192
    retention: float = 0.5
    group_size: int = 16
    alpha: float = 1.0
    token_seconds: float = 0.01
    api_key: str | None = None
    may_exit: bool = False
    profile: str | None = None
    ranks: int = 1


@dataclass
class Sequence:
    id: str
    salt: str | None
    tokens: list[int]
    touched: float = field(default_factory=time.monotonic)
    pinned: bool = False
    rank: int = 0


def geometry(config: FakeConfig, **changes: Any) -> tuple[Geometry, list[list[float]]]:
    """The cache's geometry and the budget of each head, uneven as calibrated ones are. Raises ValueError."""
    retention = float(changes.get("retention", config.retention))
    group = changes.get("group_size", config.group_size)
    if not 0 < retention <= 1:
        raise ValueError(f"retention: must be above 0 and at most 1, not {retention}")
    if not isinstance(group, int) or not 1 <= group <= LAYERS * KV_HEADS:
        raise ValueError(f"group_size: must be a whole number from 1 to {LAYERS * KV_HEADS}, not {group}")
    dice = random.Random(7)
    raw = {(layer, head): dice.betavariate(0.8, 1.6) for layer in range(LAYERS) for head in range(KV_HEADS)}
    low, high = 0.01, 20.0
    for _ in range(40):
        power = (low + high) / 2
        mean = sum(max(1 / 32, value**power) for value in raw.values()) / len(raw)
        low, high = (low, power) if mean < retention else (power, high)
    budget = {head: min(1.0, max(1 / 32, value**power)) for head, value in raw.items()}
    if retention == 1:
        budget = dict.fromkeys(raw, 1.0)
    heads = sorted(budget, key=lambda head: -budget[head])
    tiers = []
    for start in range(0, len(heads), group):
        members = tuple(heads[start : start + group])
        keep = max(1, round(sum(budget[head] for head in members) / len(members) * 32)) * 16
        tiers.append(Tier(keep, members))
    table = [[round(budget[layer, head], 4) for head in range(KV_HEADS)] for layer in range(LAYERS)]
    shape = Geometry(LAYERS, KV_HEADS, HEAD_SIZE, 2, 16, 512, 128, 64, group, tuple(tiers))
    return shape, table


class FakeEngine:
    """State of the imitation; `app` is its ASGI application."""

    def __init__(self, config: FakeConfig) -> None:
        self.config = config
        self.tokenizer = _tokenizer(config.model)
        self.start = self.tokenizer.token_to_id("<|im_start|>")
        self.end = self.tokenizer.token_to_id("<|im_end|>")
        self.geometry, self.budget = geometry(config)
        self.running: dict[str, Sequence] = {}
        self.resident: list[Sequence] = []
        self.requests: list[dict[str, Any]] = []
        self.asked_ranks: list[str | None] = []
        self.aborted = 0
        self.takeovers = 0
        self.healthy = True
        self.up_to = float("inf")
        self._ids = itertools.count()
        self.evictions = 0
        self.generated = 0
        self.first_tokens = [0] * len(BOUNDS)
        self.gaps = [0] * len(BOUNDS)
        self.app = self._routes()

    # ---- generation ------------------------------------------------------------------------

    def plan(self, prompt: list[int]) -> tuple[list[int], float, float, bool, bool]:
        """(ids of the reply, seconds a token, seconds before the first, whether to die, whether to fail)."""
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        user = text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        delay = float(_word(user, "delay", str(self.config.token_seconds)))
        prefill = float(_word(user, "prefill", "0"))
        if count := int(_word(user, "tokens", "0")):
            words = " ".join(LOREM[i % len(LOREM)] for i in range(count))
            ids = self.tokenizer.encode(words, add_special_tokens=False).ids[:count]
        elif say := re.search(r"/say (.*)", user, re.DOTALL):
            ids = self.tokenizer.encode(say[1], add_special_tokens=False).ids
        else:
            ids = self.tokenizer.encode(f"You said: {user[:200]}. {' '.join(LOREM[:20])}.").ids
        start = len(prompt) - prompt[::-1].index(self.start) if self.start in prompt else len(prompt)
        written = prompt[start + len(self.tokenizer.encode("assistant\n").ids) :]
        if written and ids[: len(written)] == written:
            ids = ids[len(written) :]  # a reply that goes on
        return [*ids, self.end], delay, prefill, "/die" in user, "/fail" in user

    async def generate(self, body: dict[str, Any], rank: int = 0) -> AsyncGenerator[bytes, None]:
        prompt, limit = list(body["prompt"]), int(body["max_tokens"])
        cached = self._take_over(prompt, body.get("cache_salt"), rank)
        name = body.get("request_id") or f"{next(self._ids):024x}"
        sequence = Sequence(f"cmpl-{name}-0-{next(self._ids):08x}", body.get("cache_salt"), list(prompt))
        sequence.rank = rank
        self.running[sequence.id] = sequence
        ids, delay, prefill, die, fail = self.plan(prompt)
        finished, total = False, 0
        stops, ended, sent = tuple(body.get("stop") or ()), set[int](), ""
        try:
            await asyncio.sleep(prefill)
            for place, done, token in (
                (place, *step) for place in range(body.get("n", 1)) for step in enumerate(ids, start=1)
            ):
                if place in ended:
                    continue
                if die and done > 3:
                    self._die()
                if fail and done > 3:
                    yield _event({"error": {"message": "EngineCore encountered an issue.", "code": 500}})
                    return
                await asyncio.sleep(delay)
                while done >= self.up_to:  # noqa: ASYNC110 - tests change it from their own thread
                    await asyncio.sleep(0.01)
                sent = "" if done == 1 else sent
                total += 1
                self.generated += 1
                _observe(self.gaps if done > 1 else self.first_tokens, delay if done > 1 else prefill + delay)
                if place == 0:
                    sequence.tokens.append(token)
                reason = "stop" if token == self.end else "length" if done >= limit else None
                text = self.tokenizer.decode(ids[:done], skip_special_tokens=True)
                hit = next((stop for stop in stops if stop in text), None)
                if hit:
                    text, reason = text[: text.index(hit)], "stop"
                text = text if reason else text.rstrip("\N{REPLACEMENT CHARACTER}")
                new, sent = text[len(sent) :], max(text, sent, key=len)
                choice = {"index": place, "text": new, "token_ids": [token], "finish_reason": reason}
                choice["stop_reason"] = hit if reason else None
                if body.get("logprobs") is not None:
                    choice["logprobs"] = _logprobs(token, body["logprobs"])
                if done == 1:
                    choice["prompt_token_ids"] = prompt
                yield _event({"id": sequence.id, "object": "text_completion", "choices": [choice]})
                if reason:
                    ended.add(place)
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": total,
                "total_tokens": len(prompt) + total,
                "prompt_tokens_details": {"cached_tokens": cached},
            }
            yield _event({"id": sequence.id, "choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
            finished = True
        finally:
            self.aborted += not finished
            del self.running[sequence.id]
            sequence.tokens.pop()  # the last token's keys are never computed
            sequence.touched = time.monotonic()
            self.resident = [*self.resident[-199:], sequence]

    def _take_over(self, prompt: list[int], salt: str | None, rank: int) -> int:
        """Tokens of the prompt's start that a resident sequence of the same salt holds in that rank."""
        best, found = 0, None
        for sequence in self.resident:
            if (sequence.salt, sequence.rank) == (salt, rank):
                shared = _shared(sequence.tokens, prompt[:-1])
                if shared > best:
                    best, found = shared, sequence
        if found is not None:
            self.resident.remove(found)
            self.takeovers += 1
        return best

    def _die(self) -> None:
        if self.config.may_exit:
            print("RuntimeError: asked to die", file=sys.stderr, flush=True)
            os._exit(9)
        raise ConnectionError("asked to die")

    # ---- reports ---------------------------------------------------------------------------

    def evict(self, asked: dict[str, Any]) -> dict[str, int]:
        now = time.monotonic()
        gone = [
            s
            for s in self.resident
            if s.id == asked.get("sequence")
            or (not s.pinned and (asked.get("all") or now - s.touched >= asked.get("idle_seconds", 1e9)))
        ]
        self.resident = [s for s in self.resident if s not in gone]
        self.evictions += len(gone)
        return {
            "conversations": len(gone),
            "pages": sum(self.geometry.idle_pages(len(s.tokens)) for s in gone),
        }

    def pin(self, asked: dict[str, Any]) -> int:
        found = [s for s in (*self.running.values(), *self.resident) if s.id == asked["sequence"]]
        for sequence in found:
            sequence.pinned = asked["pinned"]
        return len(found)

    def memory(self, wanted: str | None = None) -> dict[str, Any]:
        shape, now = self.geometry, time.monotonic()
        everything = [("running", s) for s in self.running.values()] + [
            ("resident", s) for s in self.resident
        ]
        chosen = [(state, s) for state, s in everything if wanted in (None, s.id)]
        lengths = [len(sequence.tokens) for _, sequence in chosen]
        sequences = [_seen(shape, state, sequence, now) for state, sequence in everything]
        used = {kind: sum(s.pages for s in sequences if s.state == kind) for kind in ("running", "resident")}
        shown = [s for s in sequences if wanted in (None, s.id)]
        sealed = sum(s.sealed_chunks for s in sequences if s.state == "running") * shape.pages_per_chunk
        free = TOTAL_PAGES * self.config.ranks - sum(used.values())
        kinds = {"ring": used["running"] - sealed, "sealed": sealed, "resident": used["resident"]}
        return {
            "time": time.time(),
            "model": {
                "name": self.config.name,
                "layers": LAYERS,
                "kv_heads": KV_HEADS,
                "head_size": HEAD_SIZE,
                "dtype": "bfloat16",
                "max_model_len": self.config.max_model_len,
            },
            "config": {
                "retention": self.config.retention,
                "chunk": shape.chunk,
                "window": shape.window,
                "sink": 4,
                "page_tokens": shape.page_tokens,
                "group_size": self.config.group_size,
                "scope": "model",
                "scorer": "auto",
                "alpha": self.config.alpha,
                "rewind": shape.rewind,
                "profile": self.config.profile,
            },
            "geometry": shape.to_dict(),
            "pool": {
                "total_pages": TOTAL_PAGES * self.config.ranks,
                "free_pages": free,
                "running_pages": used["running"],
                "resident_pages": used["resident"],
                "page_bytes": shape.page_bytes,
                "pages": kinds | {"prefix": 0, "free": free},
            },
            "heads": telemetry.heads_report(shape, shown, self.budget),
            "sequences": [asdict(sequence) for sequence in shown],
            "scorer": "keyvalue",
            "engines": self._engines(sequences),
            "full_cache_bytes": sum(shape.full_bytes(n) for n in lengths),
            "used_bytes": sum(s.pages for s in shown) * shape.page_bytes,
            "counters": {
                "takeovers": self.takeovers,
                "evictions": self.evictions,
                "reprefilled_tokens": 0,
                "misses": 0,
                "seals": sum(shape.sealed(n) for n in lengths),
                "preemptions": 0,
            },
        }

    def _engines(self, sequences: list[telemetry.Sequence]) -> list[dict[str, Any]]:
        of = [[s for s in sequences if s.engine == rank] for rank in range(self.config.ranks)]
        return [
            {
                "engine": rank,
                "requests": {"running": sum(s.state == "running" for s in own), "waiting": 0},
                "conversations": sum(s.state == "resident" for s in own),
                "pool": {
                    "total_pages": TOTAL_PAGES,
                    "free_pages": TOTAL_PAGES - sum(s.pages for s in own),
                },
            }
            for rank, own in enumerate(of)
        ]

    def preview(self, changes: dict[str, Any]) -> dict[str, Any]:
        shape, budget = geometry(self.config, **changes)
        warnings = ["group_size: more than a sixth of all heads"] if shape.num_tiers < 6 else []
        found = measure(shape, budget, self.config.max_model_len, warnings=warnings)
        return found.within(TOTAL_PAGES * self.geometry.page_bytes).to_dict()

    # ---- HTTP ------------------------------------------------------------------------------

    def _routes(self) -> FastAPI:
        app = FastAPI()

        def refused(request: Request) -> Response | None:
            expected = f"Bearer {self.config.api_key}"
            if self.config.api_key and request.headers.get("authorization") != expected:
                return JSONResponse({"error": "Unauthorized"}, status_code=401)
            return None

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=200 if self.healthy else 503)

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            card = {"id": self.config.name, "object": "model", "max_model_len": self.config.max_model_len}
            return refused(request) or JSONResponse({"object": "list", "data": [card]})

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            if answer := refused(request):
                return answer
            body = await request.json()
            self.requests.append(body)
            asked = request.headers.get(RANK_HEADER)
            self.asked_ranks.append(asked)
            if not 0 <= (rank := int(asked or 0)) < self.config.ranks:
                return _error(400, f"data_parallel_rank {rank} is out of range [0, {self.config.ranks}).")
            if body["model"] != self.config.name:
                return _error(404, f"The model `{body['model']}` does not exist.")
            if len(body["prompt"]) + body["max_tokens"] > self.config.max_model_len:
                return _error(
                    400, f"This model's maximum context length is {self.config.max_model_len} tokens."
                )
            if "/refuse" in self.tokenizer.decode(body["prompt"][-40:]):
                return _error(400, "no, thank you")
            return EventStream(self.generate(body, rank))

        @app.get("/tangram/memory")
        async def memory(request: Request) -> Response:
            wanted = request.query_params.get("sequence")
            if wanted and wanted not in {s.id for s in (*self.running.values(), *self.resident)}:
                return _error(404, f"sequence: {wanted!r} is not in the pool")
            return refused(request) or JSONResponse(self.memory(wanted))

        @app.post("/tangram/evict")
        async def evict(request: Request) -> Response:
            return refused(request) or JSONResponse(self.evict(await request.json()))

        @app.post("/tangram/pin")
        async def pin(request: Request) -> Response:
            if answer := refused(request):
                return answer
            found = self.pin(await request.json())
            return JSONResponse({"conversations": found}) if found else _error(404, "it is not in the pool")

        @app.get("/tangram/status")
        async def status(request: Request) -> Response:
            about = {"version": "0", "vllm": "imitated", "kernels": "none"} | {
                "profile": self.config.profile or "uniform",
                "pool": {"total_pages": TOTAL_PAGES},
                "geometry": {"row_width": self.geometry.row_width(self.config.max_model_len)},
                "model": {"max_model_len": self.config.max_model_len},
                "engines": self.memory()["engines"],
            }
            return refused(request) or JSONResponse(about)

        @app.post("/tangram/preview")
        async def preview(request: Request) -> Response:
            if answer := refused(request):
                return answer
            try:
                return JSONResponse(self.preview(await request.json()))
            except (ValueError, TypeError) as error:
                return _error(400, str(error))

        @app.get("/metrics")
        async def metrics() -> Response:
            return PlainTextResponse(
                "# TYPE vllm:num_requests_running gauge\n"
                f"vllm:num_requests_running {len(self.running)}\n"
                "# TYPE vllm:num_requests_waiting gauge\n"
                "vllm:num_requests_waiting 0\n"
                "# TYPE vllm:generation_tokens counter\n"
                f"vllm:generation_tokens_total {self.generated}\n"
                + _histogram("vllm:time_to_first_token_seconds", self.first_tokens)
                + _histogram("vllm:inter_token_latency_seconds", self.gaps)
            )

        @app.get("/fake/state")
        async def state() -> dict[str, Any]:
            return {
                "pid": os.getpid(),
                "running": len(self.running),
                "resident": len(self.resident),
                "aborted": self.aborted,
                "requests": self.requests[-20:],
                "config": {"retention": self.config.retention, "group_size": self.config.group_size},
            }

        @app.post("/fake/health")
        async def set_health(request: Request) -> dict[str, bool]:
            self.healthy = bool((await request.json())["healthy"])
            return {"healthy": self.healthy}

        return app


@functools.cache
def _tokenizer(model: str) -> Tokenizer:
    return Tokenizer.from_file(str(Path(model) / "tokenizer.json"))


def _shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _seen(shape: Geometry, state: str, sequence: Sequence, now: float) -> telemetry.Sequence:
    n = len(sequence.tokens)
    if state == "running":
        held = (shape.sealed(n), shape.pages(n), None)
        return telemetry.Sequence(sequence.id, state, n, *held, pinned=sequence.pinned, engine=sequence.rank)
    last, idle = n // shape.page_tokens * shape.page_tokens, now - sequence.touched
    held = (shape.sealed(last - 1), shape.idle_pages(n), idle)
    return telemetry.Sequence(
        sequence.id, state, n, *held, resumes_at=last, pinned=sequence.pinned, engine=sequence.rank
    )


def _word(text: str, name: str, default: str) -> str:
    found = re.search(rf"/{name} ([\d.]+\d|\d+)", text)
    return found[1] if found else default


def _logprobs(token: int, top: int) -> dict[str, Any]:
    """As vLLM with return_tokens_as_token_ids: the chosen token is the likeliest, its neighbours follow."""
    likeliest = {f"token_id:{token + place}": -0.5 - place for place in range(top + 1)}
    name = f"token_id:{token}"
    return {"tokens": [name], "token_logprobs": [-0.5], "top_logprobs": [likeliest], "text_offset": [0]}


def _observe(counts: list[int], seconds: float) -> None:
    for place, bound in enumerate(BOUNDS):
        counts[place] += seconds <= bound


def _histogram(name: str, counts: list[int]) -> str:
    bounds = [str(bound) if bound < float("inf") else "+Inf" for bound in BOUNDS]
    buckets = [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in zip(bounds, counts, strict=True)]
    return "\n".join(
        [f"# TYPE {name} histogram", *buckets, f"{name}_count {counts[-1]}", f"{name}_sum 0", ""]
    )


def _event(data: Any) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


class ThreadServer:
    """Serves an ASGI app on a free loopback port from a thread, for the length of a `with`."""

    def __init__(self, app: Any) -> None:
        self._server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self.url = ""

    def __enter__(self) -> ThreadServer:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
            self._thread.join(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description="Imitates a Tangram engine.")
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--served-model-name", default=None)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument(
        "--tangram-retention", type=float, default=float(os.environ.get("TANGRAM_RETENTION", 0.5))
    )
    parser.add_argument("--tangram-group-size", type=int, default=16)
    parser.add_argument("--tangram-alpha", type=float, default=1.0)
    parser.add_argument("--tangram-profile", default=None)
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--fake-token-seconds", type=float, default=0.01)
    parser.add_argument("--fake-start-seconds", type=float, default=0.0)
    parser.add_argument("--fake-fail", default=None, help="print this and exit with 1 instead of serving")
    parser.add_argument("--fake-deaf", action="store_true", help="ignore SIGTERM")
    options, _ = parser.parse_known_args()
    if options.fake_fail:
        print(options.fake_fail, file=sys.stderr, flush=True)
        sys.exit(1)
    config = FakeConfig(
        model=options.model,
        name=options.served_model_name or options.model,
        max_model_len=options.max_model_len,
        retention=options.tangram_retention,
        group_size=options.tangram_group_size,
        alpha=options.tangram_alpha,
        token_seconds=options.fake_token_seconds,
        api_key=os.environ.get("VLLM_API_KEY"),
        may_exit=True,
        profile=None if options.tangram_profile in (None, "auto", "none") else options.tangram_profile,
        ranks=options.data_parallel_size,
    )
    if config.profile is not None and not Path(config.profile).is_file():
        print(f"tangram: error: profile {config.profile} cannot be read", file=sys.stderr, flush=True)
        sys.exit(2)
    print("Starting to load model", options.model, flush=True)
    try:
        engine = FakeEngine(config)
    except ValueError as error:
        print(f"tangram: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    time.sleep(options.fake_start_seconds if config.alpha < 99 else 600)
    settings = uvicorn.Config(engine.app, host=options.host, port=options.port, log_level="info")
    if options.fake_deaf:
        _serve_deaf(settings)
    else:
        uvicorn.run(
            engine.app, host=options.host, port=options.port, log_level="info", timeout_graceful_shutdown=1
        )


def _serve_deaf(settings: uvicorn.Config) -> None:
    import signal

    class Deaf(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            print("SIGTERM ignored", flush=True)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Deaf(settings).run()


if __name__ == "__main__":
    main()

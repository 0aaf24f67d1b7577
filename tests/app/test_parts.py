"""The small parts on their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from app import engine_log
from app.__main__ import main, server_config
from app.accounts import is_local
from app.engine_log import EngineLog
from app.errors import BadRequest, TooManyAttempts
from app.events import Sampling
from app.job import Job
from app.redaction import redact
from app.sampling import checked, completion_budget, resolve
from app.settings import Settings
from app.throttle import Throttle
from tangram.client import CompletionChunk, CompletionRequest, EngineClient, Usage
from tangram.errors import EngineRejected, EngineUnavailable


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer SECRETSECRET",
        "api_key='SECRETSECRET', port=8000",
        "VLLM_API_KEY=SECRETSECRET",
        '{"cache_salt": "SECRETSECRET"}',
        "hf_SECRETSECRET sk-SECRETSECRET tc-SECRETSECRET",
        "cloning https://user:SECRETSECRET@host/x",
        "password=SECRETSECRET",
    ],
)
def test_secrets_are_taken_out(line: str) -> None:
    assert "SECRET" not in redact(line)
    assert "[redacted]" in redact(line)


@pytest.mark.parametrize(
    "line", ["api_key=None", "max_tokens=512 tokens: 17", "tokenizer='/models/m'", "token ids"]
)
def test_other_text_stays(line: str) -> None:
    assert redact(line) == line


async def test_engine_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_log, "_MAX_BYTES", 2000)
    phases: list[str] = []
    log = EngineLog(tmp_path / "engine.log", phases.append)
    stream = asyncio.StreamReader()
    stream.feed_data(b"Starting to load model x\nGPU KV cache size: 7 tokens\n\xff\xfe half\n")
    stream.feed_data(b"y" * 10_000 + b"\nINFO 12:00 [core.py:1] ValueError: too small\nlast")
    stream.feed_eof()
    await log.pump(stream)
    assert phases == ["loading the model", "sizing the cache"]
    assert log.failure() == "ValueError: too small"
    log.write("RuntimeError: Engine core initialization failed. See root cause above.")
    log.write("(worker pid=7) ERROR 12:00:01 [x.py:953] ValueError: Available memory (1/2 GiB) is too low")
    log.write("RuntimeError: Engine core initialization failed. See root cause above.")
    assert log.failure() == "ValueError: Available memory (1/2 GiB) is too low"
    log.write("last")
    assert log.tail(1) == ["last"]
    assert max(map(len, log.tail())) <= 8000
    for _ in range(100):
        log.write("x" * 100)
    assert (tmp_path / "engine.log").stat().st_size < 2200
    assert (tmp_path / "engine.log.1").exists()
    log.mark("start")
    assert log.failure() == "==== start"
    log.close()


def test_sampling() -> None:
    assert checked({"temperature": 1, "top_p": 0.5, "max_tokens": 7, "seed": -1, "other": "x"}) == Sampling(
        1.0, 0.5, 7, -1
    )
    for name, value in (
        ("temperature", "1"),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("max_tokens", 1.5),
        ("max_tokens", 0),
        ("seed", True),
    ):
        with pytest.raises(BadRequest, match=name):
            checked({name: value})
    chosen = resolve(Sampling(top_p=0.1), {"top_p": 0.2, "max_tokens": 3}, {"temperature": 0.9, "top_p": 0.3})
    assert chosen == Sampling(temperature=0.9, top_p=0.1, max_tokens=3)
    assert completion_budget(None, 100, 4000) == 3900
    assert completion_budget(50, 100, 4000) == 50
    assert completion_budget(50, 3990, 4000) == 10
    assert completion_budget(None, 100, 0) > 0


def test_throttle(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("app.throttle.time.monotonic", lambda: now)
    throttle = Throttle(limit=2, window=10)
    for _ in range(2):
        throttle.check("a")
        throttle.note("a")
    with pytest.raises(TooManyAttempts) as caught:
        throttle.check("a")
    assert caught.value.retry_after == 10
    throttle.check("b")
    throttle.undo("a")
    throttle.check("a")
    throttle.note("a")
    now += 10
    throttle.check("a")


@pytest.mark.parametrize(
    ("trusted", "headers", "seen"),
    [
        ("", {}, ["127.0.0.1", "http", True]),
        ("", {"X-Forwarded-For": "10.0.0.7", "X-Forwarded-Proto": "https"}, ["127.0.0.1", "http", False]),
        ("", {"X-Forwarded-For": "127.0.0.1"}, ["127.0.0.1", "http", False]),
        ("", {"Forwarded": "for=127.0.0.1"}, ["127.0.0.1", "http", False]),
        ("10.0.0.9", {"X-Forwarded-For": "127.0.0.1"}, ["127.0.0.1", "http", False]),
        ("10.0.0.9, 127.0.0.0/8", {"X-Forwarded-For": "10.0.0.7"}, ["10.0.0.7", "http", False]),
        (
            "127.0.0.1",
            {"X-Forwarded-For": "1.2.3.4", "X-Forwarded-Proto": "https"},
            ["1.2.3.4", "https", False],
        ),
    ],
)
async def test_proxies_are_believed_when_named(
    trusted: str, headers: dict[str, str], seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probe(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        client = request.client.host if request.client else ""
        await JSONResponse([client, request.url.scheme, is_local(request)])(scope, receive, send)

    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own variable has no say
    config = server_config(probe, Settings(trusted_proxies=trusted))
    config.load()
    transport = httpx.ASGITransport(config.loaded_app, client=("127.0.0.1", 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as http:
        assert (await http.get("/", headers=headers)).json() == seen


@pytest.mark.parametrize("bad", ["*", "proxy.example", "127.0.0.1 10.0.0.1"])
def test_trusted_proxies_are_addresses(bad: str) -> None:
    with pytest.raises(ValidationError, match="must be IP addresses or networks"):
        Settings(trusted_proxies=bad)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "h"))
    monkeypatch.setenv("MODEL", "a/b")
    monkeypatch.setenv("TANGRAM_PORT", "9000")
    monkeypatch.setenv("TANGRAM_RETENTION", "0.25")  # the engine's, not ours
    settings = Settings()
    assert (settings.model, settings.port, settings.host) == ("a/b", 9000, "127.0.0.1")
    settings.make_folders()
    assert (tmp_path / "h").stat().st_mode & 0o077 == 0
    assert settings.database_path == tmp_path / "h" / "db" / "chat.sqlite3"


# ---- the engine's client ---------------------------------------------------------------------


def client(handler: Any) -> EngineClient:
    return EngineClient("http://engine", api_key="k", transport=httpx.MockTransport(handler))


async def collect(engine: EngineClient, **fields: Any) -> list[CompletionChunk]:
    request = CompletionRequest(model="m", prompt=[1, 2], max_tokens=3, **fields)
    return [chunk async for chunk in engine.stream(request)]


async def test_client_reads_chunks_and_usage() -> None:
    seen: dict[str, Any] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        import json

        seen.update(json.loads(request.content), key=request.headers["authorization"])
        return httpx.Response(
            200,
            text=': ping\n\ndata: {"choices":[{"text":"a","token_ids":[5],"finish_reason":null}]}\n\n'
            'data: {"choices":[{"text":"","token_ids":null,"finish_reason":"stop"}]}\n\n'
            'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3,'
            '"prompt_tokens_details":{"cached_tokens":1}}}\n\ndata: [DONE]\n\n',
        )

    async with client(answer) as engine:
        chunks = await collect(engine, temperature=0.0, stop=("x",), cache_salt="s", extra={"top_k": 4})
    assert chunks == [
        CompletionChunk("a", (5,)),
        CompletionChunk("", (), "stop"),
        CompletionChunk("", (), None, Usage(2, 1, 1)),
    ]
    assert seen["key"] == "Bearer k"
    assert (seen["prompt"], seen["top_k"], seen["temperature"], seen["stop"]) == ([1, 2], 4, 0.0, ["x"])
    assert (seen["stream"], seen["return_token_ids"], seen["cache_salt"]) == (True, True, "s")
    assert "seed" not in seen


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (400, '{"error": {"message": "too long"}}', EngineRejected),
        (400, '{"message": "old style"}', EngineRejected),
        (500, "<html>", EngineRejected),
        (200, 'data: {"error": {"message": "boom", "code": 500}}\n\n', EngineRejected),
        (200, 'data: {"choices":[{"text":"a"}]}\n\n', EngineUnavailable),
        (200, "data: {half\n\n", EngineUnavailable),
        (200, "", EngineUnavailable),
    ],
)
async def test_client_says_what_went_wrong(status: int, text: str, error: type[Exception]) -> None:
    async with client(lambda request: httpx.Response(status, text=text)) as engine:
        with pytest.raises(error) as caught:
            await collect(engine)
    if isinstance(caught.value, EngineRejected):
        assert caught.value.status in (400, 500)
        assert caught.value.message


async def test_client_without_an_engine() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with client(refuse) as engine:
        assert await engine.health() is False
        for call in (
            engine.models(),
            engine.status(),
            engine.profile(),
            engine.memory(),
            engine.preview(alpha=1.0),
            engine.evict(everything=True),
            engine.metrics_text(),
        ):
            with pytest.raises(EngineUnavailable):
                await call
        with pytest.raises(EngineUnavailable):
            await collect(engine)
    assert await engine.health() is False  # closed, and still no exception


async def test_client_asks_the_engine_s_own_routes() -> None:
    asked: list[tuple[str, str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(
            (request.method, str(request.url.raw_path, "ascii"), json.loads(request.content or "null"))
        )
        return httpx.Response(200, json={"n": len(asked)})

    async with client(answer) as engine:
        assert await engine.status() == {"n": 1}
        assert await engine.profile() == {"n": 2}
        await engine.memory()
        await engine.memory("a/b?&")
        await engine.preview(scope="layer", lengths=[1, 2])
        await engine.evict(sequence="a")
        await engine.evict(idle_seconds=0.0)
        assert await engine.evict(everything=True) == {"n": 8}
    assert asked == [
        ("GET", "/tangram/status", None),
        ("GET", "/tangram/profile", None),
        ("GET", "/tangram/memory", None),
        ("GET", "/tangram/memory?sequence=a%2Fb%3F%26", None),
        ("POST", "/tangram/preview", {"scope": "layer", "lengths": [1, 2]}),
        ("POST", "/tangram/evict", {"sequence": "a"}),
        ("POST", "/tangram/evict", {"idle_seconds": 0.0}),
        ("POST", "/tangram/evict", {"all": True}),
    ]


async def test_client_passes_the_engines_words_on() -> None:
    body = {"error": {"message": "group_size: must be at least 1"}}
    async with client(lambda request: httpx.Response(400, json=body)) as engine:
        with pytest.raises(EngineRejected, match="group_size: must be at least 1"):
            await engine.preview(group_size=0)
    async with client(lambda request: httpx.Response(200, text="[]")) as engine:
        with pytest.raises(EngineUnavailable):
            await engine.memory()


@pytest.mark.parametrize(
    ("arrivals", "rate"),
    [
        ([], None),
        ([(1.0, 8)], None),
        ([(1.0, 7), (1.0016, 1)], None),
        ([(1.0, 1), (1.1, 1), (1.19, 1)], None),
        ([(1.0, 1), (1.25, 5), (1.5, 5)], 20.0),
        ([(1.0, 40), (2.0, 10)], 10.0),
    ],
)
def test_a_rate_needs_time_to_be_measured_over(
    monkeypatch: pytest.MonkeyPatch, arrivals: list[tuple[float, int]], rate: float | None
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 9.0)
    monkeypatch.setattr("app.job.time", clock)
    job = Job("owner", "conversation", "reply", 3, began=0.5)
    for when, tokens in arrivals:
        clock.monotonic = lambda now=when: now
        job.take(CompletionChunk("x", list(range(tokens)), None, None))
    stats = job.measure(None)
    assert stats["tokens_per_second"] == rate
    assert stats["completion_tokens"] == sum(tokens for _, tokens in arrivals)
    assert stats["ttft_ms"] == (500 if arrivals else None)


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_help_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argument: str
) -> None:
    monkeypatch.setattr("sys.argv", ["tangram-chat", argument])
    assert main() == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("usage: tangram-chat", "environment", "docs/operations.md"))


@pytest.mark.parametrize("arguments", [["--port", "9000"], ["vacuum", "now"]])
def test_other_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tangram-chat", *arguments])
    assert main() == 2
    assert "tangram-chat: error: " in capsys.readouterr().err

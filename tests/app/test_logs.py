"""What is logged: who, where, how long; never what anybody wrote."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from app import logs
from app.request_context import CURRENT, RequestInfo
from db.errors import StorageUnavailable
from tests.app.conftest import NAME, PASSWORD, Product

SECRET = "zanzibar"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Everything that is logged, down to debug level, as JSON lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter())
    root, access = logging.getLogger(), logging.getLogger("app.access")
    before = root.level, access.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    access.setLevel(logging.INFO)
    for other in ("httpx", "httpcore", "uvicorn.access"):  # the test's client, and what the product turns off
        monkeypatch.setattr(logging.getLogger(other), "disabled", True)
    yield stream
    root.removeHandler(handler)
    root.setLevel(before[0])
    access.setLevel(before[1])


async def test_no_words_of_a_message_are_logged(product: Product, written: io.StringIO) -> None:
    conversation = await product.conversation(title=SECRET, system_prompt=SECRET)
    path = f"/api/conversations/{conversation}/messages"
    for text in (f"/say {SECRET}", f"{SECRET} /fail", f"{SECRET} /refuse", f"{SECRET} /die"):
        answer = await product.http.post(path, json={"content": text, "stream": False})
        assert answer.status_code == 200
        messages = [{"role": "user", "content": text}]
        for stream in (False, True):
            body = {"model": "fake-model", "messages": messages, "stream": stream}
            await product.http.post("/v1/chat/completions", json=body)
    await product.http.get("/api/conversations", params={"query": SECRET})
    await product.http.post(path, json={"content": SECRET, "max_tokens": SECRET})
    await product.http.post(path, content=f'{{"content": "{SECRET}'.encode())
    await product.http.get(f"/api/{SECRET}")
    async with product.client() as http:
        await http.post("/login", data={"name": NAME, "password": SECRET})
        await http.post("/login", data={"name": SECRET, "password": PASSWORD})

    async def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"cannot work on {SECRET}")

    product.services.store.get_conversation = broken  # type: ignore[method-assign]
    failed = await product.http.get(
        f"/api/conversations/{conversation}", headers={"X-Request-ID": "failed-1"}
    )
    assert failed.status_code == 500
    assert failed.headers["x-request-id"] == "failed-1"
    assert failed.headers["x-content-type-options"] == "nosniff"
    assert failed.json()["error"]["code"] == "internal_error"
    text = written.getvalue()
    assert SECRET not in text
    assert PASSWORD not in text
    lines = [json.loads(line) for line in text.splitlines()]
    access = [line for line in lines if line["logger"] == "app.access"]
    assert len(access) >= 18
    (of_failed,) = [line for line in access if line["request_id"] == "failed-1"]
    assert of_failed["user_id"] == product.owner
    assert of_failed | {"ms": 0, "time": ""} == {
        "time": "",
        "level": "info",
        "logger": "app.access",
        "message": "request",
        "request_id": "failed-1",
        "user_id": product.owner,
        "method": "GET",
        "route": "/api/conversations/{conversation_id}",
        "status": 500,
        "ms": 0,
        "address": "127.0.0.1",
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", of_failed["time"])
    reasons = [
        line["exception"][-1]
        for line in lines
        if line.get("request_id") == "failed-1" and "exception" in line
    ]
    assert reasons
    assert set(reasons) == {"builtins.RuntimeError"}


@pytest.mark.parametrize("formatter", [logs.JsonFormatter(), logs.TextFormatter()])
def test_what_an_exception_says(formatter: logging.Formatter) -> None:
    def record(error: Exception) -> str:
        try:
            try:
                raise ValueError(f"bad {SECRET}")
            except ValueError as cause:
                raise error from cause
        except Exception as caught:
            info = (type(caught), caught, caught.__traceback__)
            return formatter.format(logging.LogRecord("x", logging.ERROR, "", 0, "failed", None, info))

    said = record(StorageUnavailable("the disk is full"))
    assert "db.errors.StorageUnavailable: the disk is full" in said
    assert "builtins.ValueError" in said
    assert "test_logs.py:" in said
    assert SECRET not in said
    assert SECRET not in record(KeyError(SECRET))


def test_lines_name_the_request_and_no_secrets() -> None:
    token = CURRENT.set(RequestInfo("abc", user_id="u1"))
    try:
        record = logging.LogRecord("x", logging.INFO, "", 0, "key tc-%s", ("A" * 30,), None)
        assert logs.TextFormatter().format(record) == "INFO x: key [redacted] [request abc]"
        entry = json.loads(logs.JsonFormatter().format(record))
        assert (entry["request_id"], entry["user_id"], entry["message"]) == ("abc", "u1", "key [redacted]")
    finally:
        CURRENT.reset(token)


async def test_requests_at_once_keep_their_own_ids(product: Product, written: io.StringIO) -> None:
    async def ask(number: int) -> str:
        headers = {"X-Request-ID": f"request-{number}"}
        return (await product.http.get("/api/conversations", headers=headers)).headers["x-request-id"]

    assert await asyncio.gather(*map(ask, range(20))) == [f"request-{number}" for number in range(20)]
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    seen = sorted(line["request_id"] for line in lines if line["logger"] == "app.access")
    assert seen == sorted(f"request-{number}" for number in range(20))

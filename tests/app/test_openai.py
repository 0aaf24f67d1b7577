"""OpenAI's chat API, spoken to by OpenAI's own client where that shows more."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.app.conftest import Product, eventually
from tests.fake_engine import FakeEngine

URL = "/v1/chat/completions"


def body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "fake-model", "messages": [{"role": "user", "content": content}], **fields}


@pytest.fixture
async def client(product: Product) -> Any:
    key, _ = await product.services.accounts.create_api_key(product.owner, "openai")
    async with openai.AsyncOpenAI(base_url=f"{product.url}/v1", api_key=key, max_retries=0) as found:
        yield found


async def test_with_the_official_client(client: Any, fake_engine: FakeEngine) -> None:
    assert [model.id async for model in client.models.list()] == ["fake-model"]
    assert (await client.models.retrieve("fake-model")).id == "fake-model"
    messages: list[Any] = [{"role": "system", "content": "S"}, {"role": "user", "content": "/say one 🦜"}]
    first = await client.chat.completions.create(model="fake-model", messages=messages, seed=1, temperature=0)
    assert first.choices[0].message.content == "one 🦜"
    assert first.choices[0].finish_reason == "stop"
    assert (fake_engine.requests[0]["seed"], fake_engine.requests[0]["temperature"]) == (1, 0)
    messages += [
        first.choices[0].message.model_dump(include={"role", "content"}),
        {"role": "user", "content": "/tokens 9"},
    ]
    stream = await client.chat.completions.create(
        model="fake-model", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices).startswith("lorem")
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage.completion_tokens == 10
    assert usage.prompt_tokens_details.cached_tokens > 20


async def test_limits_and_stop_strings(product: Product, fake_engine: FakeEngine) -> None:
    answer = (await product.http.post(URL, json=body("/tokens 50", max_completion_tokens=7))).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 7
    answer = (await product.http.post(URL, json=body("/say one, two, three", stop=[" two", "x"]))).json()
    assert answer["choices"][0]["message"]["content"] == "one,"
    assert answer["choices"][0]["finish_reason"] == "stop"
    parts = [{"type": "text", "text": "/say"}, {"type": "text", "text": "parts"}]
    await product.http.post(URL, json=body(parts, top_k=5, presence_penalty=0.5, stop="#", user="ignored"))
    sent = fake_engine.requests[-1]
    assert (sent["top_k"], sent["presence_penalty"], sent["stop"]) == (5, 0.5, ["#"])
    assert "/say\nparts<|im_end|>" in fake_engine.tokenizer.decode(sent["prompt"], skip_special_tokens=False)
    assert "temperature" not in sent  # the model's own default
    assert sent["max_tokens"] == 8192 - len(sent["prompt"])


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"n": 2}, 400, "n"),
        ({"model": "gpt-9"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "messages"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"temperature": 3}, 400, "temperature"),
        ({"stop": [""]}, 400, "stop"),
        ({"messages": [{"role": "user", "content": "/refuse"}]}, 400, None),
    ],
)
async def test_refusals(product: Product, change: dict[str, Any], status: int, param: str | None) -> None:
    for stream in (False, True):
        answer = await product.http.post(URL, json={**body(), "stream": stream, **change})
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert error["message"]


async def test_neither_key_nor_session(product: Product) -> None:
    async with product.client() as http:
        answer = await http.post(URL, json=body())
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["/tokens 2000 /delay 0.01", "/prefill 30"])
async def test_a_client_that_leaves_aborts_the_request(
    product: Product, fake_engine: FakeEngine, stream: bool, prompt: str
) -> None:
    request = asyncio.create_task(product.http.post(URL, json=body(prompt, stream=stream)))
    await eventually(lambda: len(fake_engine.running) == 1)
    request.cancel()
    await eventually(lambda: not fake_engine.running and fake_engine.aborted == 1, 2.0)


async def test_an_engine_that_breaks_off(product: Product) -> None:
    for how in ("/die", "/fail"):
        broken = await product.http.post(URL, json=body(f"{how} /tokens 20"))
        assert (broken.status_code, broken.json()["error"]["code"]) == (503, "engine_not_ready")
    streamed = await product.http.post(URL, json=body("/die /tokens 20", stream=True))
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert events[1]["choices"][0]["delta"]["content"]
    assert "failed in the middle" in events[-1]["error"]["message"]


async def test_users_do_not_share_what_is_cached(product: Product, fake_engine: FakeEngine) -> None:
    await product.http.post(URL, json=body("/say same words"))
    again = (await product.http.post(URL, json=body("/say same words"))).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    async with await product.stranger() as other:
        answer = (await other.post(URL, json=body("/say same words"))).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len({request["cache_salt"] for request in fake_engine.requests}) == 2

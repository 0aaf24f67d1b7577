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
    assert sent["max_tokens"] == 4096  # the setting
    await product.http.post(URL, json=body("/say x", max_tokens=9999))
    sent = fake_engine.requests[-1]
    assert sent["max_tokens"] == 8192 - len(sent["prompt"])


def called(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


REFUSED: list[tuple[dict[str, Any], int, str | None]] = [
    ({"n": 17}, 400, "n"),
    ({"n": 0}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"model": "gpt-9"}, 404, "model"),
    ({"model": 5}, 400, "model"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role"),
    ({"messages": [{"content": "x"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "messages"),
    ({"tools": [{"type": "function"}]}, 400, "tools.0.function"),
    ({"tools": [called("f")]}, 400, "tools"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tools": [called("f")], "tool_choice": called("g")}, 400, "tool_choice"),
    ({"functions": [{"name": "f"}]}, 400, "functions"),
    ({"logprobs": 1}, 400, "logprobs"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"logit_bias": {"word": 1}}, 400, "logit_bias"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"temperature": 3}, 400, "temperature"),
    ({"stop": [""]}, 400, "stop.0"),
    ({"stream_options": {"include_usage": "yes"}}, 400, "stream_options.include_usage"),
    ({"messages": [{"role": "user", "content": "/refuse"}]}, 400, None),
    ({"conversation_id": "f" * 32}, 404, None),
    ({"conversation_id": "f" * 32, "n": 2}, 400, "n"),
    ({"conversation_id": "f" * 32, "stop": "x"}, 400, "stop"),
    (
        {"conversation_id": "f" * 32, "messages": [{"role": "assistant", "content": "x"}]},
        400,
        "messages.0.role",
    ),
]


async def test_refusals(product: Product) -> None:
    for change, status, param in REFUSED:
        for stream in (False, True):
            answer = await product.http.post(URL, json={**body(), "stream": stream, **change})
            assert answer.status_code == status, (change, answer.text)
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), change
            assert error["message"]
    long = await product.http.post(URL, json=body("word " * 9000))
    assert long.json()["error"]["code"] == "context_length_exceeded"


async def test_neither_key_nor_session(product: Product) -> None:
    async with product.client() as http:
        answer = await http.post(URL, json=body())
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["/tokens 2000 /delay 0.05", "/prefill 300"])
async def test_a_client_that_leaves_aborts_the_request(
    product: Product, fake_engine: FakeEngine, stream: bool, prompt: str
) -> None:
    request = asyncio.create_task(product.http.post(URL, json=body(prompt, stream=stream)))
    await eventually(lambda: len(fake_engine.running) == 1)
    request.cancel()
    await eventually(lambda: not fake_engine.running and fake_engine.aborted == 1)


async def test_an_engine_that_breaks_off(product: Product) -> None:
    for how in ("/die", "/fail"):
        broken = await product.http.post(URL, json=body(f"{how} /tokens 20"))
        assert (broken.status_code, broken.json()["error"]["code"]) == (503, "engine_not_ready")
    streamed = await product.http.post(URL, json=body("/die /tokens 20", stream=True))
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert events[1]["choices"][0]["delta"]["content"]
    assert "failed in the middle" in events[-1]["error"]["message"]


async def test_without_an_engine(product: Product, fake_engine: FakeEngine) -> None:
    fake_engine.healthy = False
    product.services.supervisor.check_now()
    await eventually(lambda: not product.services.supervisor.status.ready)
    for url in (URL, "/v1/completions"):
        answer = await product.http.post(url, json=body() | {"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["type"] == "server_error"


async def test_several_answers(client: Any) -> None:
    ask: Any = {"model": "fake-model", "messages": [{"role": "user", "content": "/say one 🦜"}], "n": 3}
    whole = await client.chat.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert {choice.message.content for choice in whole.choices} == {"one 🦜"}
    texts = ["", "", ""]
    reasons: list[Any] = [None, None, None]
    async for chunk in await client.chat.completions.create(**ask, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        assert reasons[choice.index] is None, "nothing comes after the end"
        reasons[choice.index] = choice.finish_reason
    assert (texts, reasons) == (["one 🦜"] * 3, ["stop"] * 3)


async def test_logprobs(client: Any, product: Product) -> None:
    text = "naïve 👩‍👩‍👧 漢字"
    ask: Any = {"model": "fake-model", "messages": [{"role": "user", "content": f"/say {text}"}]}
    ask |= {"logprobs": True, "top_logprobs": 2}
    choice = (await client.chat.completions.create(**ask)).choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(one.bytes) for one in content[:-1]).decode() == choice.message.content == text
    assert {len(one.top_logprobs) for one in content} == {2}
    assert content[0].top_logprobs[0].token == content[0].token
    assert [one.logprob for one in content[0].top_logprobs] == [-0.5, -1.5]
    streamed = []
    async for chunk in await client.chat.completions.create(**ask, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == content
    del ask["top_logprobs"]
    plain = (await client.chat.completions.create(**ask)).choices[0].logprobs.content
    assert [one.token for one in plain] == [one.token for one in content]
    assert {len(one.top_logprobs) for one in plain} == {0}


async def test_structured_answers_are_the_engines_work(client: Any, fake_engine: FakeEngine) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    for wanted in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}},
    ):
        await client.chat.completions.create(
            model="fake-model", messages=messages, response_format=wanted, logit_bias={"17": -5}
        )
        assert fake_engine.requests[-1]["response_format"] == wanted
        assert fake_engine.requests[-1]["logit_bias"] == {"17": -5}


async def test_the_older_api(client: Any, fake_engine: FakeEngine, product: Product) -> None:
    ask: Any = {"model": "fake-model", "prompt": "Once upon a time"}
    whole = await client.completions.create(**ask)
    assert whole.object == "text_completion"
    assert whole.usage.completion_tokens == 16
    assert whole.choices[0].finish_reason == "length"
    sent = fake_engine.requests[-1]
    assert fake_engine.tokenizer.decode(sent["prompt"]) == "Once upon a time"
    chunks = [chunk async for chunk in await client.completions.create(**ask, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    several = await client.completions.create(
        **ask | {"prompt": ["one", "two", "three"]}, n=2, max_tokens=4, echo=True, stop="zzz"
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3, 4, 5]
    assert [c.text.split()[0] for c in several.choices] == ["oneYou", "oneYou", "twoYou", "twoYou"] + [
        "threeYou"
    ] * 2
    assert several.usage.completion_tokens == 24
    tokens = await client.completions.create(**ask | {"prompt": [1, 2, 3]}, logprobs=2, max_tokens=3)
    assert fake_engine.requests[-1]["prompt"] == [1, 2, 3]
    told = tokens.choices[0].logprobs
    assert "".join(told.tokens) == tokens.choices[0].text
    assert told.text_offset == [0, len(told.tokens[0]), len(told.tokens[0] + told.tokens[1])]
    assert [len(likeliest) for likeliest in told.top_logprobs] == [2, 2, 2]
    streamed = [
        chunk.choices[0].logprobs.text_offset[0]
        async for chunk in await client.completions.create(
            **ask | {"prompt": [1, 2, 3]}, logprobs=2, max_tokens=3, stream=True
        )
    ]
    assert streamed == told.text_offset
    for change, param in (
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": ["x"] * 9, "n": 2}, "prompt"),
        ({"prompt": "word " * 9000}, "messages"),
    ):
        answer = await product.http.post("/v1/completions", json={"model": "fake-model", **change})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), change


async def test_a_stored_conversation(client: Any, product: Product, fake_engine: FakeEngine) -> None:
    conversation = await product.conversation(system_prompt="Be kind.")
    await product.reply(conversation, "/say first")
    ask: Any = {"model": "fake-model", "extra_body": {"conversation_id": conversation}, "temperature": 0.5}
    history: Any = [{"role": "user", "content": "ignored"}, {"role": "user", "content": "/say 👩‍👩‍👧 there"}]
    whole = await client.chat.completions.create(messages=history, **ask)
    assert whole.choices[0].message.content == "👩‍👩‍👧 there"
    assert whole.conversation_id == conversation
    assert whole.usage.prompt_tokens_details.cached_tokens > 20
    assert fake_engine.requests[-1]["temperature"] == 0.5
    chunks = []
    messages: Any = [{"role": "user", "content": "/tokens 30"}]
    stream_options: Any = {"include_usage": True}
    async for chunk in await client.chat.completions.create(
        messages=messages, stream=True, stream_options=stream_options, **ask
    ):
        chunks.append(chunk)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens == 31
    path = await product.services.store.path(product.owner, conversation)
    assert [m.content for m in path[::2]] == ["/say first", "/say 👩‍👩‍👧 there", "/tokens 30"]
    assert path[-1].content == text
    assert fake_engine.requests[-1]["prompt"] == [i for m in path[:-1] for i in m.token_ids]
    slow = {"messages": [{"role": "user", "content": "/tokens 900 /delay 0.05"}], "stream": True}
    request = asyncio.create_task(
        product.http.post(URL, json={"model": "fake-model", "conversation_id": conversation, **slow})
    )
    await eventually(lambda: len(fake_engine.running) == 1)
    request.cancel()
    await eventually(lambda: not fake_engine.running and fake_engine.aborted == 1)
    await eventually(lambda: product.services.generation.active == 0)
    path = await product.services.store.path(product.owner, conversation)
    assert path[-1].status == "stopped"
    broken = {"messages": [{"role": "user", "content": "/fail /tokens 20"}], "conversation_id": conversation}
    answer = await product.http.post(URL, json={"model": "fake-model", **broken})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


async def test_users_do_not_share_what_is_cached(product: Product, fake_engine: FakeEngine) -> None:
    await product.http.post(URL, json=body("/say same words"))
    again = (await product.http.post(URL, json=body("/say same words"))).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    async with await product.stranger() as other:
        answer = (await other.post(URL, json=body("/say same words"))).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len({request["cache_salt"] for request in fake_engine.requests}) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_turn_that_an_administrator_stopped_says_so(product: Product, stream: bool) -> None:
    conversation = await product.conversation()
    active = product.services.active
    body = {"model": "fake-model", "conversation_id": conversation, "stream": stream}
    body["messages"] = [{"role": "user", "content": "/tokens 3000 /delay 0.05"}]
    asking = asyncio.create_task(product.http.post(URL, json=body))
    await eventually(lambda: bool(active.running() and active.running()[0].tokens()))
    active.stop(active.running()[0].name)
    answer = await asking
    said = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))["error"]
    assert (said["code"], said["message"]) == ("request_stopped", "An administrator stopped this request.")
    assert answer.status_code == (200 if stream else 409)
    stored = (await product.services.store.path(product.owner, conversation))[-1]
    assert (stored.status, bool(stored.content)) == ("stopped", True)

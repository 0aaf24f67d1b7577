"""How many may follow one reply."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

from app import running_replies
from app.errors import Busy
from tests.app.conftest import Product, eventually
from tests.patience import PATIENCE


async def first_event(http: httpx.AsyncClient, reply_id: str, seen: asyncio.Event) -> None:
    """Follow a reply until the task is cancelled or the reply ends; tell when the first event has come."""
    async with http.stream("GET", f"/api/replies/{reply_id}/events") as answer:
        async for _ in answer.aiter_lines():
            seen.set()


async def test_a_reply_is_followed_in_a_few_places_only(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_replies, "MOST_FOLLOWERS", 3)
    generation, conversation = product.services.generation, await product.conversation()
    handle = await generation.send(product.owner, conversation, "/tokens 3000 /delay 0.05")
    path = f"/api/replies/{handle.reply.id}/events"
    seen = [asyncio.Event() for _ in range(3)]
    followers = [asyncio.create_task(first_event(product.http, handle.reply.id, each)) for each in seen]
    for each in seen:
        await asyncio.wait_for(each.wait(), PATIENCE)
    refused = await product.http.get(path)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], refused.headers["retry-after"]) == (429, "rate_limited", "5")
    assert "followed in 3 places already. Close some of the pages" in error["message"]
    with pytest.raises(Busy, match="followed in 3 places"):
        await anext(generation.subscribe(product.owner, handle.reply.id))
    async with await product.stranger() as stranger:
        assert (await stranger.get(path)).status_code == 404, "nobody else learns of it"
    # Whoever leaves makes room, and another reply is not concerned.
    followers.pop().cancel()
    again = asyncio.Event()

    def room() -> bool:
        with contextlib.suppress(Busy):
            generation.check_follow(product.owner, handle.reply.id)
            return True
        return False

    await eventually(room)
    followers.append(asyncio.create_task(first_event(product.http, handle.reply.id, again)))
    await asyncio.wait_for(again.wait(), PATIENCE)
    other = await product.reply(await product.conversation(), "/say hello")
    assert other.content == "hello"
    await generation.stop(product.owner, handle.reply.id)
    await asyncio.wait(followers)
    assert (await product.http.get(path)).status_code == 200, "a finished one is only read"

"""Import and export over HTTP, and the routes of conversations that go with them."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update

from app.settings import Settings
from app.transfer.importing import understand
from app.transfer.reading import MAX_FILE
from db.models import Conversation
from db.repository import execute
from tests.app.conftest import Product, running_product

EVIL = '../../<script>alert(1)</script>"\r\nX-Evil: 1'


async def sample(product: Product, title: str = "Sample") -> str:
    conversation = await product.conversation(title=title, system_prompt="Be brief.", settings={"top_p": 0.5})
    first = await product.reply(conversation, "/say One")
    await product.services.generation.regenerate(product.owner, conversation, first.id)
    path = await product.services.store.path(product.owner, conversation)
    await product.finish(path[-1].id)
    await product.services.store.rate_reply(product.owner, first.id, 1)
    await product.reply(conversation, "/say Two")
    return conversation


async def export(product: Product, address: str, form: str) -> httpx.Response:
    answer = await product.http.get(address, params={"format": form})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-disposition"].startswith("attachment; ")
    return answer


async def test_a_json_export_comes_back_whole(product: Product) -> None:
    conversation = await sample(product)
    one = (await export(product, f"/api/conversations/{conversation}/export", "json")).content
    every = (await export(product, "/api/export", "json")).content
    assert "token_ids" not in one.decode()
    for data in (one, every):
        answer = await product.http.post("/api/import", content=data)
        assert answer.status_code == 201, answer.text
        assert (answer.json()["messages"], answer.json()["skipped_messages"]) == (5, 0)
        (copy,) = answer.json()["conversations"]
        again = (await export(product, f"/api/conversations/{copy}/export", "json")).json()
        assert simple(again) == simple(json.loads(one))
    # It goes on like any other, with its system prompt.
    assert (await product.reply(copy, "/say Three")).content == "Three"


def simple(exported: dict[str, Any]) -> Any:
    (conversation,) = exported["conversations"]
    places = {message["id"]: place for place, message in enumerate(conversation["messages"])}
    messages = [
        (
            places.get(message["parent_id"]),
            *(message[name] for name in ("role", "content", "status", "rating")),
        )
        for message in conversation["messages"]
    ]
    kept = [conversation[name] for name in ("title", "system_prompt", "settings")]
    return kept, messages, places[conversation["active_leaf_id"]]


async def test_sharegpt_and_markdown_hold_the_branch_that_is_shown(product: Product) -> None:
    conversation = await sample(product)
    address = f"/api/conversations/{conversation}/export"
    (item,) = (await export(product, address, "sharegpt")).json()
    assert [turn["from"] for turn in item["conversations"]] == ["system", "human", "gpt", "human", "gpt"]
    assert [turn["value"] for turn in item["conversations"]][1:3] == ["/say One", "One"]
    answer = await product.http.post("/api/import", json=[item])
    assert answer.json()["messages"] == 4
    text = (await export(product, address, "markdown")).text
    assert text.startswith(
        "# Sample\n\n**System prompt**\n\n> Be brief.\n\n## You\n\n/say One\n\n## Assistant\n"
    )


async def test_no_title_leads_out_of_the_archive_or_into_the_headers(product: Product) -> None:
    ids = [await product.conversation(title=title) for title in ("../../etc/passwd", "..", "a/b", "A/B")]
    (own,) = await product.services.store.import_conversations(product.owner, understood(EVIL))
    answer = await export(product, "/api/export", "markdown")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
    assert len(set(map(str.lower, names))) == 5
    assert not [name for name in names if "/" in name or "\\" in name or ".." in name]
    for conversation in (*ids, own):
        answer = await export(product, f"/api/conversations/{conversation}/export", "markdown")
        assert "x-evil" not in answer.headers
        assert ".." not in answer.headers["content-disposition"]
        assert "/" not in answer.headers["content-disposition"].replace("filename*=UTF-8", "")


def understood(title: str) -> Any:
    file = [{"title": title, "conversations": [{"from": "human", "value": "x"}]}]
    return understand(json.dumps(file).encode()).conversations


async def test_an_import_with_a_mistake_changes_nothing(product: Product) -> None:
    good = {"conversations": [{"from": "human", "value": "x"}]}
    bad = {"title": "Third", "conversations": [{"from": "nobody", "value": "x"}]}
    answer = await product.http.post("/api/import", json=[good, good, bad])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid_import"
    assert error["message"].startswith("Conversation 3 “Third”, message 1: ")
    assert (await product.http.get("/api/conversations")).json() == {"conversations": []}
    huge = await product.http.post("/api/import", content=b" " * (MAX_FILE + 1))
    assert (huge.status_code, huge.json()["error"]["code"]) == (413, "too_large")


async def test_exports_leave_out_what_is_deleted_and_keep_what_is_archived(product: Product) -> None:
    archived, deleted = await product.conversation(title="kept"), await product.conversation(title="gone")
    await product.http.patch(f"/api/conversations/{archived}", json={"archived": True})
    await product.http.delete(f"/api/conversations/{deleted}")
    for form in ("json", "sharegpt"):
        text = (await export(product, "/api/export", form)).text
        json.loads(text)
        assert "kept" in text
        assert "gone" not in text
    assert (await product.http.get("/api/export", params={"format": "exe"})).status_code == 400
    assert (await product.http.get(f"/api/conversations/{deleted}/export")).status_code == 404


async def test_archive_rate_and_page(product: Product) -> None:
    http = product.http
    conversation = await sample(product)
    address = f"/api/conversations/{conversation}"
    assert (await http.patch(address, json={"archived": True})).json()["archived"] is True
    for archived, count in ((True, 1), (False, 0)):
        listed = await http.get("/api/conversations", params={"archived": archived})
        assert len(listed.json()["conversations"]) == count
    assert (await http.patch(address, json={"archived": False})).json()["archived"] is False

    path = (await http.get(f"{address}/messages")).json()["messages"]
    end = (await http.get(f"{address}/messages", params={"limit": 2})).json()["messages"]
    assert end == path[-2:]
    above = {"leaf_id": end[0]["parent_id"], "limit": 50}
    assert (await http.get(f"{address}/messages", params=above)).json()["messages"] == path[:-2]
    assert (await http.get(f"{address}/messages", params={"limit": 0})).status_code == 400

    reply = end[-1]["id"]
    for rating in (1, -1, None):
        answer = await http.put(f"/api/replies/{reply}/rating", json={"rating": rating})
        assert answer.json()["rating"] == rating
        assert (await http.get(f"/api/messages/{reply}")).json()["rating"] == rating
    for body in ({"rating": 2}, {"rating": True}, {"rating": "1"}, {}):
        assert (await http.put(f"/api/replies/{reply}/rating", json=body)).status_code == 400, body
    mine = await http.put(f"/api/replies/{end[0]['id']}/rating", json={"rating": 1})
    assert mine.status_code == 400


async def test_a_change_is_made_whole_or_not_at_all(product: Product) -> None:
    conversation = await product.conversation(title="Before", system_prompt="Old")
    address = f"/api/conversations/{conversation}"
    before = (await product.http.get(address)).json()
    for wrong in ({"title": " "}, {"settings": {"seed": 1.5}}, {"system_prompt": "x" * 100_001}):
        change = {"title": "After", "system_prompt": "New", "settings": {"seed": 1}, "archived": True} | wrong
        assert (await product.http.patch(address, json=change)).status_code == 400
        assert (await product.http.get(address)).json() == before
    stranger = await product.conversation()
    other = (await product.reply(stranger, "/say Hm")).id
    for nowhere in ("nope", other):
        change = {"title": "After", "archived": True, "active_message_id": nowhere}
        assert (await product.http.patch(address, json=change)).status_code == 404
        assert (await product.http.get(address)).json() == before


async def test_a_change_shows_another_branch(product: Product) -> None:
    conversation = await sample(product)
    address = f"/api/conversations/{conversation}"
    first = (await product.http.get(f"{address}/messages")).json()["messages"][1]["id"]
    await product.services.generation.regenerate(product.owner, conversation, first)
    newest = (await product.http.get(address)).json()["active_leaf_id"]
    await product.finish(newest)
    change = {"title": "After", "active_message_id": first}
    changed = (await product.http.patch(address, json=change)).json()
    assert changed == (await product.http.get(address)).json()
    assert changed["title"] == "After"
    assert changed["active_leaf_id"] != newest
    path = (await product.http.get(f"{address}/messages")).json()["messages"]
    assert first in [message["id"] for message in path]


@pytest.mark.parametrize("failed_first", [False, True])
async def test_a_new_system_prompt_reaches_the_model(
    product: Product, fake_engine: Any, failed_first: bool
) -> None:
    conversation = await product.conversation(system_prompt="Speak like a PIRATE.")
    if failed_first:
        await product.reply(conversation, "/refuse")
    await product.reply(conversation, "/say " + "Aye. " * 40)
    assert "PIRATE" in prompt(fake_engine)
    await product.http.patch(f"/api/conversations/{conversation}", json={"system_prompt": "Be a POET."})
    await product.reply(conversation, "/say " + "Verse. " * 40)
    assert "POET" in prompt(fake_engine)
    assert "PIRATE" not in prompt(fake_engine)
    assert "Aye." in prompt(fake_engine)
    await product.http.patch(f"/api/conversations/{conversation}", json={"system_prompt": ""})
    await product.reply(conversation, "/say Prose.")
    assert "POET" not in prompt(fake_engine)


def prompt(fake_engine: Any) -> str:
    return str(fake_engine.tokenizer.decode(fake_engine.requests[-1]["prompt"], skip_special_tokens=False))


async def test_the_next_start_removes_what_a_killed_import_left(settings: Settings) -> None:
    staged = update(Conversation).values(deleted_at=-1)
    async with running_product(settings, engine=False) as product:
        await product.conversation(title="half")
        await product.services.database.write(lambda session: execute(session, staged))
    async with running_product(settings, engine=False) as product:
        left = select(func.count()).select_from(Conversation)
        assert await product.services.database.read(lambda session: session.scalar(left)) == 0

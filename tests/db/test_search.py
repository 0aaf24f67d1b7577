import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from db import Database, Store
from db.values import new_id
from db.views import UserView
from tests.db.helpers import check_integrity, exchange

TEXTS = {
    "languages": "Is C++ faster than C#? He said \"no\", she said 'yes'.",
    "percent": "Only 100% of it, under_scored and back\\slashed.",
    "chinese": "今天天气很好，我们去公园吧。",
    "case": "Straße in MÜNCHEN, École française",
    "operators": "NOT this AND that OR (these) NEAR* title: ^x -y {z}",
}


@pytest.fixture
async def library(store: Store, owner: UserView) -> dict[str, str]:
    """One conversation for each of TEXTS, by the id of the conversation."""
    names = {}
    for name, content in TEXTS.items():
        conversation = await store.create_conversation(owner.id, "untitled")
        await exchange(store, owner.id, conversation.id, None, "-----", content)
        names[conversation.id] = name
    return names


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("C++", {"languages"}),
        ("c#?", {"languages"}),
        ('"', {"languages"}),
        ('"no"', {"languages"}),
        ("'", {"languages"}),
        ("'yes'.", {"languages"}),
        ("%", {"percent"}),
        ("100%", {"percent"}),
        ("_", {"percent"}),
        ("\\", {"percent"}),
        ("k\\sla", {"percent"}),
        ("天气", {"chinese"}),
        ("公园", {"chinese"}),
        ("公", {"chinese"}),
        ("天天气", {"chinese"}),
        ("气天", set()),
        ("münchen", {"case"}),
        ("MÜ", {"case"}),
        ("mü", {"case"}),
        ("éco", {"case"}),
        ("NOT this", {"operators"}),
        ("this OR", set()),
        ("OR (", {"operators"}),
        ("NEAR*", {"operators"}),
        ("title:", {"operators"}),
        ("{z}", {"operators"}),
        ("  faster   ", {"languages"}),
        ("untitled", set(TEXTS)),
        ("", set(TEXTS)),
        (" \n ", set(TEXTS)),
        ("nowhere at all", set()),
        ("\0\0\0", set()),
        ("\ud800", set()),
    ],
)
async def test_queries_are_literal_text(
    store: Store, owner: UserView, library: dict[str, str], query: str, expected: set[str]
) -> None:
    found = await store.list_conversations(owner.id, query)
    assert {library[item.id] for item in found} == expected
    assert len(found) == len(expected)


async def test_titles_are_found_under_their_present_name(store: Store, owner: UserView) -> None:
    made = await store.create_conversation(owner.id, "Gardening")
    assert [item.id for item in await store.list_conversations(owner.id, "garden")] == [made.id]
    renamed = await store.rename_conversation(owner.id, made.id, "Cooking")
    assert await store.list_conversations(owner.id, "garden") == []
    assert await store.list_conversations(owner.id, "cook") == [renamed]


@pytest.mark.parametrize("query", ["wo", "word"])
async def test_a_reply_is_found_once_it_is_finished(store: Store, owner: UserView, query: str) -> None:
    made = await store.create_conversation(owner.id, "-")
    _, reply = await store.add_turn(owner.id, made.id, None, "-", [], None)
    await store.start_reply(owner.id, reply.id)
    await store.flush_reply(owner.id, reply.id, "a word", [1])
    assert await store.list_conversations(owner.id, query) == []
    await store.finish_reply(owner.id, reply.id, "stopped", "a word", [1])
    assert len(await store.list_conversations(owner.id, query)) == 1


async def test_other_people_are_not_searched(store: Store, owner: UserView, stranger: UserView) -> None:
    made = await store.create_conversation(owner.id, "secret plan")
    await exchange(store, owner.id, made.id, None, "the treasure", "is here")
    own = await store.create_conversation(stranger.id, "-")
    for query in ("secret", "treasure", "se", "tr", "is here"):
        assert await store.list_conversations(stranger.id, query) == []
        assert len(await store.list_conversations(owner.id, query)) == 1
    assert [item.id for item in await store.list_conversations(stranger.id)] == [own.id]


async def test_the_index_follows_every_change(
    store: Store, owner: UserView, library: dict[str, str], database: Database
) -> None:
    made = await store.create_conversation(owner.id, "-")
    await store.add_turn(owner.id, made.id, None, "unfinished question", [], None)
    check_integrity(database)
    await store.recover_interrupted()
    check_integrity(database)
    gone = next(iter(library))
    await database.write(
        lambda s: s.execute(text("DELETE FROM conversations WHERE id = :id"), {"id": gone}) and None
    )
    check_integrity(database)
    assert await store.list_conversations(owner.id, "C++") == []


ALPHABET = 'aA"%_\\* 你好é'


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    contents=st.lists(st.text(ALPHABET, max_size=12), min_size=1, max_size=6),
    queries=st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=8),
)
async def test_search_is_containment(store: Store, contents: list[str], queries: list[str]) -> None:
    user = await store.create_user(new_id(), "hash")
    texts = {}
    for content in contents:
        conversation = await store.create_conversation(user.id, "-")
        await exchange(store, user.id, conversation.id, None, content, "-")
        texts[conversation.id] = f"{content}\n-"
    for query in queries:
        found = {item.id for item in await store.list_conversations(user.id, query)}
        wanted = query.strip().lower()
        assert found == {key for key, content in texts.items() if wanted in content.lower()}

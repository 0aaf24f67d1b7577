import pytest
from sqlalchemy import insert, text
from sqlalchemy.exc import DatabaseError, IntegrityError
from sqlalchemy.orm import Session

from db import Database, Store
from db.errors import Conflict, InvalidInput, NotFound
from db.models import Message
from db.values import new_id, pack_tokens
from db.views import ConversationView, UserView
from tests.db.helpers import dump, exchange
from tests.patience import quickest


@pytest.fixture
async def conversation(store: Store, owner: UserView) -> ConversationView:
    return await store.create_conversation(owner.id)


async def test_a_turn_is_a_message_and_a_pending_reply(
    store: Store, owner: UserView, conversation: ConversationView
) -> None:
    user, reply = await store.add_turn(owner.id, conversation.id, None, "Hello\nthere", [5, 6], "smol")
    assert (user.role, user.content, user.token_ids) == ("user", "Hello\nthere", (5, 6))
    assert (user.status, user.parent_id, user.model, user.is_final) == ("complete", None, None, True)
    assert (reply.role, reply.content, reply.token_ids) == ("assistant", "", ())
    assert (reply.status, reply.parent_id, reply.model, reply.is_final) == ("pending", user.id, "smol", False)
    assert (user.sibling_index, user.sibling_count) == (reply.sibling_index, reply.sibling_count) == (0, 1)
    assert await store.path(owner.id, conversation.id) == [user, reply]
    assert await store.get_message(owner.id, user.id) == user
    changed = await store.get_conversation(owner.id, conversation.id)
    assert (changed.title, changed.active_leaf_id) == ("Hello", reply.id)
    assert changed.updated_at > conversation.updated_at


async def test_a_chosen_title_stays(store: Store, owner: UserView) -> None:
    named = await store.create_conversation(owner.id, "Chosen")
    await store.add_turn(owner.id, named.id, None, "Hello", [], None)
    assert (await store.get_conversation(owner.id, named.id)).title == "Chosen"


async def test_path_follows_turns(store: Store, owner: UserView, conversation: ConversationView) -> None:
    assert await store.path(owner.id, conversation.id) == []
    first = await exchange(store, owner.id, conversation.id, None, "one", "1")
    second = await exchange(store, owner.id, conversation.id, first[1].id, "two", "2")
    assert await store.path(owner.id, conversation.id) == [*first, *second]
    assert await store.path(owner.id, conversation.id, second[0].id) == [*first, second[0]]
    with pytest.raises(NotFound, match="message not found"):
        await store.path(owner.id, conversation.id, "missing")
    with pytest.raises(NotFound, match="conversation not found"):
        await store.path(owner.id, "missing")


async def test_alternatives_are_siblings(
    store: Store, owner: UserView, conversation: ConversationView
) -> None:
    user, first = await exchange(store, owner.id, conversation.id, None, "one", "1")
    second = await store.add_reply(owner.id, conversation.id, user.id, "smol")
    assert (second.status, second.parent_id, second.model) == ("pending", user.id, "smol")
    assert (second.sibling_index, second.sibling_count) == (1, 2)
    first = await store.get_message(owner.id, first.id)
    assert (first.sibling_index, first.sibling_count) == (0, 2)
    assert await store.siblings(owner.id, second.id) == [first.id, second.id]
    edited, third = await store.add_turn(owner.id, conversation.id, None, "one, edited", [], None)
    assert (edited.sibling_index, edited.sibling_count) == (1, 2)
    assert await store.siblings(owner.id, edited.id) == [user.id, edited.id]
    assert (third.sibling_index, third.sibling_count) == (0, 1)
    assert (await store.get_conversation(owner.id, conversation.id)).active_leaf_id == third.id


async def test_the_latest_stats_are_those_of_all_branches(
    store: Store, owner: UserView, conversation: ConversationView
) -> None:
    assert await store.latest_stats(owner.id, conversation.id, 9) == []
    replies = []
    for index in range(3):  # three versions of the first message
        _, reply = await store.add_turn(owner.id, conversation.id, None, f"one {index}", [], None)
        replies.append(await store.finish_reply(owner.id, reply.id, "complete", "1", [], {"place": index}))
    await store.add_turn(owner.id, conversation.id, replies[0].id, "two", [], None)
    assert await store.latest_stats(owner.id, conversation.id, 3) == [{}, {"place": 2}, {"place": 1}]
    assert await store.latest_stats(owner.id, conversation.id, 9) == [
        {}, {"place": 2}, {"place": 1}, {"place": 0}
    ]  # fmt: skip


async def test_switching_branches_returns_to_their_newest_leaf(
    store: Store, owner: UserView, conversation: ConversationView
) -> None:
    user, old = await exchange(store, owner.id, conversation.id, None, "one", "1")
    below = await exchange(store, owner.id, conversation.id, old.id, "two", "2")
    new = await store.add_reply(owner.id, conversation.id, user.id, None)
    assert (await store.set_active_leaf(owner.id, conversation.id, old.id)).id == below[1].id
    assert [m.id for m in await store.path(owner.id, conversation.id)] == [
        user.id,
        old.id,
        below[0].id,
        below[1].id,
    ]
    assert (await store.set_active_leaf(owner.id, conversation.id, user.id)).id == new.id
    assert (await store.get_conversation(owner.id, conversation.id)).active_leaf_id == new.id
    with pytest.raises(NotFound, match="message not found"):
        await store.set_active_leaf(owner.id, conversation.id, "missing")


async def test_the_tree_alternates(store: Store, owner: UserView, conversation: ConversationView) -> None:
    user, reply = await store.add_turn(owner.id, conversation.id, None, "one", [], None)
    with pytest.raises(InvalidInput, match="parent_id: must be a reply"):
        await store.add_turn(owner.id, conversation.id, user.id, "two", [], None)
    with pytest.raises(InvalidInput, match="user_message_id: must be a user's message"):
        await store.add_reply(owner.id, conversation.id, reply.id, None)
    with pytest.raises(Conflict, match="still being written"):
        await store.add_turn(owner.id, conversation.id, reply.id, "two", [], None)
    await store.start_reply(owner.id, reply.id)
    with pytest.raises(Conflict, match="still being written"):
        await store.add_turn(owner.id, conversation.id, reply.id, "two", [], None)
    assert len(await store.path(owner.id, conversation.id)) == 2


async def test_parents_of_another_conversation_are_not_found(
    store: Store, owner: UserView, conversation: ConversationView
) -> None:
    other = await store.create_conversation(owner.id)
    user, reply = await exchange(store, owner.id, other.id, None, "one", "1")
    calls = [
        lambda: store.add_turn(owner.id, conversation.id, reply.id, "x", [], None),
        lambda: store.add_reply(owner.id, conversation.id, user.id, None),
        lambda: store.set_active_leaf(owner.id, conversation.id, reply.id),
        lambda: store.path(owner.id, conversation.id, reply.id),
    ]
    for call in calls:
        with pytest.raises(NotFound, match="message not found"):
            await call()


async def test_a_turn_is_all_or_nothing(
    store: Store,
    owner: UserView,
    conversation: ConversationView,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = dump(database)
    monkeypatch.setattr(Store, "_add_reply", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await store.add_turn(owner.id, conversation.id, None, "one", [], None)
    assert dump(database) == before
    with pytest.raises(InvalidInput, match="token_ids"):
        await store.add_turn(owner.id, conversation.id, None, "one", [-1], None)
    assert dump(database) == before


async def test_user_tokens_are_replaced(
    store: Store, owner: UserView, conversation: ConversationView
) -> None:
    user, reply = await store.add_turn(owner.id, conversation.id, None, "one", [], None)
    await store.set_user_tokens(owner.id, user.id, range(1000))
    assert (await store.get_message(owner.id, user.id)).token_ids == tuple(range(1000))
    with pytest.raises(InvalidInput, match="message_id: must be a user's message"):
        await store.set_user_tokens(owner.id, reply.id, [1])


async def test_any_text_can_be_said(store: Store, owner: UserView, conversation: ConversationView) -> None:
    said = "a\0b \ud800 👩‍🚀 ' \" \\ \r\n"
    user, _ = await store.add_turn(owner.id, conversation.id, None, said, [], None)
    assert user.content == "a\ufffdb \ufffd 👩‍🚀 ' \" \\ \r\n"


def copy_to(user_id: str, conversation_id: str, parent_id: str) -> str:
    """A statement that adds a copy of the root message at that place of the tree."""
    return (
        "INSERT INTO messages (seq, id, user_id, conversation_id, parent_id, role, content, token_ids, "
        f"status, stats, created_at, updated_at) SELECT 99, 'new', {user_id}, {conversation_id}, "
        f"{parent_id}, role, content, token_ids, status, stats, 0, 0 FROM messages WHERE parent_id IS NULL"
    )


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE messages SET parent_id = id",
        "UPDATE messages SET user_id = 'somebody'",
        "UPDATE messages SET conversation_id = 'other'",
        "UPDATE messages SET role = 'user'",
        "UPDATE messages SET status = 'odd'",
        "UPDATE messages SET token_ids = substr(token_ids, 1, 3)",
        "UPDATE messages SET stats = '{'",
        "DELETE FROM messages WHERE parent_id IS NULL",
        copy_to("(SELECT id FROM users WHERE name = 'Eve')", "conversation_id", "NULL"),
        copy_to("user_id", "(SELECT id FROM conversations WHERE title = 'other')", "id"),
        copy_to("user_id", "conversation_id", "'missing'"),
    ],
)
async def test_the_database_itself_guards_the_tree(
    store: Store,
    owner: UserView,
    stranger: UserView,
    conversation: ConversationView,
    database: Database,
    change: str,
) -> None:
    await exchange(store, owner.id, conversation.id, None, "one", "1")
    await store.create_conversation(owner.id, "other")
    before = dump(database)
    # PostgreSQL has a type for JSON, and no constraint.
    refused = DatabaseError if database.dialect.name == "PostgreSQL" and "stats" in change else IntegrityError
    with pytest.raises(refused):
        await database.write(lambda session: session.execute(text(change)) and None)
    assert dump(database) == before


async def test_a_well_placed_message_is_accepted(
    store: Store, owner: UserView, conversation: ConversationView, database: Database
) -> None:
    """So that what the test above sees refused is refused for its place."""
    await exchange(store, owner.id, conversation.id, None, "one", "1")
    change = text(copy_to("user_id", "conversation_id", "NULL"))
    await database.write(lambda session: session.execute(change) and None)
    assert (await store.get_message(owner.id, "new")).sibling_count == 2


async def test_two_thousand_messages(
    store: Store, owner: UserView, conversation: ConversationView, database: Database
) -> None:
    """A long path with three versions of each reply is read, and walked down, in a moment."""

    def fill(session: Session) -> str:
        rows, parent, seq = [], None, 0
        for depth in range(2000):
            user = depth % 2 == 0
            versions = [new_id() for _ in range(1 if user else 3)]
            for identifier in versions:
                seq += 1
                rows.append(
                    {
                        "seq": seq,
                        "id": identifier,
                        "user_id": owner.id,
                        "conversation_id": conversation.id,
                        "parent_id": parent,
                        "role": "user" if user else "assistant",
                        "content": f"message {depth} " * 10,
                        "token_ids": pack_tokens(range(200)),
                        "status": "complete",
                        "stats": {},
                        "created_at": seq,
                        "updated_at": seq,
                    }
                )
            parent = versions[0]
        session.execute(insert(Message), rows)
        session.execute(text("UPDATE conversations SET active_leaf_id = :leaf"), {"leaf": parent})
        return rows[0]["id"]

    def gather_statistics(session: Session) -> None:
        # PostgreSQL does so when it likes: in the middle of such a load it sees no row of it, and chooses
        # indexes by that until the next time.
        session.execute(text("ANALYZE messages"))

    root = await database.write(fill)
    await database.write(gather_statistics)
    path, read_seconds = await quickest(lambda: store.path(owner.id, conversation.id), 2)
    leaf, walk_seconds = await quickest(lambda: store.set_active_leaf(owner.id, conversation.id, root), 2)
    assert len(path) == 2000
    assert [message.parent_id for message in path[1:]] == [message.id for message in path[:-1]]
    assert {(m.sibling_index, m.sibling_count) for m in path[::2]} == {(0, 1)}
    assert {(m.sibling_index, m.sibling_count) for m in path[1::2]} == {(0, 3)}
    assert (leaf.sibling_index, leaf.sibling_count) == (2, 3)
    # 0.04 s and 0.01 s on two cores (PostgreSQL: 0.1 s and 0.03 s); without the indexes, seconds to minutes.
    assert read_seconds < 2
    assert walk_seconds < 2


async def test_a_long_conversation_can_be_removed(
    store: Store, owner: UserView, conversation: ConversationView, database: Database
) -> None:
    def fill(session: Session) -> None:
        parent = None
        for depth in range(1500):
            row = new_id()
            session.execute(
                insert(Message).values(
                    id=row,
                    user_id=owner.id,
                    conversation_id=conversation.id,
                    parent_id=parent,
                    role=("user", "assistant")[depth % 2],
                    content="",
                    token_ids=b"",
                    status="complete",
                    stats={},
                    created_at=0,
                    updated_at=0,
                )
            )
            parent = row
        session.execute(text("UPDATE conversations SET active_leaf_id = :leaf"), {"leaf": parent})

    await database.write(fill)
    await database.write(lambda session: session.execute(text("DELETE FROM users")) and None)
    assert {name: len(rows) for name, rows in dump(database).items() if rows} == {}

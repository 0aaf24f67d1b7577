import asyncio
from pathlib import Path

import pytest

from db import Database, Store
from db.errors import Conflict, InvalidInput, NotFound
from db.views import FINAL_STATUSES, FinalStatus, MessageView, UserView
from tests.db.conftest import StartPython
from tests.db.helpers import check_integrity


@pytest.fixture
async def reply(store: Store, owner: UserView) -> MessageView:
    conversation = await store.create_conversation(owner.id)
    return (await store.add_turn(owner.id, conversation.id, None, "question", [1], "smol"))[1]


async def test_a_reply_grows_and_is_finished(store: Store, owner: UserView, reply: MessageView) -> None:
    started = await store.start_reply(owner.id, reply.id)
    assert started.status == "streaming"
    await store.flush_reply(owner.id, reply.id, "Once", [7], {"ttft_ms": 12.5})
    flushed = await store.get_message(owner.id, reply.id)
    assert (flushed.content, flushed.token_ids, flushed.status) == ("Once", (7,), "streaming")
    assert flushed.stats == {"ttft_ms": 12.5}
    await store.flush_reply(owner.id, reply.id, "Once upon", [7, 8])
    assert (await store.get_message(owner.id, reply.id)).stats == {"ttft_ms": 12.5}
    stats = {"prompt_tokens": 5, "cached_tokens": 0, "kept_fraction": 0.5}
    done = await store.finish_reply(owner.id, reply.id, "complete", "Once upon.", [7, 8, 9], stats, "stop")
    assert done == await store.get_message(owner.id, reply.id)
    assert (done.content, done.token_ids, done.status) == ("Once upon.", (7, 8, 9), "complete")
    assert (done.stats, done.finish_reason, done.error, done.model) == (stats, "stop", None, "smol")
    assert done.is_final
    assert done.updated_at > flushed.updated_at > reply.updated_at
    conversation = await store.get_conversation(owner.id, reply.conversation_id)
    assert conversation.updated_at == done.updated_at


@pytest.mark.parametrize("status", FINAL_STATUSES)
async def test_a_final_status_is_final(
    store: Store, owner: UserView, reply: MessageView, status: FinalStatus
) -> None:
    done = await store.finish_reply(owner.id, reply.id, status, "text", [1], {}, error="an error\0")
    assert (done.status, done.error) == (status, "an error\ufffd")
    for call in (
        lambda: store.start_reply(owner.id, reply.id),
        lambda: store.flush_reply(owner.id, reply.id, "later", [2]),
        lambda: store.finish_reply(owner.id, reply.id, "complete", "later", [2]),
    ):
        with pytest.raises(Conflict, match=f"the reply is {status}"):
            await call()
    assert await store.get_message(owner.id, reply.id) == done


@pytest.mark.parametrize("status", ["pending", "streaming", "odd", ""])
async def test_other_statuses_are_refused(
    store: Store, owner: UserView, reply: MessageView, status: FinalStatus
) -> None:
    with pytest.raises(InvalidInput, match="status: must be one of complete, stopped, interrupted, error"):
        await store.finish_reply(owner.id, reply.id, status, "text", [1])
    assert await store.get_message(owner.id, reply.id) == reply


async def test_only_replies_are_written(store: Store, owner: UserView, reply: MessageView) -> None:
    assert reply.parent_id is not None
    for call in (
        lambda identifier: store.start_reply(owner.id, identifier),
        lambda identifier: store.flush_reply(owner.id, identifier, "x", []),
        lambda identifier: store.finish_reply(owner.id, identifier, "complete", "x", []),
    ):
        with pytest.raises(InvalidInput, match="reply_id: must be a reply"):
            await call(reply.parent_id)
        with pytest.raises(NotFound, match="message not found"):
            await call("missing")


async def test_starting_twice_is_a_conflict(store: Store, owner: UserView, reply: MessageView) -> None:
    results = await asyncio.gather(
        *(store.start_reply(owner.id, reply.id) for _ in range(4)), return_exceptions=True
    )
    assert sum(isinstance(result, MessageView) for result in results) == 1
    assert sum(isinstance(result, Conflict) for result in results) == 3


async def test_a_reply_of_a_deleted_conversation_is_kept(
    store: Store, owner: UserView, reply: MessageView
) -> None:
    await store.start_reply(owner.id, reply.id)
    await store.delete_conversation(owner.id, reply.conversation_id)
    await store.flush_reply(owner.id, reply.id, "half", [1])
    await store.finish_reply(owner.id, reply.id, "stopped", "half of it", [1, 2])
    await store.restore_conversation(owner.id, reply.conversation_id)
    assert (await store.path(owner.id, reply.conversation_id))[-1].content == "half of it"


async def test_recovery_keeps_the_text(
    store: Store, owner: UserView, stranger: UserView, reply: MessageView
) -> None:
    await store.start_reply(owner.id, reply.id)
    await store.flush_reply(owner.id, reply.id, "so far", [4, 5], {"ttft_ms": 1})
    other = await store.create_conversation(stranger.id)
    user, pending = await store.add_turn(stranger.id, other.id, None, "question", [1], None)
    await store.finish_reply(stranger.id, pending.id, "complete", "answer", [1])
    pending = await store.add_reply(stranger.id, other.id, user.id, None)
    assert await store.recover_interrupted() == 2
    recovered = await store.get_message(owner.id, reply.id)
    assert (recovered.status, recovered.content, recovered.token_ids) == ("interrupted", "so far", (4, 5))
    assert recovered.stats == {"ttft_ms": 1}
    statuses = [
        (await store.get_message(stranger.id, m)).status
        for m in await store.siblings(stranger.id, pending.id)
    ]
    assert statuses == ["complete", "interrupted"]
    assert await store.recover_interrupted() == 0
    # The conversation goes on below the interrupted reply.
    await store.add_turn(owner.id, reply.conversation_id, reply.id, "go on", [1], None)


KILLED = """
import asyncio, sys
from pathlib import Path
from sqlalchemy import text
from db import Database, Store

async def main():
    database = Database(Path(sys.argv[1]))
    database.migrate()
    store = Store(database)
    user = await store.create_user("Ada", "hash")
    conversation = await store.create_conversation(user.id)
    _, reply = await store.add_turn(user.id, conversation.id, None, "question", [1, 2], "smol")
    await store.start_reply(user.id, reply.id)
    for count in range(1, 301):
        await store.flush_reply(user.id, reply.id, "word " * count, range(count))

    def half(session):
        session.execute(text("UPDATE messages SET content = 'half done', status = 'complete'"))
        session.execute(text("CREATE TABLE big AS SELECT randomblob(20000000) AS filler"))
        print(user.id, reply.id, flush=True)
        sys.stdin.readline()

    await database.write(half)

asyncio.run(main())
"""


async def test_killed_in_the_middle_of_a_write(tmp_path: Path, start_python: StartPython) -> None:
    path = tmp_path / "chat.sqlite3"
    process = start_python(KILLED, path)
    assert process.stdout is not None
    owner_id, reply_id = process.stdout.readline().split()
    process.kill()
    process.wait()
    database = Database(path)
    database.migrate()
    store = Store(database)
    assert (await store.get_message(owner_id, reply_id)).status == "streaming"
    assert await store.recover_interrupted() == 1
    reply = await store.get_message(owner_id, reply_id)
    assert (reply.status, reply.content) == ("interrupted", "word " * 300)
    assert reply.token_ids == tuple(range(300))
    assert [message.id for message in await store.path(owner_id, reply.conversation_id)][1:] == [reply_id]
    assert len(await store.list_conversations(owner_id, "word word")) == 1
    await database.aclose()
    check_integrity(database)

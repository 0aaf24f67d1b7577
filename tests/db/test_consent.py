"""Conversations are given out for calibration only where their people allow it."""

import pytest
from sqlalchemy import delete

from db import Database, Store
from db.errors import NotFound
from db.models import User
from db.repository import execute
from db.views import UserView
from tests.db.helpers import dump, exchange


async def talk(store: Store, owner: UserView, question: str, answer: str) -> str:
    conversation = await store.create_conversation(owner.id, "t")
    await exchange(store, owner.id, conversation.id, None, question, answer)
    return conversation.id


async def test_nobody_s_until_they_say_so(store: Store, owner: UserView, stranger: UserView) -> None:
    await talk(store, owner, "what?", "that")
    await talk(store, stranger, "secret?", "no")
    assert await store.calibration_consent(owner.id) is None
    assert await store.calibration_texts() == []
    first = await store.set_calibration_consent(owner.id, True)
    assert first is not None
    assert await store.set_calibration_consent(owner.id, True) == first
    assert await store.calibration_consent(owner.id) == first
    assert await store.calibration_consent(stranger.id) is None
    assert await store.calibration_texts() == [["what?\n\nthat"]], "one person speaks for one person"
    assert await store.set_calibration_consent(owner.id, False) is None
    assert await store.calibration_texts() == []
    for missing in (store.calibration_consent("none"), store.set_calibration_consent("none", True)):
        with pytest.raises(NotFound):
            await missing


async def test_finished_messages_of_the_active_branch(store: Store, owner: UserView) -> None:
    await store.set_calibration_consent(owner.id, True)
    first = await talk(store, owner, "one", "first answer")
    leaf = (await store.get_conversation(owner.id, first)).active_leaf_id
    await store.add_turn(owner.id, first, leaf, "and then?", [1], "m")
    other = await store.create_conversation(owner.id, "other")
    await exchange(store, owner.id, other.id, None, "left", "aside")
    await exchange(store, owner.id, other.id, None, " taken ", "\n")
    gone = await talk(store, owner, "deleted", "gone")
    await store.delete_conversation(owner.id, gone)
    await store.create_conversation(owner.id, "empty")
    assert await store.calibration_texts() == [["taken", "one\n\nfirst answer\n\nand then?"]]


async def test_disabled_people_are_left_out_and_removed_ones_forgotten(
    store: Store, database: Database, owner: UserView, stranger: UserView
) -> None:
    for user in (owner, stranger):
        await store.set_calibration_consent(user.id, True)
        await talk(store, user, "q", user.name)
    await store.set_admin(stranger.id, True)  # one administrator has to stay
    await store.disable_user(owner.id)
    assert await store.calibration_texts() == [["q\n\nEve"]]

    await database.write(lambda session: execute(session, delete(User).where(User.id == stranger.id)))
    assert [row[0] for row in dump(database)["calibration_consent"]] == [owner.id]

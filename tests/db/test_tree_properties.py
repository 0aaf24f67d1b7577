"""The message tree under random use, against a plain model of it."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from db import Database, Store
from db.postgres.url import PostgresUrl
from db.views import FINAL_STATUSES, MessageView
from tests.db.helpers import check_integrity
from tests.postgres_server import PostgresServer

T = TypeVar("T")


class Tree(RuleBasedStateMachine):
    """Adds turns, edits, other replies; finishes, switches, restarts; and compares after every step."""

    def __init__(self, url: PostgresUrl | None = None) -> None:
        super().__init__()
        self.url = url
        self.runner = asyncio.Runner()
        self.folder = TemporaryDirectory()
        self.open()
        self.owner = self.run(self.store.create_user("Ada", "hash")).id
        self.conversation = self.run(self.store.create_conversation(self.owner)).id
        self.parents: dict[str, str | None] = {}  # in the order in which they were added
        self.texts: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.users: list[str] = []
        self.open_replies: list[str] = []
        self.final_replies: list[str] = []
        self.active: str | None = None

    def open(self) -> None:
        self.database = Database(Path(self.folder.name) / "chat.sqlite3", url=self.url)
        self.database.migrate()
        self.store = Store(self.database)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def added(self, message: MessageView) -> None:
        self.parents[message.id] = message.parent_id
        self.texts[message.id] = (message.content, message.token_ids)
        (self.users if message.role == "user" else self.open_replies).append(message.id)
        self.active = message.id

    def children(self, parent: str | None) -> list[str]:
        return [message for message, above in self.parents.items() if above == parent]

    def branch(self, message: str | None) -> list[str]:
        found: list[str] = []
        while message is not None:
            found.append(message)
            message = self.parents[message]
        return found[::-1]

    @rule(data=st.data(), content=st.text(max_size=5), tokens=st.lists(st.integers(0, 2**31 - 1), max_size=3))
    def turn(self, data: st.DataObject, content: str, tokens: list[int]) -> None:
        parent = data.draw(st.sampled_from([None, *self.final_replies]))
        for message in self.run(
            self.store.add_turn(self.owner, self.conversation, parent, content, tokens, "m")
        ):
            self.added(message)
        assert self.texts[self.users[-1]][1] == tuple(tokens)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def another_reply(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(self.users))
        self.added(self.run(self.store.add_reply(self.owner, self.conversation, user, "m")))

    @precondition(lambda self: self.open_replies)
    @rule(data=st.data(), text=st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=5))
    def flush(self, data: st.DataObject, text: str) -> None:
        reply = data.draw(st.sampled_from(self.open_replies))
        self.run(self.store.flush_reply(self.owner, reply, text, range(len(text))))
        self.texts[reply] = (text, tuple(range(len(text))))

    @precondition(lambda self: self.open_replies)
    @rule(data=st.data(), status=st.sampled_from(FINAL_STATUSES))
    def finish(self, data: st.DataObject, status: Any) -> None:
        reply = data.draw(st.sampled_from(self.open_replies))
        self.run(self.store.finish_reply(self.owner, reply, status, "done", [1]))
        self.texts[reply] = ("done", (1,))
        self.open_replies.remove(reply)
        self.final_replies.append(reply)

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def switch(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(list(self.parents)))
        leaf = self.run(self.store.set_active_leaf(self.owner, self.conversation, message))
        self.active = [other for other in self.parents if message in self.branch(other)][-1]
        assert leaf.id == self.active
        assert not self.children(leaf.id)

    @rule()
    def restart(self) -> None:
        self.database.close()
        self.open()
        assert self.run(self.store.recover_interrupted()) == len(self.open_replies)
        self.final_replies += self.open_replies
        self.open_replies = []

    @invariant()
    def the_active_path_is_the_model_s(self) -> None:
        path = self.run(self.store.path(self.owner, self.conversation))
        assert [message.id for message in path] == self.branch(self.active)
        for message in path:
            siblings = self.children(message.parent_id)
            assert message.sibling_index == siblings.index(message.id)
            assert message.sibling_count == len(siblings)
            assert (message.content, message.token_ids) == self.texts[message.id]
            assert message.is_final == (message.id not in self.open_replies)
            assert message.role == ("user" if message.id in self.users else "assistant")

    def teardown(self) -> None:
        for message in self.parents:
            path = self.run(self.store.path(self.owner, self.conversation, message))
            assert [item.id for item in path] == self.branch(message)
            assert self.run(self.store.siblings(self.owner, message)) == self.children(self.parents[message])
        self.database.close()
        check_integrity(self.database)
        self.runner.close()
        self.folder.cleanup()


def test_on_sqlite() -> None:
    run_state_machine_as_test(Tree, settings=settings(max_examples=8, stateful_step_count=20, deadline=None))


def test_on_postgres(postgres_server: PostgresServer) -> None:
    fewer = settings(max_examples=4, stateful_step_count=20, deadline=None)
    run_state_machine_as_test(lambda: Tree(postgres_server.emptied()), settings=fewer)

"""The operator's side: exports, backups, and with sqlite-utils the samples of the engine's memory.

sqlite-utils manages transactions by itself and may turn foreign keys off. So it reads on a read-only
connection, and writes on the writer's bare connection, which is thrown away afterwards.
"""

import asyncio
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlite_utils
from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from db.database import Database
from db.dialect import Vacuumed
from db.errors import InvalidInput, NotFound
from db.models import Conversation, Message, User
from db.values import unpack_tokens

EXPORT_FORMAT = "tangram-chat/1"
MEMORY_SAMPLES = 43_200  # of thinned ones, most of a year

_CONVERSATION = (
    "id", "title", "system_prompt", "settings", "active_leaf_id", "created_at", "updated_at", "deleted_at",
    "archived_at",
)  # fmt: skip
_MESSAGE = (
    "id", "conversation_id", "parent_id", "role", "content", "token_ids", "status", "finish_reason", "error",
    "stats", "model", "created_at", "updated_at", "rating",
)  # fmt: skip


async def export_conversation(database: Database, owner_id: str, conversation_id: str) -> dict[str, Any]:
    """One of the owner's conversations with all branches, as a JSON object. Raises NotFound."""

    def work(session: Session) -> dict[str, Any]:
        chosen = Conversation.id == conversation_id, Conversation.deleted_at.is_(None)
        conversations = _rows(session, _conversations(owner_id).where(*chosen))
        if not conversations:
            raise NotFound("conversation")
        messages = _messages(owner_id).where(Message.conversation_id == conversation_id)
        return _export(conversations, _rows(session, messages))

    return await database.read(work)


async def export_owner(database: Database, owner_id: str) -> dict[str, Any]:
    """All of the owner's conversations, deleted ones included, as a JSON object. Raises NotFound.

    Hashes of passwords and keys and the cache salt are no part of it.
    """

    def work(session: Session) -> dict[str, Any]:
        users = _rows(session, select(User.id, User.name, User.created_at).where(User.id == owner_id))
        if not users:
            raise NotFound("user")
        # Conversations that are still being taken in have -1 (see `db.transfer`) and are nobody's yet.
        conversations = _conversations(owner_id).where(Conversation.deleted_at.is_distinct_from(-1))
        shown = select(Conversation.id).where(Conversation.deleted_at.is_distinct_from(-1))
        messages = _messages(owner_id).where(Message.conversation_id.in_(shown))
        return {"user": users[0], **_export(_rows(session, conversations), _rows(session, messages))}

    return await database.read(work)


def _conversations(owner_id: str) -> Select[*tuple[Any, ...]]:
    columns = (getattr(Conversation, name) for name in _CONVERSATION)
    return select(*columns).where(Conversation.user_id == owner_id).order_by(Conversation.seq)


def _messages(owner_id: str) -> Select[*tuple[Any, ...]]:
    columns = (getattr(Message, name) for name in _MESSAGE)
    return select(*columns).where(Message.user_id == owner_id).order_by(Message.seq)


def _rows(session: Session, query: Select[*tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [dict(row) for row in session.execute(query).mappings()]


async def back_up_now(database: Database) -> Path:
    """Copy the live database to a checked file in its backup directory and return the path.

    Writes go on meanwhile; the copy is the state of one moment. Raises StorageUnavailable.
    """
    return await asyncio.to_thread(database.dialect.back_up, database.backup_dir, "manual")


async def vacuum(database: Database) -> Vacuumed:
    """Put the database in order, see `Database.vacuum`. Raises StorageUnavailable when there is no room."""
    return await database.vacuum()


async def add_memory_sample(
    database: Database, sample: Mapping[str, int | float | str], keep: int = MEMORY_SAMPLES
) -> None:
    """Append a row to the table `memory_samples`, made when it is missing, and keep the newest `keep` rows.

    `sample` maps column names to values; new names become new columns. `time` (ms) defaults to now.
    Raises InvalidInput for a name that is no identifier.
    """
    if keep < 1:
        raise InvalidInput("keep", "must be at least 1")
    for name in sample:
        if not (name.isascii() and name.isidentifier()) or name.lower() in ("id", "rowid"):
            raise InvalidInput("sample", f"{name!r} cannot name a column")
    row = {"time": time.time_ns() // 1_000_000, **sample}

    def work(connection: sqlite3.Connection) -> None:
        tool = sqlite_utils.Database(connection, recursive_triggers=False, execute_plugins=False)
        with tool.atomic():
            table = tool["memory_samples"]
            if not table.exists():
                table.create({"id": int, "time": int}, pk="id")
            table.insert(row, alter=True)
            table.delete_where("id <= (SELECT max(id) FROM memory_samples) - ?", [keep])

    await database.write_raw(work)


@dataclass(frozen=True, slots=True)
class Thinning:
    """Of rows older than `age` ms, one is kept of each `span` ms."""

    age: int
    span: int


async def thin_memory_samples(database: Database, rules: Sequence[Thinning], now: int | None = None) -> int:
    """Delete older samples but one of each span, by all rules; return how many there were."""
    moment = time.time_ns() // 1_000_000 if now is None else now

    def work(connection: sqlite3.Connection) -> int:
        tool = sqlite_utils.Database(connection, recursive_triggers=False, execute_plugins=False)
        table = tool["memory_samples"]
        if not table.exists():
            return 0
        before = table.count
        with tool.atomic():
            for rule in rules:
                table.delete_where(
                    "time < :old AND id NOT IN (SELECT max(id) FROM memory_samples WHERE time < :old"
                    " GROUP BY time / :span)",
                    {"old": moment - rule.age, "span": rule.span},
                )
        return int(before - table.count)

    return await database.write_raw(work)


async def memory_samples(database: Database, limit: int = 1000) -> list[dict[str, Any]]:
    """The newest `limit` memory samples, oldest first; empty when none was ever taken."""
    if limit < 1:
        raise InvalidInput("limit", "must be at least 1")

    def work(connection: sqlite3.Connection) -> list[dict[str, Any]]:
        tool = sqlite_utils.Database(connection, recursive_triggers=False, execute_plugins=False)
        if not tool["memory_samples"].exists():
            return []
        rows = list(tool.query("SELECT * FROM memory_samples ORDER BY id DESC LIMIT ?", [limit]))
        return rows[::-1]

    return await database.read_raw(work)


def _export(conversations: list[dict[str, Any]], messages: list[dict[str, Any]]) -> dict[str, Any]:
    by_id = {row["id"]: row | {"messages": []} for row in conversations}
    for row in messages:
        message = row | {"token_ids": list(unpack_tokens(row["token_ids"]))}
        by_id[message.pop("conversation_id")]["messages"].append(message)
    return {
        "format": EXPORT_FORMAT,
        "exported_at": time.time_ns() // 1_000_000,
        "conversations": list(by_id.values()),
    }

"""The operator's side: exports, backups and samples of the engine's memory, mostly with sqlite-utils.

sqlite-utils manages transactions by itself and may turn foreign keys off. So it reads on a read-only
connection, and writes on the writer's bare connection, which is thrown away afterwards.
"""

import asyncio
import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlite_utils
from sqlalchemy.orm import Session

from db.backup import back_up
from db.database import Database
from db.errors import InvalidInput, NotFound, StorageUnavailable
from db.values import unpack_tokens

EXPORT_FORMAT = "tangram-chat/1"
MEMORY_SAMPLES = 43_200  # of thinned ones, most of a year

_CONVERSATIONS = """
    SELECT id, title, system_prompt, settings, active_leaf_id, created_at, updated_at, deleted_at,
    archived_at
    FROM conversations WHERE user_id = :owner_id
"""
_MESSAGES = """
    SELECT id, conversation_id, parent_id, role, content, token_ids, status, finish_reason, error, stats,
    model, created_at, updated_at, rating FROM messages WHERE user_id = :owner_id
"""

# Conversations that are still being taken in have -1 (see `db.transfer`) and are nobody's yet.
_NOT_STAGED = """
    AND conversation_id NOT IN (SELECT id FROM conversations WHERE user_id = :owner_id AND deleted_at = -1)
"""


async def export_conversation(database: Database, owner_id: str, conversation_id: str) -> dict[str, Any]:
    """One of the owner's conversations with all branches, as a JSON object. Raises NotFound."""
    parameters = {"owner_id": owner_id, "conversation_id": conversation_id}

    def work(session: Session) -> dict[str, Any]:
        tool = _tool(session)
        conversations = list(
            tool.query(_CONVERSATIONS + "AND id = :conversation_id AND deleted_at IS NULL", parameters)
        )
        if not conversations:
            raise NotFound("conversation")
        messages = tool.query(_MESSAGES + "AND conversation_id = :conversation_id ORDER BY seq", parameters)
        return _export(conversations, messages)

    return await database.read(work)


async def export_owner(database: Database, owner_id: str) -> dict[str, Any]:
    """All of the owner's conversations, deleted ones included, as a JSON object. Raises NotFound.

    Hashes of passwords and keys and the cache salt are no part of it.
    """

    def work(session: Session) -> dict[str, Any]:
        tool = _tool(session)
        parameters = {"owner_id": owner_id}
        users = list(tool.query("SELECT id, name, created_at FROM users WHERE id = :owner_id", parameters))
        if not users:
            raise NotFound("user")
        conversations = list(tool.query(_CONVERSATIONS + "AND deleted_at IS NOT -1 ORDER BY seq", parameters))
        messages = tool.query(_MESSAGES + _NOT_STAGED + "ORDER BY seq", parameters)
        return {"user": users[0], **_export(conversations, messages)}

    return await database.read(work)


async def back_up_now(database: Database) -> Path:
    """Copy the live database to a checked file in its backup directory and return the path.

    Writes go on meanwhile; the copy is the state of one moment. Raises StorageUnavailable.
    """
    return await asyncio.to_thread(back_up, database.path, database.backup_dir, "manual")


@dataclass(frozen=True, slots=True)
class Vacuumed:
    """Bytes of the database file before and after."""

    before: int
    after: int


async def vacuum(database: Database) -> Vacuumed:
    """Rewrite the file without the space that deleted rows left, and put the search index in order.

    Reads go on meanwhile; writes wait, some seconds for each gigabyte. Takes about twice the file's size of
    free space. Raises StorageUnavailable when there is not enough.
    """

    def work(connection: sqlite3.Connection) -> Vacuumed:
        tool = sqlite_utils.Database(connection, recursive_triggers=False, execute_plugins=False)
        before = _size(connection)
        tool.execute("INSERT INTO messages_search (messages_search) VALUES ('optimize')")
        tool.execute("INSERT INTO conversations_search (conversations_search) VALUES ('optimize')")
        tool.vacuum()
        tool.execute("PRAGMA optimize")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return Vacuumed(before, _size(connection))

    return await database.write_raw(work)


def _size(connection: sqlite3.Connection) -> int:
    pages, page = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size")
    )
    return pages * page


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

    def work(session: Session) -> list[dict[str, Any]]:
        tool = _tool(session)
        if not tool["memory_samples"].exists():
            return []
        rows = list(tool.query("SELECT * FROM memory_samples ORDER BY id DESC LIMIT ?", [limit]))
        return rows[::-1]

    return await database.read(work)


def _tool(session: Session) -> Any:
    connection = session.connection().connection.driver_connection
    if connection is None:
        raise StorageUnavailable("the reader has no connection")
    return sqlite_utils.Database(connection, recursive_triggers=False, execute_plugins=False)


def _export(conversations: list[dict[str, Any]], messages: Any) -> dict[str, Any]:
    by_id = {row["id"]: _decoded(row, "settings") | {"messages": []} for row in conversations}
    for row in messages:
        message = _decoded(row, "stats") | {"token_ids": list(unpack_tokens(row["token_ids"]))}
        by_id[message.pop("conversation_id")]["messages"].append(message)
    return {
        "format": EXPORT_FORMAT,
        "exported_at": time.time_ns() // 1_000_000,
        "conversations": list(by_id.values()),
    }


def _decoded(row: dict[str, Any], column: str) -> dict[str, Any]:
    return row | {column: json.loads(row[column])}

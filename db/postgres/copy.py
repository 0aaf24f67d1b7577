"""Copying all rows between PostgreSQL and an SQLite file whose schema has the same version.

Both drivers are used bare, so that every value arrives as it was: texts of JSON too. What PostgreSQL cannot
hold (NUL, lone surrogates) becomes U+FFFD, as it does wherever text is stored.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from db.errors import MigrationError
from db.models import Base
from db.values import clean_text

_FIRST = ("users", "conversations", "messages")
"""What others refer to, in an order that their foreign keys allow."""
_BATCH_ROWS = 500
_COLUMNS = """
    SELECT table_name, column_name, udt_name FROM information_schema.columns
    WHERE table_schema = current_schema()::text
    ORDER BY ordinal_position
"""
_KEYS = """
    SELECT table_name, column_name FROM information_schema.key_column_usage
    JOIN information_schema.table_constraints USING (constraint_schema, constraint_name, table_name)
    WHERE constraint_schema = current_schema()::text AND constraint_type = 'PRIMARY KEY'
"""
_ALIKE = """
    SELECT m.name, c.name FROM sqlite_schema AS m, pragma_table_info(m.name) AS c
    WHERE m.type = 'table' AND m.name NOT LIKE '%\\_search%' ESCAPE '\\'
    AND m.name NOT LIKE 'sqlite\\_%' ESCAPE '\\'
    AND m.name <> 'memory_samples'
"""

Tables = dict[str, dict[str, str]]
"""Columns and their types in PostgreSQL, by table."""


def tables(cursor: Any) -> Tables:
    """The product's tables, in an order in which they can be filled; others may lie beside them."""
    cursor.execute(_COLUMNS)
    found: Tables = {}
    for table, column, kind in cursor.fetchall():
        if table in Base.metadata.tables:
            found.setdefault(table, {})[column] = kind
    order = [*(name for name in _FIRST if name in found), *sorted(found.keys() - set(_FIRST))]
    return {name: found[name] for name in order}


def to_sqlite(cursor: Any, target: sqlite3.Connection) -> dict[str, int]:
    """Copy every row into an empty file, in its current transaction; how many there are, by table.

    cursor: of a transaction that sees one moment.
    """
    shapes = _same_shape(tables(cursor), target)
    keys = _primary_keys(cursor)
    for table, columns in shapes.items():
        into = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        for batch in _pages(cursor, table, columns, keys[table]):
            target.executemany(into, batch)
    return _agreed(cursor, target, shapes)


def to_postgres(source: sqlite3.Connection, cursor: Any) -> dict[str, int]:
    """Copy every row of a file into empty tables, in the current transaction; how many, by table."""
    shapes = _same_shape(tables(cursor), source)
    for table, columns in shapes.items():
        names, kinds = ", ".join(columns), list(columns.values())
        row = f"({', '.join(f'%s::{kind}' for kind in kinds)})"
        found = source.execute(f"SELECT {names} FROM {table}")
        while batch := found.fetchmany(_BATCH_ROWS):
            values = [_stored(value, kind) for each in batch for value, kind in zip(each, kinds, strict=True)]
            cursor.execute(f"INSERT INTO {table} ({names}) VALUES {', '.join([row] * len(batch))}", values)
    return _agreed(cursor, source, shapes)


def _stored(value: Any, kind: str) -> Any:
    if kind == "bool" and value is not None:
        return bool(value)
    return clean_text(value) if isinstance(value, str) else value


def _pages(cursor: Any, table: str, columns: dict[str, str], key: str) -> Iterator[Sequence[Sequence[Any]]]:
    """All rows, a batch at a time: the driver holds a whole result in memory."""
    names = ", ".join(f"{name}::text" if kind == "json" else name for name, kind in columns.items())
    place = list(columns).index(key)
    condition, last = "", list[Any]()
    while True:
        cursor.execute(f"SELECT {names} FROM {table} {condition} ORDER BY {key} LIMIT {_BATCH_ROWS}", last)
        batch = cursor.fetchall()
        if not batch:
            return
        yield batch
        condition, last = f"WHERE {key} > %s::{columns[key]}", [batch[-1][place]]


def _primary_keys(cursor: Any) -> dict[str, str]:
    cursor.execute(_KEYS)
    return dict(cursor.fetchall())


def _same_shape(shapes: Tables, other: sqlite3.Connection) -> Tables:
    """`shapes`, whose names go into statements. MigrationError unless the file has the same columns."""
    alike: dict[str, set[str]] = {}
    for table, column in other.execute(_ALIKE):
        alike.setdefault(table, set()).add(column)
    if alike != {table: set(columns) for table, columns in shapes.items()}:
        raise MigrationError("the two databases do not have the same tables and columns")
    return shapes


def _agreed(cursor: Any, other: sqlite3.Connection, shapes: Tables) -> dict[str, int]:
    """The counts of both sides. Raises MigrationError where they differ."""
    counts = {}
    for table in shapes:
        query = f"SELECT count(*) FROM {table}"
        cursor.execute(query)
        counts[table] = int(cursor.fetchone()[0])
        if (there := other.execute(query).fetchone()[0]) != counts[table]:
            raise MigrationError(f"{table} has {counts[table]} rows in PostgreSQL and {there} in the file")
    return counts

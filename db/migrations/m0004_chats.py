"""Conversations can be archived, and replies liked or disliked."""

from db.migrations.base import Migration, statements

MIGRATION = Migration(
    4,
    "chats",
    statements(
        "ALTER TABLE conversations ADD COLUMN archived_at INTEGER",
        "ALTER TABLE messages ADD COLUMN rating INTEGER CHECK (rating IN (-1, 1))",
    ),
    (
        "ALTER TABLE conversations ADD COLUMN archived_at BIGINT",
        "ALTER TABLE messages ADD COLUMN rating BIGINT CHECK (rating IN (-1, 1))",
    ),
)

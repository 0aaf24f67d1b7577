"""Invitations and password resets, quotas, and what tells one sign-in and one audited event from another."""

from db.migrations.base import Migration, statements

MIGRATION = Migration(
    3,
    "people",
    statements(
        # A sign-in gets a public name, so that its owner can end it, and says where it came from.
        "ALTER TABLE sessions ADD COLUMN id TEXT NOT NULL DEFAULT ''",
        "UPDATE sessions SET id = lower(hex(randomblob(16)))",
        "CREATE UNIQUE INDEX sessions_id ON sessions (id)",
        "ALTER TABLE sessions ADD COLUMN address TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE sessions ADD COLUMN user_agent TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE audit ADD COLUMN address TEXT",
        "ALTER TABLE audit ADD COLUMN request_id TEXT",
        """
        CREATE TABLE links (
            id TEXT NOT NULL PRIMARY KEY,
            token_hash TEXT NOT NULL UNIQUE,
            kind TEXT NOT NULL CHECK (kind IN ('invite', 'reset')),
            user_id TEXT REFERENCES users (id) ON DELETE CASCADE,
            is_admin INTEGER NOT NULL CHECK (is_admin IN (0, 1)),
            note TEXT NOT NULL,
            created_by TEXT REFERENCES users (id) ON DELETE SET NULL,
            created_at INTEGER NOT NULL,
            expires_at INTEGER NOT NULL,
            used_at INTEGER,
            revoked_at INTEGER,
            CHECK ((kind = 'reset') = (user_id IS NOT NULL) OR used_at IS NOT NULL)
        ) STRICT
        """,
        "CREATE INDEX links_user ON links (user_id)",
        "CREATE INDEX links_creator ON links (created_by)",
        """
        CREATE TABLE quotas (
            user_id TEXT NOT NULL PRIMARY KEY REFERENCES users (id) ON DELETE CASCADE,
            running INTEGER CHECK (running >= 1),
            waiting INTEGER CHECK (waiting >= 0),
            per_minute INTEGER CHECK (per_minute >= 1),
            updated_at INTEGER NOT NULL
        ) STRICT
        """,
    ),
    (
        "ALTER TABLE sessions ADD COLUMN id TEXT NOT NULL DEFAULT ''",
        "UPDATE sessions SET id = replace(gen_random_uuid()::text, '-', '')",
        "CREATE UNIQUE INDEX sessions_id ON sessions (id)",
        "ALTER TABLE sessions ADD COLUMN address TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE sessions ADD COLUMN user_agent TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE audit ADD COLUMN address TEXT",
        "ALTER TABLE audit ADD COLUMN request_id TEXT",
        """
        CREATE TABLE links (
            id TEXT NOT NULL PRIMARY KEY,
            token_hash TEXT NOT NULL UNIQUE,
            kind TEXT NOT NULL CHECK (kind IN ('invite', 'reset')),
            user_id TEXT REFERENCES users (id) ON DELETE CASCADE,
            is_admin BOOLEAN NOT NULL,
            note TEXT NOT NULL,
            created_by TEXT REFERENCES users (id) ON DELETE SET NULL,
            created_at BIGINT NOT NULL,
            expires_at BIGINT NOT NULL,
            used_at BIGINT,
            revoked_at BIGINT,
            CHECK ((kind = 'reset') = (user_id IS NOT NULL) OR used_at IS NOT NULL)
        )
        """,
        "CREATE INDEX links_user ON links (user_id)",
        "CREATE INDEX links_creator ON links (created_by)",
        """
        CREATE TABLE quotas (
            user_id TEXT NOT NULL PRIMARY KEY REFERENCES users (id) ON DELETE CASCADE,
            running BIGINT CHECK (running >= 1),
            waiting BIGINT CHECK (waiting >= 0),
            per_minute BIGINT CHECK (per_minute >= 1),
            updated_at BIGINT NOT NULL
        )
        """,
    ),
)

"""Accounts, conversations, the message tree, settings, the audit trail and the search index.

A message carries its owner, and the composite foreign keys make the database itself refuse a message whose
owner, conversation and parent do not belong together. Parents are checked at commit and not cascaded: a chain
of thousands would exceed SQLite's trigger depth, and the conversation's own cascade removes it in one go.

The index holds finished messages only, so a reply that is flushed every second is indexed once.
"""

from db.migrations.base import Migration, statements
from db.migrations.m0001_postgres import STATEMENTS

MIGRATION = Migration(
    1,
    "initial",
    statements(
        """
        CREATE TABLE users (
            id TEXT NOT NULL PRIMARY KEY,
            name TEXT NOT NULL COLLATE NOCASE UNIQUE CHECK (name <> ''),
            password_hash TEXT NOT NULL,
            is_admin INTEGER NOT NULL CHECK (is_admin IN (0, 1)),
            cache_salt TEXT NOT NULL UNIQUE,
            created_at INTEGER NOT NULL,
            disabled_at INTEGER
        ) STRICT
        """,
        """
        CREATE TABLE sessions (
            token_hash TEXT NOT NULL PRIMARY KEY,
            user_id TEXT NOT NULL REFERENCES users (id) ON DELETE CASCADE,
            created_at INTEGER NOT NULL,
            expires_at INTEGER NOT NULL,
            last_seen_at INTEGER NOT NULL
        ) STRICT
        """,
        "CREATE INDEX sessions_user ON sessions (user_id)",
        "CREATE INDEX sessions_expiry ON sessions (expires_at)",
        """
        CREATE TABLE api_keys (
            id TEXT NOT NULL PRIMARY KEY,
            user_id TEXT NOT NULL REFERENCES users (id) ON DELETE CASCADE,
            name TEXT NOT NULL,
            key_hash TEXT NOT NULL UNIQUE,
            created_at INTEGER NOT NULL,
            last_used_at INTEGER,
            revoked_at INTEGER
        ) STRICT
        """,
        "CREATE INDEX api_keys_user ON api_keys (user_id)",
        """
        CREATE TABLE conversations (
            seq INTEGER NOT NULL PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            user_id TEXT NOT NULL REFERENCES users (id) ON DELETE CASCADE,
            title TEXT NOT NULL,
            system_prompt TEXT NOT NULL,
            settings TEXT NOT NULL CHECK (json_valid(settings)),
            active_leaf_id TEXT,
            created_at INTEGER NOT NULL,
            updated_at INTEGER NOT NULL,
            deleted_at INTEGER,
            UNIQUE (id, user_id),
            FOREIGN KEY (active_leaf_id, id) REFERENCES messages (id, conversation_id)
                DEFERRABLE INITIALLY DEFERRED
        ) STRICT
        """,
        "CREATE INDEX conversations_recent ON conversations (user_id, updated_at, id)",
        """
        CREATE TABLE messages (
            seq INTEGER NOT NULL PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            user_id TEXT NOT NULL,
            conversation_id TEXT NOT NULL,
            parent_id TEXT,
            role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
            content TEXT NOT NULL,
            token_ids BLOB NOT NULL CHECK (length(token_ids) % 4 = 0),
            status TEXT NOT NULL
                CHECK (status IN ('complete', 'pending', 'streaming', 'stopped', 'interrupted', 'error')),
            finish_reason TEXT,
            error TEXT,
            stats TEXT NOT NULL CHECK (json_valid(stats)),
            model TEXT,
            created_at INTEGER NOT NULL,
            updated_at INTEGER NOT NULL,
            UNIQUE (id, conversation_id),
            FOREIGN KEY (conversation_id, user_id) REFERENCES conversations (id, user_id) ON DELETE CASCADE,
            FOREIGN KEY (parent_id, conversation_id) REFERENCES messages (id, conversation_id)
                DEFERRABLE INITIALLY DEFERRED
        ) STRICT
        """,
        "CREATE INDEX messages_siblings ON messages (conversation_id, parent_id, seq)",
        "CREATE INDEX messages_parent ON messages (parent_id, conversation_id)",
        "CREATE INDEX messages_user ON messages (user_id)",
        "CREATE INDEX messages_open ON messages (status) WHERE status IN ('pending', 'streaming')",
        # A message never changes its place, so the tree can have no cycle.
        """
        CREATE TRIGGER messages_stay
        BEFORE UPDATE OF seq, id, user_id, conversation_id, parent_id, role ON messages BEGIN
            SELECT RAISE(ABORT, 'a message keeps its place in the tree');
        END
        """,
        """
        CREATE TABLE settings (
            key TEXT NOT NULL PRIMARY KEY,
            value TEXT NOT NULL CHECK (json_valid(value)),
            updated_at INTEGER NOT NULL
        ) STRICT
        """,
        """
        CREATE TABLE audit (
            id TEXT NOT NULL PRIMARY KEY,
            user_id TEXT REFERENCES users (id) ON DELETE SET NULL,
            action TEXT NOT NULL,
            before TEXT NOT NULL CHECK (json_valid(before)),
            after TEXT NOT NULL CHECK (json_valid(after)),
            created_at INTEGER NOT NULL
        ) STRICT
        """,
        "CREATE INDEX audit_time ON audit (created_at)",
        "CREATE INDEX audit_user ON audit (user_id)",
        """
        CREATE VIRTUAL TABLE conversations_search USING fts5 (
            title, content = 'conversations', content_rowid = 'seq', tokenize = 'trigram'
        )
        """,
        """
        CREATE TRIGGER conversations_search_insert AFTER INSERT ON conversations BEGIN
            INSERT INTO conversations_search (rowid, title) VALUES (new.seq, new.title);
        END
        """,
        """
        CREATE TRIGGER conversations_search_update AFTER UPDATE OF title ON conversations BEGIN
            INSERT INTO conversations_search (conversations_search, rowid, title)
                VALUES ('delete', old.seq, old.title);
            INSERT INTO conversations_search (rowid, title) VALUES (new.seq, new.title);
        END
        """,
        """
        CREATE TRIGGER conversations_search_delete AFTER DELETE ON conversations BEGIN
            INSERT INTO conversations_search (conversations_search, rowid, title)
                VALUES ('delete', old.seq, old.title);
        END
        """,
        """
        CREATE VIEW finished_messages AS
            SELECT seq, content FROM messages WHERE status NOT IN ('pending', 'streaming')
        """,
        """
        CREATE VIRTUAL TABLE messages_search USING fts5 (
            content, content = 'finished_messages', content_rowid = 'seq', tokenize = 'trigram'
        )
        """,
        """
        CREATE TRIGGER messages_search_insert AFTER INSERT ON messages
        WHEN new.status NOT IN ('pending', 'streaming') BEGIN
            INSERT INTO messages_search (rowid, content) VALUES (new.seq, new.content);
        END
        """,
        """
        CREATE TRIGGER messages_search_update AFTER UPDATE OF content, status ON messages BEGIN
            INSERT INTO messages_search (messages_search, rowid, content)
                SELECT 'delete', old.seq, old.content WHERE old.status NOT IN ('pending', 'streaming');
            INSERT INTO messages_search (rowid, content)
                SELECT new.seq, new.content WHERE new.status NOT IN ('pending', 'streaming');
        END
        """,
        """
        CREATE TRIGGER messages_search_delete AFTER DELETE ON messages
        WHEN old.status NOT IN ('pending', 'streaming') BEGIN
            INSERT INTO messages_search (messages_search, rowid, content)
                VALUES ('delete', old.seq, old.content);
        END
        """,
    ),
    STATEMENTS,
)

"""The first step on PostgreSQL: the tables of `m0001_initial`, and what they need there.

`seq` is given by a trigger, as SQLite gives it: one more than the largest. A sequence would not know of rows
that come with a number, as those of an import and of a copy do; there is one writer, so nobody else can take
it. Names are told apart as SQLite's NOCASE does, by ASCII letters only. The search index is made apart, since
not everybody may have its extension (`db.postgres.search`).
"""

STATEMENTS = (
    """
    CREATE TABLE users (
        id TEXT NOT NULL PRIMARY KEY,
        name TEXT NOT NULL CHECK (name <> ''),
        password_hash TEXT NOT NULL,
        is_admin BOOLEAN NOT NULL,
        cache_salt TEXT NOT NULL UNIQUE,
        created_at BIGINT NOT NULL,
        disabled_at BIGINT
    )
    """,
    'CREATE UNIQUE INDEX users_name ON users (lower(name COLLATE "C"))',
    """
    CREATE TABLE sessions (
        token_hash TEXT NOT NULL PRIMARY KEY,
        user_id TEXT NOT NULL REFERENCES users (id) ON DELETE CASCADE,
        created_at BIGINT NOT NULL,
        expires_at BIGINT NOT NULL,
        last_seen_at BIGINT NOT NULL
    )
    """,
    "CREATE INDEX sessions_user ON sessions (user_id)",
    "CREATE INDEX sessions_expiry ON sessions (expires_at)",
    """
    CREATE TABLE api_keys (
        id TEXT NOT NULL PRIMARY KEY,
        user_id TEXT NOT NULL REFERENCES users (id) ON DELETE CASCADE,
        name TEXT NOT NULL,
        key_hash TEXT NOT NULL UNIQUE,
        created_at BIGINT NOT NULL,
        last_used_at BIGINT,
        revoked_at BIGINT
    )
    """,
    "CREATE INDEX api_keys_user ON api_keys (user_id)",
    """
    CREATE TABLE conversations (
        seq BIGINT NOT NULL PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        user_id TEXT NOT NULL REFERENCES users (id) ON DELETE CASCADE,
        title TEXT NOT NULL,
        system_prompt TEXT NOT NULL,
        settings JSON NOT NULL,
        active_leaf_id TEXT,
        created_at BIGINT NOT NULL,
        updated_at BIGINT NOT NULL,
        deleted_at BIGINT,
        UNIQUE (id, user_id)
    )
    """,
    "CREATE INDEX conversations_recent ON conversations (user_id, updated_at, id)",
    """
    CREATE TABLE messages (
        seq BIGINT NOT NULL PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        user_id TEXT NOT NULL,
        conversation_id TEXT NOT NULL,
        parent_id TEXT,
        role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
        content TEXT NOT NULL,
        token_ids BYTEA NOT NULL CHECK (length(token_ids) % 4 = 0),
        status TEXT NOT NULL
            CHECK (status IN ('complete', 'pending', 'streaming', 'stopped', 'interrupted', 'error')),
        finish_reason TEXT,
        error TEXT,
        stats JSON NOT NULL,
        model TEXT,
        created_at BIGINT NOT NULL,
        updated_at BIGINT NOT NULL,
        UNIQUE (id, conversation_id),
        FOREIGN KEY (conversation_id, user_id) REFERENCES conversations (id, user_id) ON DELETE CASCADE,
        FOREIGN KEY (parent_id, conversation_id) REFERENCES messages (id, conversation_id)
            DEFERRABLE INITIALLY DEFERRED
    )
    """,
    """
    ALTER TABLE conversations ADD FOREIGN KEY (active_leaf_id, id) REFERENCES messages (id, conversation_id)
        DEFERRABLE INITIALLY DEFERRED
    """,
    "CREATE INDEX conversations_leaf ON conversations (active_leaf_id, id)",
    # For `expressions.same_parent`: IS NOT DISTINCT FROM would not find an index.
    "CREATE INDEX messages_siblings ON messages (conversation_id, coalesce(parent_id, ''), seq)",
    "CREATE INDEX messages_parent ON messages (parent_id, conversation_id)",
    "CREATE INDEX messages_user ON messages (user_id)",
    "CREATE INDEX messages_open ON messages (status) WHERE status IN ('pending', 'streaming')",
    """
    CREATE FUNCTION conversations_number() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        NEW.seq := (SELECT coalesce(max(seq), 0) + 1 FROM conversations);
        RETURN NEW;
    END $$
    """,
    """
    CREATE TRIGGER conversations_number BEFORE INSERT ON conversations
    FOR EACH ROW WHEN (NEW.seq IS NULL) EXECUTE FUNCTION conversations_number()
    """,
    """
    CREATE FUNCTION messages_number() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        NEW.seq := (SELECT coalesce(max(seq), 0) + 1 FROM messages);
        RETURN NEW;
    END $$
    """,
    """
    CREATE TRIGGER messages_number BEFORE INSERT ON messages
    FOR EACH ROW WHEN (NEW.seq IS NULL) EXECUTE FUNCTION messages_number()
    """,
    # A message never changes its place, so the tree can have no cycle.
    """
    CREATE FUNCTION messages_stay() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE integrity_constraint_violation USING MESSAGE = 'a message keeps its place in the tree';
    END $$
    """,
    """
    CREATE TRIGGER messages_stay
    BEFORE UPDATE OF seq, id, user_id, conversation_id, parent_id, role ON messages
    FOR EACH ROW EXECUTE FUNCTION messages_stay()
    """,
    """
    CREATE TABLE settings (
        key TEXT NOT NULL PRIMARY KEY,
        value JSON NOT NULL,
        updated_at BIGINT NOT NULL
    )
    """,
    """
    CREATE TABLE audit (
        id TEXT NOT NULL PRIMARY KEY,
        user_id TEXT REFERENCES users (id) ON DELETE SET NULL,
        action TEXT NOT NULL,
        before JSON NOT NULL,
        after JSON NOT NULL,
        created_at BIGINT NOT NULL
    )
    """,
    "CREATE INDEX audit_time ON audit (created_at)",
    "CREATE INDEX audit_user ON audit (user_id)",
)

PRAGMA application_id = 1413958979;
PRAGMA user_version = 1;
CREATE TABLE users (
            id TEXT NOT NULL PRIMARY KEY,
            name TEXT NOT NULL COLLATE NOCASE UNIQUE CHECK (name <> ''),
            password_hash TEXT NOT NULL,
            is_admin INTEGER NOT NULL CHECK (is_admin IN (0, 1)),
            cache_salt TEXT NOT NULL UNIQUE,
            created_at INTEGER NOT NULL,
            disabled_at INTEGER
        ) STRICT
        ;
CREATE TABLE sessions (
            token_hash TEXT NOT NULL PRIMARY KEY,
            user_id TEXT NOT NULL REFERENCES users (id) ON DELETE CASCADE,
            created_at INTEGER NOT NULL,
            expires_at INTEGER NOT NULL,
            last_seen_at INTEGER NOT NULL
        ) STRICT
        ;
CREATE TABLE api_keys (
            id TEXT NOT NULL PRIMARY KEY,
            user_id TEXT NOT NULL REFERENCES users (id) ON DELETE CASCADE,
            name TEXT NOT NULL,
            key_hash TEXT NOT NULL UNIQUE,
            created_at INTEGER NOT NULL,
            last_used_at INTEGER,
            revoked_at INTEGER
        ) STRICT
        ;
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
        ;
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
        ;
CREATE TABLE settings (
            key TEXT NOT NULL PRIMARY KEY,
            value TEXT NOT NULL CHECK (json_valid(value)),
            updated_at INTEGER NOT NULL
        ) STRICT
        ;
CREATE TABLE audit (
            id TEXT NOT NULL PRIMARY KEY,
            user_id TEXT REFERENCES users (id) ON DELETE SET NULL,
            action TEXT NOT NULL,
            before TEXT NOT NULL CHECK (json_valid(before)),
            after TEXT NOT NULL CHECK (json_valid(after)),
            created_at INTEGER NOT NULL
        ) STRICT
        ;
CREATE VIRTUAL TABLE conversations_search USING fts5 (
            title, content = 'conversations', content_rowid = 'seq', tokenize = 'trigram'
        );
CREATE VIRTUAL TABLE messages_search USING fts5 (
            content, content = 'finished_messages', content_rowid = 'seq', tokenize = 'trigram'
        );
CREATE INDEX sessions_user ON sessions (user_id);
CREATE INDEX sessions_expiry ON sessions (expires_at);
CREATE INDEX api_keys_user ON api_keys (user_id);
CREATE INDEX conversations_recent ON conversations (user_id, updated_at, id);
CREATE INDEX messages_siblings ON messages (conversation_id, parent_id, seq);
CREATE INDEX messages_parent ON messages (parent_id, conversation_id);
CREATE INDEX messages_user ON messages (user_id);
CREATE INDEX messages_open ON messages (status) WHERE status IN ('pending', 'streaming');
CREATE TRIGGER messages_stay
        BEFORE UPDATE OF seq, id, user_id, conversation_id, parent_id, role ON messages BEGIN
            SELECT RAISE(ABORT, 'a message keeps its place in the tree');
        END;
CREATE INDEX audit_time ON audit (created_at);
CREATE INDEX audit_user ON audit (user_id);
CREATE TRIGGER conversations_search_insert AFTER INSERT ON conversations BEGIN
            INSERT INTO conversations_search (rowid, title) VALUES (new.seq, new.title);
        END;
CREATE TRIGGER conversations_search_update AFTER UPDATE OF title ON conversations BEGIN
            INSERT INTO conversations_search (conversations_search, rowid, title)
                VALUES ('delete', old.seq, old.title);
            INSERT INTO conversations_search (rowid, title) VALUES (new.seq, new.title);
        END;
CREATE TRIGGER conversations_search_delete AFTER DELETE ON conversations BEGIN
            INSERT INTO conversations_search (conversations_search, rowid, title)
                VALUES ('delete', old.seq, old.title);
        END;
CREATE VIEW finished_messages AS
            SELECT seq, content FROM messages WHERE status NOT IN ('pending', 'streaming');
CREATE TRIGGER messages_search_insert AFTER INSERT ON messages
        WHEN new.status NOT IN ('pending', 'streaming') BEGIN
            INSERT INTO messages_search (rowid, content) VALUES (new.seq, new.content);
        END;
CREATE TRIGGER messages_search_update AFTER UPDATE OF content, status ON messages BEGIN
            INSERT INTO messages_search (messages_search, rowid, content)
                SELECT 'delete', old.seq, old.content WHERE old.status NOT IN ('pending', 'streaming');
            INSERT INTO messages_search (rowid, content)
                SELECT new.seq, new.content WHERE new.status NOT IN ('pending', 'streaming');
        END;
CREATE TRIGGER messages_search_delete AFTER DELETE ON messages
        WHEN old.status NOT IN ('pending', 'streaming') BEGIN
            INSERT INTO messages_search (messages_search, rowid, content)
                VALUES ('delete', old.seq, old.content);
        END;
INSERT INTO "users" VALUES ('38913e61fcf7ae79239a7a1feceee65f', 'Ann', '$argon2id$ann', 1, '60740a2ed5cbaa1e10c4b5767a83976fd1f3864a0629ee9c8a454d5c199c3a0c', 1796012514111, NULL);
INSERT INTO "users" VALUES ('c3d884089198521873a2c3e505bc267b', 'Bob', '$argon2id$bob', 0, '49350eda9e97b390cb3a2e77c7b60bb57bfa9f686a612ca2faf39c92244dd476', 1796012514142, 1796012514176);
INSERT INTO "sessions" VALUES ('hash of a session', '38913e61fcf7ae79239a7a1feceee65f', 1796012514158, 4398046511104, 1796012514158);
INSERT INTO "api_keys" VALUES ('9f8d639a55395b122468230e776b4bee', '38913e61fcf7ae79239a7a1feceee65f', 'laptop', 'hash of a key', 1796012514167, NULL, NULL);
INSERT INTO "conversations" VALUES (1, '2542f33c8d3b7b60ad51a165f90c9997', '38913e61fcf7ae79239a7a1feceee65f', 'Lighthouses', 'Be brief.', '{"temperature": 0.5}', '0631627d74a01a09a7c12427a83a91a9', 1796012514182, 1796012514317, NULL);
INSERT INTO "conversations" VALUES (2, '4631bffab948ac989c8e319aece2d417', '38913e61fcf7ae79239a7a1feceee65f', 'Deleted', '', '{}', NULL, 1796012514326, 1796012514326, 1796012514328);
INSERT INTO "messages" VALUES (1, 'ec28c15cffa870c5e82d811e08264cb8', '38913e61fcf7ae79239a7a1feceee65f', '2542f33c8d3b7b60ad51a165f90c9997', NULL, 'user', 'What is a lighthouse?', X'0100000002000000', 'complete', NULL, NULL, '{}', NULL, 1796012514194, 1796012514194);
INSERT INTO "messages" VALUES (2, '5d06706e71750ecb3632f3da1d1f9fca', '38913e61fcf7ae79239a7a1feceee65f', '2542f33c8d3b7b60ad51a165f90c9997', 'ec28c15cffa870c5e82d811e08264cb8', 'assistant', 'A tower. 灯塔', X'030000000400000005000000', 'complete', 'stop', NULL, '{}', 'model', 1796012514222, 1796012514247);
INSERT INTO "messages" VALUES (3, '9a41f24d9060d63f1f423a81aff85891', '38913e61fcf7ae79239a7a1feceee65f', '2542f33c8d3b7b60ad51a165f90c9997', 'ec28c15cffa870c5e82d811e08264cb8', 'assistant', 'A tow', X'0900000008000000', 'stopped', NULL, NULL, '{"prompt_tokens": 3}', 'model', 1796012514263, 1796012514279);
INSERT INTO "messages" VALUES (4, 'cc364e47cb96c45b0e123155dede6e1a', '38913e61fcf7ae79239a7a1feceee65f', '2542f33c8d3b7b60ad51a165f90c9997', '5d06706e71750ecb3632f3da1d1f9fca', 'user', 'And C++?', X'0100000002000000', 'complete', NULL, NULL, '{}', NULL, 1796012514299, 1796012514299);
INSERT INTO "messages" VALUES (5, '0631627d74a01a09a7c12427a83a91a9', '38913e61fcf7ae79239a7a1feceee65f', '2542f33c8d3b7b60ad51a165f90c9997', 'cc364e47cb96c45b0e123155dede6e1a', 'assistant', 'A language.', X'030000000400000005000000', 'complete', 'stop', NULL, '{}', 'model', 1796012514309, 1796012514317);
INSERT INTO "settings" VALUES ('engine', '{"retention": 0.25}', 1796012514335);
INSERT INTO "audit" VALUES ('529a1288d1acc6175e191256de2ec5de', '38913e61fcf7ae79239a7a1feceee65f', 'engine.tune', '{"retention": 0.5}', '{"retention": 0.25}', 1796012514348);

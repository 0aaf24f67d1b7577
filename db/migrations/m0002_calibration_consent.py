"""Whose conversations may be used to calibrate the model: nobody's, until they say so themselves."""

from db.migrations.base import Migration, statements

MIGRATION = Migration(
    2,
    "calibration_consent",
    statements(
        """
        CREATE TABLE calibration_consent (
            user_id TEXT NOT NULL PRIMARY KEY REFERENCES users (id) ON DELETE CASCADE,
            given_at INTEGER NOT NULL
        ) STRICT
        """,
    ),
    (
        """
        CREATE TABLE calibration_consent (
            user_id TEXT NOT NULL PRIMARY KEY REFERENCES users (id) ON DELETE CASCADE,
            given_at BIGINT NOT NULL
        )
        """,
    ),
)

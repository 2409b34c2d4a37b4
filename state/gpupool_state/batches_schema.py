"""The schema of files and batches as numbered steps, see :mod:`gpupool_state.migrations`."""

from __future__ import annotations

from gpupool_state.migrations import SchemaMigration

_CREATE = (
    """
    CREATE TABLE files (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        purpose TEXT NOT NULL,
        filename TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE batches (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        input_file_id TEXT NOT NULL,
        completion_window TEXT NOT NULL,
        metadata TEXT NOT NULL,
        status TEXT NOT NULL,
        errors TEXT NOT NULL DEFAULT '[]',
        output_file_id TEXT,
        error_file_id TEXT,
        num_requests INTEGER NOT NULL DEFAULT 0,
        num_completed INTEGER NOT NULL DEFAULT 0,
        num_failed INTEGER NOT NULL DEFAULT 0,
        created_at INTEGER NOT NULL,
        expires_at INTEGER NOT NULL,
        in_progress_at INTEGER,
        finalizing_at INTEGER,
        cancelling_at INTEGER,
        ended_at INTEGER
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE results (
        batch_id TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
        line INTEGER NOT NULL,
        has_failed INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (batch_id, line)
    ) WITHOUT ROWID
    """,
)

# A file takes whole blocks of the disk and a row; a row has some 256 bytes beside its texts.
_FILE_BYTES = "(max(4096, {0}num_bytes) + 256 + length(CAST({0}filename AS BLOB)))"
_BATCH_BYTES = (
    "({0}result_bytes + 512 + length(CAST({0}metadata AS BLOB))"
    " + length(CAST({0}errors AS BLOB)) + length(CAST({0}models AS BLOB)))"
)
RESULT_BYTES = "(length({0}body) + 64)"


def _counting(table: str, num_bytes: str, column: str) -> tuple[str, ...]:
    """Return triggers that keep the accounts equal to the rows of a table."""
    new, old = num_bytes.format("NEW."), num_bytes.format("OLD.")
    return (
        f"""
        CREATE TRIGGER {table}_added AFTER INSERT ON {table} BEGIN
            INSERT INTO accounts (owner, num_bytes, {column}) VALUES (NEW.owner, {new}, 1)
            ON CONFLICT (owner) DO UPDATE SET
                num_bytes = num_bytes + excluded.num_bytes, {column} = {column} + 1;
        END
        """,
        f"""
        CREATE TRIGGER {table}_removed AFTER DELETE ON {table} BEGIN
            UPDATE accounts SET num_bytes = num_bytes - {old}, {column} = {column} - 1
            WHERE owner = OLD.owner;
        END
        """,
        f"""
        CREATE TRIGGER {table}_changed AFTER UPDATE ON {table} BEGIN
            UPDATE accounts SET num_bytes = num_bytes + {new} - {old} WHERE owner = NEW.owner;
        END
        """,
    )


_ADD_ACCOUNTS = (
    "ALTER TABLE files ADD COLUMN expires_at INTEGER",
    "ALTER TABLE batches ADD COLUMN models TEXT NOT NULL DEFAULT '[]'",
    "ALTER TABLE batches ADD COLUMN waits_because TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE batches ADD COLUMN next_try_at INTEGER",
    "ALTER TABLE batches ADD COLUMN output_expires_after_s INTEGER",
    "ALTER TABLE batches ADD COLUMN result_bytes INTEGER NOT NULL DEFAULT 0",
    f"""
    UPDATE batches SET result_bytes = (
        SELECT coalesce(sum({RESULT_BYTES.format("")}), 0) FROM results WHERE batch_id = batches.id
    )
    """,
    """
    CREATE TABLE accounts (
        owner TEXT PRIMARY KEY,
        num_bytes INTEGER NOT NULL DEFAULT 0,
        num_files INTEGER NOT NULL DEFAULT 0,
        num_batches INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID
    """,
    f"""
    INSERT INTO accounts
        SELECT owner, sum(num_bytes), sum(is_file), sum(1 - is_file) FROM (
            SELECT owner, {_FILE_BYTES.format("")} AS num_bytes, 1 AS is_file FROM files
            UNION ALL SELECT owner, {_BATCH_BYTES.format("")}, 0 FROM batches
        ) GROUP BY owner
    """,
    *_counting("files", _FILE_BYTES, "num_files"),
    *_counting("batches", _BATCH_BYTES, "num_batches"),
    "CREATE INDEX files_of_owner ON files (owner, created_at, id)",
    "CREATE INDEX batches_of_owner ON batches (owner, created_at, id)",
    "CREATE INDEX batches_under_way ON batches (owner) WHERE ended_at IS NULL",
)

# Requests that are being asked, so that one that ends its frontend is not asked for ever.
_ADD_ASKED = (
    """
    CREATE TABLE asked (
        batch_id TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
        line INTEGER NOT NULL,
        num_times INTEGER NOT NULL,
        PRIMARY KEY (batch_id, line)
    ) WITHOUT ROWID
    """,
)

BATCH_MIGRATIONS = (
    SchemaMigration(1, "batches", _CREATE),
    SchemaMigration(2, "accounts", _ADD_ACCOUNTS),
    SchemaMigration(3, "asked", _ADD_ASKED),
)

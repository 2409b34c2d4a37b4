"""The SQL statements that create the schemas of the state database and of the batches' database.

Columns named ``*_at`` are wall-clock seconds since 1970, columns named ``*_s`` durations in
seconds.
"""

from __future__ import annotations

# Names and aliases share one name space. The registry checks names and raises errors with a reason;
# the triggers protect the file against other programs. ``devices`` is a JSON list of the devices
# chosen by hand, ``engine_bytes`` a JSON object with the memory of an engine outside the pages by
# the name of the device. ``pace`` is empty for none.
_MODELS = (
    """
    CREATE TABLE models (
        name TEXT PRIMARY KEY,
        source TEXT NOT NULL,
        path TEXT NOT NULL,
        revision TEXT,
        dtype TEXT NOT NULL,
        max_model_len INTEGER,
        engine TEXT NOT NULL DEFAULT '{}',
        devices TEXT NOT NULL DEFAULT '[]',
        ttft_s REAL NOT NULL,
        tbt_s REAL NOT NULL,
        pace TEXT NOT NULL DEFAULT '',
        is_pinned INTEGER NOT NULL DEFAULT 0,
        state TEXT NOT NULL,
        error TEXT NOT NULL DEFAULT '',
        architecture TEXT NOT NULL DEFAULT '',
        weight_bytes INTEGER NOT NULL DEFAULT 0,
        kv_bytes_per_token INTEGER NOT NULL DEFAULT 0,
        engine_bytes TEXT NOT NULL DEFAULT '{}',
        loaded_max_model_len INTEGER,
        created_at REAL NOT NULL
    )
    """,
    # A preset or an adapter is a further name of a model with details, a JSON object.
    """
    CREATE TABLE aliases (
        id INTEGER PRIMARY KEY,
        alias TEXT NOT NULL UNIQUE,
        model TEXT NOT NULL REFERENCES models (name) ON DELETE CASCADE,
        kind TEXT NOT NULL DEFAULT 'alias' CHECK (kind IN ('alias', 'preset', 'adapter')),
        details TEXT NOT NULL DEFAULT '{}'
    )
    """,
    "CREATE INDEX aliases_by_model ON aliases (model)",
    """
    CREATE TRIGGER alias_is_no_model BEFORE INSERT ON aliases
    WHEN EXISTS (SELECT 1 FROM models WHERE name = NEW.alias)
    BEGIN SELECT RAISE(ABORT, 'a model has that name'); END
    """,
    """
    CREATE TRIGGER model_is_no_alias BEFORE INSERT ON models
    WHEN EXISTS (SELECT 1 FROM aliases WHERE alias = NEW.name)
    BEGIN SELECT RAISE(ABORT, 'a model has that alias'); END
    """,
    # Removing a model deletes the model's profiles, so a model that is added again is measured
    # again.
    """
    CREATE TABLE profiles (
        model TEXT NOT NULL REFERENCES models (name) ON DELETE CASCADE,
        device TEXT NOT NULL,
        phase TEXT NOT NULL CHECK (phase IN ('prefill', 'decode', 'switch')),
        engine_version TEXT NOT NULL,
        revision TEXT,
        dtype TEXT NOT NULL,
        law TEXT NOT NULL,
        constants TEXT NOT NULL,
        hidden_size INTEGER NOT NULL,
        intermediate_size INTEGER NOT NULL,
        r_squared REAL,
        mean_relative_error REAL,
        p90_relative_error REAL,
        num_points INTEGER NOT NULL,
        measured_at REAL NOT NULL,
        PRIMARY KEY (model, device, phase)
    )
    """,
    # What vLLM said of groups that cannot divide a model. Other options need another verdict.
    """
    CREATE TABLE divisions (
        model TEXT NOT NULL REFERENCES models (name) ON DELETE CASCADE,
        engine_version TEXT NOT NULL,
        degree INTEGER NOT NULL,
        reason TEXT NOT NULL,
        PRIMARY KEY (model, engine_version, degree)
    )
    """,
    """
    CREATE TRIGGER divisions_are_of_options AFTER UPDATE OF engine ON models
    WHEN NEW.engine != OLD.engine
    BEGIN DELETE FROM divisions WHERE model = NEW.name; END
    """,
)

# The rows of revoked keys stay, because the history refers to keys by id; the names are free again.
# An empty ``pace`` stands for the model's.
_API_KEYS = (
    """
    CREATE TABLE api_keys (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        digest TEXT NOT NULL,
        models TEXT,
        priority TEXT NOT NULL CHECK (priority IN ('high', 'normal', 'low')),
        requests_per_minute INTEGER,
        tokens_per_minute INTEGER,
        max_live INTEGER,
        pace TEXT NOT NULL DEFAULT '',
        created_at REAL NOT NULL,
        expires_at REAL,
        previous_digest TEXT,
        previous_until REAL,
        rotated_at REAL,
        revoked_at REAL,
        last_used_at REAL,
        num_requests INTEGER NOT NULL DEFAULT 0,
        num_tokens INTEGER NOT NULL DEFAULT 0
    )
    """,
    "CREATE UNIQUE INDEX api_keys_by_name ON api_keys (name) WHERE revoked_at IS NULL",
)

# The history has model names without a foreign key, because rows outlive the models.
_HISTORY = (
    """
    CREATE TABLE requests (
        id INTEGER PRIMARY KEY,
        request_id TEXT NOT NULL,
        model TEXT NOT NULL,
        device INTEGER,
        arrived_at REAL NOT NULL,
        ttft_s REAL,
        tbt_p50_s REAL,
        tbt_p99_s REAL,
        tbt_max_s REAL,
        num_prompt_tokens INTEGER NOT NULL,
        num_output_tokens INTEGER NOT NULL,
        num_tokens_in_time INTEGER NOT NULL,
        finish_reason TEXT NOT NULL,
        total_s REAL NOT NULL,
        error TEXT NOT NULL,
        api_key TEXT
    )
    """,
    "CREATE INDEX requests_by_arrival ON requests (arrived_at)",
    "CREATE INDEX requests_by_model ON requests (model, arrived_at)",
    """
    CREATE TABLE switches (
        id INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        device INTEGER NOT NULL,
        model TEXT NOT NULL,
        previous TEXT,
        total_s REAL NOT NULL,
        evict_s REAL NOT NULL,
        map_s REAL NOT NULL,
        weights_s REAL NOT NULL,
        kv_s REAL NOT NULL,
        weight_bytes INTEGER NOT NULL,
        kv_in_bytes INTEGER NOT NULL,
        kv_out_bytes INTEGER NOT NULL
    )
    """,
    """
    CREATE TABLE events (
        id INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        level TEXT NOT NULL,
        kind TEXT NOT NULL,
        subject TEXT NOT NULL,
        message TEXT NOT NULL
    )
    """,
    # ``first_tokens`` is the number of requests that the seconds of ``first_token_*`` belong to.
    # ``ttft`` and ``tbt`` are histograms as JSON: the sum of all durations in seconds, then pairs
    # of bucket number and count, as in gpupoold.stats.histogram.Histogram.text.
    """
    CREATE TABLE slo_minutes (
        id INTEGER PRIMARY KEY,
        minute_at INTEGER NOT NULL,
        model TEXT NOT NULL,
        requests INTEGER NOT NULL,
        completed INTEGER NOT NULL,
        aborted INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        refused INTEGER NOT NULL,
        dropped INTEGER NOT NULL,
        tokens INTEGER NOT NULL,
        tokens_in_time INTEGER NOT NULL,
        late_by_loading_s REAL NOT NULL,
        late_by_queueing_s REAL NOT NULL,
        late_by_switching_s REAL NOT NULL,
        late_by_computing_s REAL NOT NULL,
        first_tokens INTEGER NOT NULL,
        first_token_loading_s REAL NOT NULL,
        first_token_queueing_s REAL NOT NULL,
        first_token_switching_s REAL NOT NULL,
        first_token_kv_s REAL NOT NULL,
        first_token_computing_s REAL NOT NULL,
        between_tokens_loading_s REAL NOT NULL,
        between_tokens_queueing_s REAL NOT NULL,
        between_tokens_switching_s REAL NOT NULL,
        between_tokens_kv_s REAL NOT NULL,
        between_tokens_computing_s REAL NOT NULL,
        ttft TEXT NOT NULL,
        tbt TEXT NOT NULL
    )
    """,
    "CREATE INDEX slo_minutes_by_minute ON slo_minutes (minute_at)",
    # A row of ``usage_hours`` is rewritten until its hour ends; ``api_key`` is empty without a key.
    """
    CREATE TABLE usage_hours (
        id INTEGER PRIMARY KEY,
        hour_at INTEGER NOT NULL,
        model TEXT NOT NULL,
        api_key TEXT NOT NULL,
        num_requests INTEGER NOT NULL,
        num_prompt_tokens INTEGER NOT NULL,
        num_output_tokens INTEGER NOT NULL,
        gpu_s REAL NOT NULL,
        energy_j REAL NOT NULL
    )
    """,
    "CREATE INDEX usage_hours_by_hour ON usage_hours (hour_at)",
    # ``energy_j`` is null without readings.
    """
    CREATE TABLE device_minutes (
        id INTEGER PRIMARY KEY,
        minute_at INTEGER NOT NULL,
        device INTEGER NOT NULL,
        seconds REAL NOT NULL,
        computing_s REAL NOT NULL,
        switching_s REAL NOT NULL,
        energy_j REAL,
        kv_host_bytes INTEGER NOT NULL,
        kv_host_slab_bytes INTEGER NOT NULL
    )
    """,
    "CREATE INDEX device_minutes_by_minute ON device_minutes (minute_at)",
)

STATE_SCHEMA = (*_MODELS, *_API_KEYS, *_HISTORY)

# A file takes whole blocks of the disk and a row; a row has some 256 bytes beside its texts.
_FILE_BYTES = "(max(4096, {0}num_bytes) + 256 + length(CAST({0}filename AS BLOB)))"
_BATCH_BYTES = (
    "({0}result_bytes + 512 + length(CAST({0}metadata AS BLOB))"
    " + length(CAST({0}errors AS BLOB)) + length(CAST({0}models AS BLOB)))"
)


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


BATCHES_SCHEMA = (
    """
    CREATE TABLE files (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        purpose TEXT NOT NULL,
        filename TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER
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
        models TEXT NOT NULL,
        status TEXT NOT NULL,
        waits_because TEXT NOT NULL,
        next_try_at INTEGER,
        errors TEXT NOT NULL,
        output_file_id TEXT,
        error_file_id TEXT,
        output_expires_after_s INTEGER,
        result_bytes INTEGER NOT NULL DEFAULT 0,
        num_requests INTEGER NOT NULL,
        num_completed INTEGER NOT NULL,
        num_failed INTEGER NOT NULL,
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
    # Requests that are being asked, so that one that ends its frontend is not asked for ever.
    """
    CREATE TABLE asked (
        batch_id TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
        line INTEGER NOT NULL,
        num_times INTEGER NOT NULL,
        PRIMARY KEY (batch_id, line)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE accounts (
        owner TEXT PRIMARY KEY,
        num_bytes INTEGER NOT NULL DEFAULT 0,
        num_files INTEGER NOT NULL DEFAULT 0,
        num_batches INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID
    """,
    *_counting("files", _FILE_BYTES, "num_files"),
    *_counting("batches", _BATCH_BYTES, "num_batches"),
    "CREATE INDEX files_of_owner ON files (owner, created_at, id)",
    "CREATE INDEX batches_of_owner ON batches (owner, created_at, id)",
    "CREATE INDEX batches_under_way ON batches (owner) WHERE ended_at IS NULL",
)

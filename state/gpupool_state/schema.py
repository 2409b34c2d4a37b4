"""The SQL statements of the schema's migrations.

Columns named ``*_at`` are wall-clock seconds since 1970, columns named ``*_s`` durations in
seconds.
"""

from __future__ import annotations

# Names and aliases share one name space. The registry checks names and raises errors with a reason;
# the triggers protect the file against other programs.
CREATE_REGISTRY = (
    """
    CREATE TABLE models (
        name TEXT PRIMARY KEY,
        source TEXT NOT NULL,
        path TEXT NOT NULL,
        revision TEXT,
        dtype TEXT NOT NULL,
        max_model_len INTEGER,
        ttft_s REAL NOT NULL,
        tbt_s REAL NOT NULL,
        state TEXT NOT NULL,
        error TEXT NOT NULL DEFAULT '',
        architecture TEXT NOT NULL DEFAULT '',
        weight_bytes INTEGER NOT NULL DEFAULT 0,
        kv_bytes_per_token INTEGER NOT NULL DEFAULT 0,
        loaded_max_model_len INTEGER,
        created_at REAL NOT NULL
    )
    """,
    """
    CREATE TABLE aliases (
        id INTEGER PRIMARY KEY,
        alias TEXT NOT NULL UNIQUE,
        model TEXT NOT NULL REFERENCES models (name) ON DELETE CASCADE
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
)

# Removing a model deletes the model's profiles, so a model that is added again is measured again.
CREATE_PROFILES = (
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
)

ADD_PINS = ("ALTER TABLE models ADD COLUMN is_pinned INTEGER NOT NULL DEFAULT 0",)

# A histogram is JSON: the sum of all durations in seconds, then pairs of bucket number and count,
# as in gpupoold.stats.histogram.Histogram.text.
CREATE_SLO_MINUTES = (
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
        ttft TEXT NOT NULL,
        tbt TEXT NOT NULL
    )
    """,
    "CREATE INDEX slo_minutes_by_minute ON slo_minutes (minute_at)",
    "ALTER TABLE requests ADD COLUMN error TEXT NOT NULL DEFAULT ''",
)

# Seconds by stage. ``first_tokens`` is the number of requests that the seconds of ``first_token_*``
# belong to: 0 in rows of earlier versions, which have no stages.
ADD_REQUEST_STAGES = (
    "ALTER TABLE slo_minutes ADD COLUMN first_tokens INTEGER NOT NULL DEFAULT 0",
    *(
        f"ALTER TABLE slo_minutes ADD COLUMN {phase}_{stage}_s REAL NOT NULL DEFAULT 0"
        for phase in ("first_token", "between_tokens")
        for stage in ("loading", "queueing", "switching", "kv", "computing")
    ),
)

# The history has model names without a foreign key, because rows outlive the models.
CREATE_HISTORY = (
    """
    CREATE TABLE requests (
        id INTEGER PRIMARY KEY,
        request_id TEXT NOT NULL,
        model TEXT NOT NULL,
        instance INTEGER,
        arrived_at REAL NOT NULL,
        ttft_s REAL,
        tbt_p50_s REAL,
        tbt_p99_s REAL,
        tbt_max_s REAL,
        num_prompt_tokens INTEGER NOT NULL,
        num_output_tokens INTEGER NOT NULL,
        num_tokens_in_time INTEGER NOT NULL,
        finish_reason TEXT NOT NULL,
        total_s REAL NOT NULL
    )
    """,
    "CREATE INDEX requests_by_arrival ON requests (arrived_at)",
    "CREATE INDEX requests_by_model ON requests (model, arrived_at)",
    """
    CREATE TABLE switches (
        id INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        instance INTEGER NOT NULL,
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
)

# The rows of revoked keys stay, because the history refers to keys by id; the names are free again.
CREATE_API_KEYS = (
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
    "ALTER TABLE requests ADD COLUMN api_key TEXT",
)

RENAME_INSTANCES = (
    "ALTER TABLE requests RENAME COLUMN instance TO device",
    "ALTER TABLE switches RENAME COLUMN instance TO device",
    "UPDATE events SET kind = 'worker_ready' WHERE kind = 'instance_ready'",
    "UPDATE events SET kind = 'worker_down' WHERE kind = 'instance_down'",
    "UPDATE events SET kind = 'snapshot_refused' WHERE kind = 'image_refused'",
)

# ``devices`` is a JSON list of the devices chosen by hand, ``engine_bytes`` a JSON object with the
# memory of an engine outside the pages by the name of the device.
ADD_HOSTING = (
    "ALTER TABLE models ADD COLUMN devices TEXT NOT NULL DEFAULT '[]'",
    "ALTER TABLE models ADD COLUMN engine_bytes TEXT NOT NULL DEFAULT '{}'",
)

# A preset or an adapter is a further name of a model with details, a JSON object.
ADD_OPTIONS = (
    "ALTER TABLE models ADD COLUMN engine TEXT NOT NULL DEFAULT '{}'",
    "ALTER TABLE aliases ADD COLUMN kind TEXT NOT NULL DEFAULT 'alias' "
    "CHECK (kind IN ('alias', 'preset', 'adapter'))",
    "ALTER TABLE aliases ADD COLUMN details TEXT NOT NULL DEFAULT '{}'",
)

# What vLLM said of groups that cannot divide a model. Other options need another verdict.
CREATE_DIVISIONS = (
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

# The pace of streams as text, empty for none, and for a key's the model's.
ADD_PACES = (
    "ALTER TABLE models ADD COLUMN pace TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE api_keys ADD COLUMN pace TEXT NOT NULL DEFAULT ''",
)

# A row of ``usage_hours`` is rewritten until its hour ends; ``api_key`` is empty without a key.
# ``energy_j`` of a device is null without readings.
CREATE_USAGE = (
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

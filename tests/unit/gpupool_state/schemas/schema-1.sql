BEGIN TRANSACTION;
CREATE TABLE aliases (
        id INTEGER PRIMARY KEY,
        alias TEXT NOT NULL UNIQUE,
        model TEXT NOT NULL REFERENCES models (name) ON DELETE CASCADE
    );
INSERT INTO "aliases" VALUES(1,'alias-0','model-0');
INSERT INTO "aliases" VALUES(2,'alias-1','model-1');
INSERT INTO "aliases" VALUES(3,'alias-2','model-2');
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
    );
INSERT INTO "models" VALUES('model-0','s','/p',NULL,'auto',NULL,2.5,0.05,'ready','','',0,0,NULL,1750000000.0);
INSERT INTO "models" VALUES('model-1','s','/p',NULL,'auto',NULL,2.5,0.05,'ready','','',0,0,NULL,1750000000.0);
INSERT INTO "models" VALUES('model-2','s','/p',NULL,'auto',NULL,2.5,0.05,'ready','','',0,0,NULL,1750000000.0);
CREATE TABLE schema_migrations (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at REAL NOT NULL
);
INSERT INTO "schema_migrations" VALUES(1,'registry',1.79535928169003224366e+09);
CREATE INDEX aliases_by_model ON aliases (model);
CREATE TRIGGER alias_is_no_model BEFORE INSERT ON aliases
    WHEN EXISTS (SELECT 1 FROM models WHERE name = NEW.alias)
    BEGIN SELECT RAISE(ABORT, 'a model has that name'); END;
CREATE TRIGGER model_is_no_alias BEFORE INSERT ON models
    WHEN EXISTS (SELECT 1 FROM aliases WHERE alias = NEW.name)
    BEGIN SELECT RAISE(ABORT, 'a model has that alias'); END;
COMMIT;

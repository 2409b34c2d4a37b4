BEGIN TRANSACTION;
CREATE TABLE aliases (
        id INTEGER PRIMARY KEY,
        alias TEXT NOT NULL UNIQUE,
        model TEXT NOT NULL REFERENCES models (name) ON DELETE CASCADE
    , kind TEXT NOT NULL DEFAULT 'alias' CHECK (kind IN ('alias', 'preset', 'adapter')), details TEXT NOT NULL DEFAULT '{}');
INSERT INTO "aliases" VALUES(1,'alias-0','model-0','alias','{}');
INSERT INTO "aliases" VALUES(2,'preset-0','model-0','preset','{"defaults": {"temperature": 0.2}, "ttft_s": 20.0, "tbt_s": null}');
INSERT INTO "aliases" VALUES(3,'adapter-0','model-0','adapter','{"source": "org/a", "path": "/a", "revision": null, "rank": 8, "ttft_s": null, "tbt_s": null, "number": 0}');
INSERT INTO "aliases" VALUES(4,'alias-1','model-1','alias','{}');
INSERT INTO "aliases" VALUES(5,'preset-1','model-1','preset','{"defaults": {"temperature": 0.2}, "ttft_s": 20.0, "tbt_s": null}');
INSERT INTO "aliases" VALUES(6,'adapter-1','model-1','adapter','{"source": "org/a", "path": "/a", "revision": null, "rank": 8, "ttft_s": null, "tbt_s": null, "number": 0}');
INSERT INTO "aliases" VALUES(7,'alias-2','model-2','alias','{}');
INSERT INTO "aliases" VALUES(8,'preset-2','model-2','preset','{"defaults": {"temperature": 0.2}, "ttft_s": 20.0, "tbt_s": null}');
INSERT INTO "aliases" VALUES(9,'adapter-2','model-2','adapter','{"source": "org/a", "path": "/a", "revision": null, "rank": 8, "ttft_s": null, "tbt_s": null, "number": 0}');
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
    , pace TEXT NOT NULL DEFAULT '');
INSERT INTO "api_keys" VALUES('AbCd0000','some','1111111111111111111111111111111111111111111111111111111111111111','model-0 model-2','low',60,10000,4,1750000000.0,3500000000.0,'0000000000000000000000000000000000000000000000000000000000000000',1750003600.0,1750000000.0,NULL,NULL,0,0,'50ms');
INSERT INTO "api_keys" VALUES('AbCd0001','all','2222222222222222222222222222222222222222222222222222222222222222',NULL,'normal',NULL,NULL,NULL,1750000000.0,NULL,NULL,NULL,NULL,NULL,1750000000.0,5,550,'');
INSERT INTO "api_keys" VALUES('AbCd0002','gone','','','normal',NULL,NULL,NULL,1750000000.0,NULL,NULL,NULL,NULL,1750000000.0,NULL,0,0,'');
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
    );
INSERT INTO "device_minutes" VALUES(1,1749999960,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(2,1750000020,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(3,1750000080,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(4,1750000140,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(5,1750000200,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(6,1750000260,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(7,1750000320,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(8,1750000380,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(9,1750000440,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(10,1750000500,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(11,1750000560,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(12,1750000620,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(13,1750000680,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(14,1750000740,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(15,1750000800,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(16,1750000860,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(17,1750000920,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(18,1750000980,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(19,1750001040,0,60.0,1.5,0.6,6000.0,1048576,2097152);
INSERT INTO "device_minutes" VALUES(20,1750001100,0,60.0,1.5,0.6,6000.0,1048576,2097152);
CREATE TABLE divisions (
        model TEXT NOT NULL REFERENCES models (name) ON DELETE CASCADE,
        engine_version TEXT NOT NULL,
        degree INTEGER NOT NULL,
        reason TEXT NOT NULL,
        PRIMARY KEY (model, engine_version, degree)
    );
INSERT INTO "divisions" VALUES('model-0','0.32.0',4,'10 heads');
INSERT INTO "divisions" VALUES('model-1','0.32.0',4,'10 heads');
INSERT INTO "divisions" VALUES('model-2','0.32.0',4,'10 heads');
CREATE TABLE events (
        id INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        level TEXT NOT NULL,
        kind TEXT NOT NULL,
        subject TEXT NOT NULL,
        message TEXT NOT NULL
    );
INSERT INTO "events" VALUES(1,1750000000.0,'info','model_added','model-0','message 0');
INSERT INTO "events" VALUES(2,1750000000.0,'info','model_added','model-1','message 1');
INSERT INTO "events" VALUES(3,1750000000.0,'info','model_added','model-2','message 2');
INSERT INTO "events" VALUES(4,1750000000.0,'info','model_added','model-0','message 3');
INSERT INTO "events" VALUES(5,1750000000.0,'info','model_added','model-1','message 4');
INSERT INTO "events" VALUES(6,1750000000.0,'info','model_added','model-2','message 5');
INSERT INTO "events" VALUES(7,1750000000.0,'info','model_added','model-0','message 6');
INSERT INTO "events" VALUES(8,1750000000.0,'info','model_added','model-1','message 7');
INSERT INTO "events" VALUES(9,1750000000.0,'info','model_added','model-2','message 8');
INSERT INTO "events" VALUES(10,1750000000.0,'info','model_added','model-0','message 9');
INSERT INTO "events" VALUES(11,1750000000.0,'info','model_added','model-1','message 10');
INSERT INTO "events" VALUES(12,1750000000.0,'info','model_added','model-2','message 11');
INSERT INTO "events" VALUES(13,1750000000.0,'info','model_added','model-0','message 12');
INSERT INTO "events" VALUES(14,1750000000.0,'info','model_added','model-1','message 13');
INSERT INTO "events" VALUES(15,1750000000.0,'info','model_added','model-2','message 14');
INSERT INTO "events" VALUES(16,1750000000.0,'info','model_added','model-0','message 15');
INSERT INTO "events" VALUES(17,1750000000.0,'info','model_added','model-1','message 16');
INSERT INTO "events" VALUES(18,1750000000.0,'info','model_added','model-2','message 17');
INSERT INTO "events" VALUES(19,1750000000.0,'info','model_added','model-0','message 18');
INSERT INTO "events" VALUES(20,1750000000.0,'info','model_added','model-1','message 19');
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
    , is_pinned INTEGER NOT NULL DEFAULT 0, engine TEXT NOT NULL DEFAULT '{}', devices TEXT NOT NULL DEFAULT '[]', engine_bytes TEXT NOT NULL DEFAULT '{}', pace TEXT NOT NULL DEFAULT '');
INSERT INTO "models" VALUES('model-0','s','/p',NULL,'auto',NULL,2.5,0.05,'ready','','',0,0,NULL,1750000000.0,0,'{"max_num_seqs": "16"}','[]','{"A10": 0}','steady');
INSERT INTO "models" VALUES('model-1','s','/p',NULL,'auto',NULL,2.5,0.05,'ready','','',0,0,NULL,1750000000.0,1,'{"max_num_seqs": "16"}','[0]','{"A10": 1048576}','steady');
INSERT INTO "models" VALUES('model-2','s','/p',NULL,'auto',NULL,2.5,0.05,'ready','','',0,0,NULL,1750000000.0,0,'{"max_num_seqs": "16"}','[0, 1]','{"A10": 2097152}','steady');
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
    );
INSERT INTO "profiles" VALUES('model-0','A10','prefill','0.32.0',NULL,'bfloat16','linear','[0.01, 0.002]',4096,11008,0.99,0.02,0.05,12,1750000000.0);
INSERT INTO "profiles" VALUES('model-0','A10','decode','0.32.0',NULL,'bfloat16','linear','[0.01, 0.002]',4096,11008,0.99,0.02,0.05,12,1750000000.0);
INSERT INTO "profiles" VALUES('model-0','A10','switch','0.32.0',NULL,'bfloat16','linear','[0.01, 0.002]',4096,11008,0.99,0.02,0.05,12,1750000000.0);
INSERT INTO "profiles" VALUES('model-1','A10','prefill','0.32.0',NULL,'bfloat16','linear','[0.01, 0.002]',4096,11008,0.99,0.02,0.05,12,1750000000.0);
INSERT INTO "profiles" VALUES('model-1','A10','decode','0.32.0',NULL,'bfloat16','linear','[0.01, 0.002]',4096,11008,0.99,0.02,0.05,12,1750000000.0);
INSERT INTO "profiles" VALUES('model-1','A10','switch','0.32.0',NULL,'bfloat16','linear','[0.01, 0.002]',4096,11008,0.99,0.02,0.05,12,1750000000.0);
INSERT INTO "profiles" VALUES('model-2','A10','prefill','0.32.0',NULL,'bfloat16','linear','[0.01, 0.002]',4096,11008,0.99,0.02,0.05,12,1750000000.0);
INSERT INTO "profiles" VALUES('model-2','A10','decode','0.32.0',NULL,'bfloat16','linear','[0.01, 0.002]',4096,11008,0.99,0.02,0.05,12,1750000000.0);
INSERT INTO "profiles" VALUES('model-2','A10','switch','0.32.0',NULL,'bfloat16','linear','[0.01, 0.002]',4096,11008,0.99,0.02,0.05,12,1750000000.0);
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
        total_s REAL NOT NULL
    , error TEXT NOT NULL DEFAULT '', api_key TEXT);
INSERT INTO "requests" VALUES(1,'request-0','model-0',0,1750000000.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(2,'request-1','model-1',0,1750000001.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(3,'request-2','model-2',0,1750000002.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(4,'request-3','model-0',0,1750000003.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(5,'request-4','model-1',0,1750000004.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(6,'request-5','model-2',0,1750000005.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(7,'request-6','model-0',0,1750000006.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(8,'request-7','model-1',0,1750000007.0,0.5,0.01,0.02,0.03,100,10,9,'error',1.5,'it failed','AbCd0001');
INSERT INTO "requests" VALUES(9,'request-8','model-2',0,1750000008.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(10,'request-9','model-0',0,1750000009.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(11,'request-10','model-1',0,1750000010.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(12,'request-11','model-2',0,1750000011.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(13,'request-12','model-0',0,1750000012.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(14,'request-13','model-1',0,1750000013.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(15,'request-14','model-2',0,1750000014.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(16,'request-15','model-0',0,1750000015.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(17,'request-16','model-1',0,1750000016.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(18,'request-17','model-2',0,1750000017.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(19,'request-18','model-0',0,1750000018.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
INSERT INTO "requests" VALUES(20,'request-19','model-1',0,1750000019.0,0.5,0.01,0.02,0.03,100,10,9,'stop',1.5,'','AbCd0001');
CREATE TABLE schema_migrations (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at REAL NOT NULL,
    gpupool_version TEXT
);
INSERT INTO "schema_migrations" VALUES(1,'registry',1.79577473914147090917e+09,'0.1.0');
INSERT INTO "schema_migrations" VALUES(2,'history',1.79577473914523530005e+09,'0.1.0');
INSERT INTO "schema_migrations" VALUES(3,'profiles',1.79577473914653658868e+09,'0.1.0');
INSERT INTO "schema_migrations" VALUES(4,'pins',1.79577473914832329749e+09,'0.1.0');
INSERT INTO "schema_migrations" VALUES(5,'slo_minutes',1.79577473914996361731e+09,'0.1.0');
INSERT INTO "schema_migrations" VALUES(6,'api_keys',1.79577473915191364282e+09,'0.1.0');
INSERT INTO "schema_migrations" VALUES(7,'device_columns',1.79577473915829586986e+09,'0.1.0');
INSERT INTO "schema_migrations" VALUES(8,'options',1.79577473916077733039e+09,'0.1.0');
INSERT INTO "schema_migrations" VALUES(9,'hosting',1.79577473916278076166e+09,'0.1.0');
INSERT INTO "schema_migrations" VALUES(10,'divisions',1.79577473916401481632e+09,'0.1.0');
INSERT INTO "schema_migrations" VALUES(11,'request_stages',1.79577473917041563989e+09,'0.1.0');
INSERT INTO "schema_migrations" VALUES(12,'usage',1.79577473917185735704e+09,'0.1.0');
INSERT INTO "schema_migrations" VALUES(13,'paces',1.79577473917397236824e+09,'0.1.0');
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
    , first_tokens INTEGER NOT NULL DEFAULT 0, first_token_loading_s REAL NOT NULL DEFAULT 0, first_token_queueing_s REAL NOT NULL DEFAULT 0, first_token_switching_s REAL NOT NULL DEFAULT 0, first_token_kv_s REAL NOT NULL DEFAULT 0, first_token_computing_s REAL NOT NULL DEFAULT 0, between_tokens_loading_s REAL NOT NULL DEFAULT 0, between_tokens_queueing_s REAL NOT NULL DEFAULT 0, between_tokens_switching_s REAL NOT NULL DEFAULT 0, between_tokens_kv_s REAL NOT NULL DEFAULT 0, between_tokens_computing_s REAL NOT NULL DEFAULT 0);
INSERT INTO "slo_minutes" VALUES(1,1749999960,'model-0',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(2,1750000020,'model-1',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(3,1750000080,'model-2',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(4,1750000140,'model-0',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(5,1750000200,'model-1',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(6,1750000260,'model-2',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(7,1750000320,'model-0',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(8,1750000380,'model-1',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(9,1750000440,'model-2',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(10,1750000500,'model-0',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(11,1750000560,'model-1',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(12,1750000620,'model-2',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(13,1750000680,'model-0',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(14,1750000740,'model-1',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(15,1750000800,'model-2',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(16,1750000860,'model-0',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(17,1750000920,'model-1',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(18,1750000980,'model-2',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(19,1750001040,'model-0',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
INSERT INTO "slo_minutes" VALUES(20,1750001100,'model-1',1,1,0,0,0,0,10,9,0.0,1.5,0.25,0.0,'[0.5, [118, 1]]','[0.09, [64, 9]]',1,0.0,0.25,0.125,0.025,0.1,0.0,0.0,0.0,0.0,0.09);
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
    );
INSERT INTO "switches" VALUES(1,1750000000.0,0,'model-0',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(2,1750000001.0,0,'model-1',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(3,1750000002.0,0,'model-2',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(4,1750000003.0,0,'model-0',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(5,1750000004.0,0,'model-1',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(6,1750000005.0,0,'model-2',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(7,1750000006.0,0,'model-0',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(8,1750000007.0,0,'model-1',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(9,1750000008.0,0,'model-2',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(10,1750000009.0,0,'model-0',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(11,1750000010.0,0,'model-1',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(12,1750000011.0,0,'model-2',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(13,1750000012.0,0,'model-0',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(14,1750000013.0,0,'model-1',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(15,1750000014.0,0,'model-2',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(16,1750000015.0,0,'model-0',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(17,1750000016.0,0,'model-1',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(18,1750000017.0,0,'model-2',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(19,1750000018.0,0,'model-0',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
INSERT INTO "switches" VALUES(20,1750000019.0,0,'model-1',NULL,0.6,0.1,0.1,0.3,0.1,17179869184,1,2);
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
    );
INSERT INTO "usage_hours" VALUES(1,1749999600,'model-0','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(2,1749999600,'model-1','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(3,1749999600,'model-2','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(4,1749999600,'model-0','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(5,1749999600,'model-1','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(6,1749999600,'model-2','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(7,1749999600,'model-0','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(8,1749999600,'model-1','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(9,1749999600,'model-2','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(10,1749999600,'model-0','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(11,1749999600,'model-1','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(12,1749999600,'model-2','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(13,1749999600,'model-0','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(14,1749999600,'model-1','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(15,1749999600,'model-2','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(16,1749999600,'model-0','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(17,1749999600,'model-1','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(18,1749999600,'model-2','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(19,1749999600,'model-0','AbCd0001',1,10,5,1.5,450.0);
INSERT INTO "usage_hours" VALUES(20,1749999600,'model-1','AbCd0001',1,10,5,1.5,450.0);
CREATE INDEX aliases_by_model ON aliases (model);
CREATE TRIGGER alias_is_no_model BEFORE INSERT ON aliases
    WHEN EXISTS (SELECT 1 FROM models WHERE name = NEW.alias)
    BEGIN SELECT RAISE(ABORT, 'a model has that name'); END;
CREATE TRIGGER model_is_no_alias BEFORE INSERT ON models
    WHEN EXISTS (SELECT 1 FROM aliases WHERE alias = NEW.name)
    BEGIN SELECT RAISE(ABORT, 'a model has that alias'); END;
CREATE INDEX requests_by_arrival ON requests (arrived_at);
CREATE INDEX requests_by_model ON requests (model, arrived_at);
CREATE INDEX slo_minutes_by_minute ON slo_minutes (minute_at);
CREATE UNIQUE INDEX api_keys_by_name ON api_keys (name) WHERE revoked_at IS NULL;
CREATE TRIGGER divisions_are_of_options AFTER UPDATE OF engine ON models
    WHEN NEW.engine != OLD.engine
    BEGIN DELETE FROM divisions WHERE model = NEW.name; END;
CREATE INDEX usage_hours_by_hour ON usage_hours (hour_at);
CREATE INDEX device_minutes_by_minute ON device_minutes (minute_at);
COMMIT;

CREATE TABLE "metrics" (
	"key" VARCHAR(250) NOT NULL, 
	value FLOAT NOT NULL, 
	timestamp BIGINT NOT NULL, 
	run_uuid VARCHAR(32) NOT NULL, 
	step BIGINT DEFAULT '0' NOT NULL, 
	is_nan BOOLEAN DEFAULT '0' NOT NULL, 
	CONSTRAINT metric_pk PRIMARY KEY ("key", timestamp, step, run_uuid, value, is_nan), 
	FOREIGN KEY(run_uuid) REFERENCES runs (run_uuid), 
	CHECK (is_nan IN (0, 1))
);
INSERT INTO "metrics" VALUES('val/hmean',0.5,1794731205757,'398c48ff10d04fd1b8d0fa9dde775873',0,0);
INSERT INTO "metrics" VALUES('val/hmean',0.6,1794731205767,'398c48ff10d04fd1b8d0fa9dde775873',1,0);
INSERT INTO "metrics" VALUES('val/hmean',0.7,1794731205777,'398c48ff10d04fd1b8d0fa9dde775873',2,0);
INSERT INTO "metrics" VALUES('val/hmean',0.8,1794731205785,'398c48ff10d04fd1b8d0fa9dde775873',3,0);
INSERT INTO "metrics" VALUES('lost',0.0,1794731205792,'398c48ff10d04fd1b8d0fa9dde775873',0,1);
INSERT INTO "metrics" VALUES('endless',-1.79769313486231562238e+308,1794731205799,'398c48ff10d04fd1b8d0fa9dde775873',0,0);
CREATE TABLE "params" (
	"key" VARCHAR(250) NOT NULL, 
	value VARCHAR(8000) NOT NULL, 
	run_uuid VARCHAR(32) NOT NULL, 
	CONSTRAINT param_pk PRIMARY KEY ("key", run_uuid), 
	FOREIGN KEY(run_uuid) REFERENCES runs (run_uuid)
);
INSERT INTO "params" VALUES('seed','3','398c48ff10d04fd1b8d0fa9dde775873');
CREATE TABLE "runs" (
	run_uuid VARCHAR(32) NOT NULL, 
	name VARCHAR(250), 
	source_type VARCHAR(20), 
	source_name VARCHAR(500), 
	entry_point_name VARCHAR(50), 
	user_id VARCHAR(256), 
	status VARCHAR(9), 
	start_time BIGINT, 
	end_time BIGINT, 
	source_version VARCHAR(50), 
	lifecycle_stage VARCHAR(20), 
	artifact_uri VARCHAR(200), 
	experiment_id INTEGER, deleted_time BIGINT, 
	CONSTRAINT run_pk PRIMARY KEY (run_uuid), 
	CONSTRAINT source_type CHECK (source_type IN ('NOTEBOOK', 'JOB', 'LOCAL', 'UNKNOWN', 'PROJECT')), 
	CONSTRAINT runs_lifecycle_stage CHECK (lifecycle_stage IN ('active', 'deleted')), 
	FOREIGN KEY(experiment_id) REFERENCES experiments (experiment_id), 
	CHECK (status IN ('SCHEDULED', 'FAILED', 'FINISHED', 'RUNNING', 'KILLED'))
);
INSERT INTO "runs" VALUES('398c48ff10d04fd1b8d0fa9dde775873','angry-dog-700','UNKNOWN','train.py','','user','FINISHED',1794731205723,1794731205805,'','active','',0,NULL);

-- Columns stand in the order of the row classes in rows.py; a test compares them.

CREATE TABLE meta (
  key TEXT PRIMARY KEY,
  value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE sessions (
  id TEXT PRIMARY KEY,
  name TEXT NOT NULL,
  owner INTEGER NOT NULL,
  account TEXT NOT NULL,
  agent TEXT NOT NULL,
  cwd TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  permission_mode TEXT NOT NULL,
  when_nobody TEXT NOT NULL,
  environment TEXT NOT NULL,
  isolation TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('open', 'closed')),
  keys TEXT NOT NULL,
  options TEXT NOT NULL,
  sealed BLOB,
  rules TEXT NOT NULL,
  limits TEXT NOT NULL,
  agent_session TEXT,
  forked_from TEXT,
  credential TEXT,
  idempotency_key TEXT,
  closed_at INTEGER,
  head_seq INTEGER NOT NULL,
  floor_seq INTEGER NOT NULL,
  turns INTEGER NOT NULL,
  mode_before_plan TEXT,
  UNIQUE (owner, idempotency_key)
);
CREATE UNIQUE INDEX sessions_open_name ON sessions (owner, name) WHERE state = 'open';
CREATE INDEX sessions_name ON sessions (name);
CREATE INDEX sessions_created ON sessions (created_at);
CREATE INDEX sessions_cwd ON sessions (cwd) WHERE state = 'open';

CREATE TABLE turns (
  id TEXT PRIMARY KEY,
  session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
  prompt TEXT NOT NULL,
  queued_at INTEGER NOT NULL,
  number INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (
    state IN ('queued', 'dispatching', 'running', 'stopping', 'completed', 'failed', 'stopped', 'timed_out')
  ),
  idempotency_key TEXT,
  timeout REAL,
  executor TEXT,
  started_at INTEGER,
  ended_at INTEGER,
  reason TEXT,
  message TEXT,
  result TEXT,
  usage TEXT,
  UNIQUE (session, number),
  UNIQUE (session, idempotency_key)
);
CREATE INDEX turns_live ON turns (session, number) WHERE state IN ('queued', 'dispatching', 'running', 'stopping');
-- A session runs one turn at a time, whatever the code believes.
CREATE UNIQUE INDEX turns_active ON turns (session) WHERE state IN ('dispatching', 'running', 'stopping');

-- No foreign key: the session's row is moved by each insert, which fails without it.
CREATE TABLE events (
  position INTEGER PRIMARY KEY AUTOINCREMENT,
  session TEXT NOT NULL,
  seq INTEGER NOT NULL,
  owner INTEGER NOT NULL,
  turn TEXT,
  at INTEGER NOT NULL,
  kind TEXT NOT NULL,
  body BLOB NOT NULL
);
CREATE UNIQUE INDEX events_session ON events (session, seq);
CREATE INDEX events_owner ON events (owner);

CREATE TABLE executors (
  id TEXT PRIMARY KEY,
  account TEXT NOT NULL,
  uid INTEGER NOT NULL,
  agent TEXT NOT NULL,
  environment TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  token_hash BLOB NOT NULL UNIQUE,
  state TEXT NOT NULL CHECK (
    state IN ('starting', 'ready', 'leased', 'detached', 'draining', 'gone', 'quarantined')
  ),
  boot_id TEXT NOT NULL,
  token_until INTEGER NOT NULL,
  token_uses INTEGER NOT NULL,
  token_max_uses INTEGER NOT NULL,
  pid INTEGER,
  start_time INTEGER,
  launched TEXT,
  protocol INTEGER NOT NULL,
  version TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  session TEXT REFERENCES sessions (id) ON DELETE SET NULL,
  leased_at INTEGER,
  acked_n INTEGER NOT NULL,
  spool TEXT,
  log_path TEXT,
  gone_at INTEGER,
  detail TEXT NOT NULL
);
-- One executor per session.
CREATE UNIQUE INDEX executors_session ON executors (session) WHERE session IS NOT NULL;
CREATE INDEX executors_live ON executors (state) WHERE state <> 'gone';

CREATE TABLE permissions (
  id TEXT PRIMARY KEY,
  session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
  turn TEXT NOT NULL REFERENCES turns (id) ON DELETE CASCADE,
  executor TEXT NOT NULL,
  ask TEXT NOT NULL,
  kind TEXT NOT NULL,
  asked_at INTEGER NOT NULL,
  call TEXT NOT NULL,
  cwd TEXT NOT NULL,
  digest TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('pending', 'allowed', 'denied', 'answered', 'expired', 'withdrawn')),
  expires_at INTEGER,
  why TEXT NOT NULL,
  rule TEXT,
  layer TEXT,
  questions TEXT NOT NULL,
  plan TEXT,
  suggestions TEXT NOT NULL,
  settled_at INTEGER,
  settled_by TEXT,
  scope TEXT,
  message TEXT,
  interrupt INTEGER NOT NULL,
  updated_input TEXT,
  decided_digest TEXT,
  answers TEXT,
  UNIQUE (executor, ask)
);
CREATE INDEX permissions_session ON permissions (session, asked_at);
CREATE INDEX permissions_turn ON permissions (turn);
CREATE INDEX permissions_pending ON permissions (session) WHERE state = 'pending';

CREATE TABLE keys (
  id TEXT PRIMARY KEY,
  owner INTEGER NOT NULL,
  provider TEXT NOT NULL,
  name TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  sealed BLOB NOT NULL,
  wrapped BLOB NOT NULL,
  master TEXT NOT NULL,
  kind TEXT NOT NULL,
  version INTEGER NOT NULL,
  hint TEXT NOT NULL,
  updated_at INTEGER,
  last_used_at INTEGER,
  uses INTEGER NOT NULL,
  UNIQUE (owner, provider, name)
);

CREATE TABLE rules (
  owner INTEGER NOT NULL,
  effect TEXT NOT NULL CHECK (effect IN ('allow', 'ask', 'deny')),
  rule TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  project TEXT,
  session TEXT REFERENCES sessions (id) ON DELETE CASCADE,
  origin TEXT NOT NULL
);
CREATE UNIQUE INDEX rules_once ON rules (owner, effect, rule, coalesce(project, ''), coalesce(session, ''));
CREATE INDEX rules_session ON rules (session) WHERE session IS NOT NULL;

CREATE TABLE trust (
  owner INTEGER NOT NULL,
  path TEXT NOT NULL,
  digest TEXT NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (owner, path, digest)
) WITHOUT ROWID;

-- The record outlives the session that it speaks of: no foreign key.
CREATE TABLE audit (
  at INTEGER NOT NULL,
  owner INTEGER NOT NULL,
  actor TEXT NOT NULL,
  action TEXT NOT NULL,
  outcome TEXT NOT NULL,
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  session TEXT,
  subject TEXT,
  rule TEXT,
  digest TEXT,
  details TEXT
);
CREATE INDEX audit_session ON audit (session) WHERE session IS NOT NULL;
CREATE INDEX audit_owner ON audit (owner);

CREATE TABLE usage (
  at INTEGER NOT NULL,
  owner INTEGER NOT NULL,
  account TEXT NOT NULL,
  session TEXT NOT NULL,
  turn TEXT,
  model TEXT NOT NULL,
  source TEXT NOT NULL CHECK (source IN ('agent', 'broker')),
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  request TEXT,
  input_tokens INTEGER NOT NULL,
  output_tokens INTEGER NOT NULL,
  cache_read_tokens INTEGER NOT NULL,
  cache_write_tokens INTEGER NOT NULL,
  usd REAL
);
CREATE UNIQUE INDEX usage_request ON usage (source, request) WHERE request IS NOT NULL;
CREATE INDEX usage_session ON usage (session);
CREATE INDEX usage_owner ON usage (owner, at);

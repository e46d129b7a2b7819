-- What a request cost besides plain tokens, and why its price is unknown.
ALTER TABLE usage ADD COLUMN cache_write_1h_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage ADD COLUMN searches INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage ADD COLUMN why_unknown TEXT;

-- Whether the agent lost the conversation: the next executor gets a recap of it.
ALTER TABLE sessions ADD COLUMN recap_due INTEGER NOT NULL DEFAULT 0;

-- The limits, groups, settings and files that the executor was started with.
ALTER TABLE executors ADD COLUMN made_of TEXT;

-- What is left of a closed session's processes, and the session that an executor served.
ALTER TABLE sessions ADD COLUMN killed TEXT;
ALTER TABLE executors ADD COLUMN served TEXT;

-- The names of the user concerned and of the actor, as they were at that time.
ALTER TABLE audit ADD COLUMN account TEXT;
ALTER TABLE audit ADD COLUMN actor_account TEXT;

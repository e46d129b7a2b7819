-- What a turn does with the conversation, and the executor, gone since, that may have accepted its prompt.
ALTER TABLE turns ADD COLUMN kind TEXT NOT NULL DEFAULT 'prompt' CHECK (kind IN ('prompt', 'compact', 'clear'));
ALTER TABLE turns ADD COLUMN offered_to TEXT;

-- The instruction files that the agent was given, and those that were left out.
ALTER TABLE sessions ADD COLUMN instructions TEXT;

-- Whether no component of the working directory may be a link: the client or an executor has resolved them.
ALTER TABLE sessions ADD COLUMN real_cwd INTEGER NOT NULL DEFAULT 0;

-- The directory of a session's agent, and the directories of removed sessions.
ALTER TABLE sessions ADD COLUMN agent_dir TEXT;
CREATE TABLE left_dirs (
  path TEXT PRIMARY KEY,
  account TEXT NOT NULL
) WITHOUT ROWID;

-- The rule that settled the request, or that its decision added.
ALTER TABLE permissions ADD COLUMN settled_rule TEXT;

"""A state directory and conversations that an earlier version left (`tests/schemas`), taken over by this one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from hutch_executor.runners.claude.config_dir import transcripts_name
from hutch_shared import messages as m
from hutch_shared.times import now_ms
from tests.accounts import need_root
from tests.rehearsal import Model, Say, Step, Steps, anything, serve
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import data, log_of, without_gaps

pytestmark = pytest.mark.system

SCHEMAS = [path for path in sorted(Path(__file__).parents[1].joinpath("schemas").iterdir()) if path.is_dir()]
SECRETS = ("master.key", "vault.ledger")


def lay_out(made: Host, schema: Path) -> dict[Path, bytes]:
    """Put an earlier version's files where it left them; return those of the user, with their content."""
    for name in SECRETS:
        (made.state / name).write_bytes((schema / name).read_bytes())
        (made.state / name).chmod(0o600)
    with closing(sqlite3.connect(made.state / "hutch.db")) as conn:
        conn.executescript(_placed(schema / "hutch.sql", made))
        later = now_ms() + 600_000  # otherwise the requests expire a second after the start
        conn.execute("UPDATE permissions SET expires_at = ? WHERE state = 'pending'", (later,))
        conn.commit()
    (made.state / "hutch.db").chmod(0o600)
    with closing(sqlite3.connect(made.state / "hutch.db")) as conn:
        own_dirs = "agent_dir" in {row[1] for row in conn.execute("PRAGMA table_info(sessions)")}
        asked = f"SELECT name, agent_session, {'agent_dir' if own_dirs else 'NULL'} FROM sessions"
        conversations = {name: (conversation, agent_dir) for name, conversation, agent_dir in conn.execute(asked)}
    users: dict[Path, bytes] = {}
    for transcript in schema.glob("*.jsonl"):
        cwd = made.folder(transcript.stem)
        conversation, agent_dir = conversations[transcript.stem]
        config_dir = Path(agent_dir) if agent_dir else made.home / ".claude"
        folder = config_dir / "projects" / transcripts_name(os.path.realpath(cwd))
        folder.mkdir(parents=True, mode=0o700)
        file = folder / f"{conversation}.jsonl"
        file.write_text(_placed(transcript, made))
        if agent_dir:
            for closed in (config_dir, config_dir.parent, config_dir.parent.parent):
                closed.chmod(0o700)
            (config_dir / "hutch-conversation").write_text(conversation)
        else:
            users[file] = file.read_bytes()
    return users


def _placed(file: Path, made: Host) -> str:
    """Return the text of a fixture with the folders of this host."""
    return file.read_text().replace("@WORK@", str(made.work)).replace("@ROOT@", str(made.root))


@asynccontextmanager
async def upgraded(schema: Path, model: Model) -> AsyncIterator[tuple[Host, dict[Path, bytes]]]:
    """Start this version's hutchd on what an earlier one left."""
    async with host(settings_for(model), start=False) as made:
        users = lay_out(made, schema)
        await made.start()
        yield made, users


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda path: f"schema {path.name}")
async def test_an_earlier_versions_sessions_go_on_with_their_history(schema: Path) -> None:
    """Each open session resumes its conversation, what was pending ends with the reason, and the queued prompt runs."""
    need_root()
    script = Steps(Step(anything, Say("ok"), None))
    async with serve(key=KEY, script=script) as model, upgraded(schema, model) as (made, users):
        async with made.client() as hutch:
            sessions = {one.name: one for one in await hutch.list_sessions(m.ListSessions())}
            ends = {}
            for name, word in (("history", "heron"), ("asking", "crane"), ("planning", "stork")):
                async with log_of(hutch, sessions[name]) as log:
                    if name == "asking":
                        queued = (await hutch.list_turns(sessions[name].id))[-1]
                        ends["queued"] = await log.ended(queued.id)
                    turn = await hutch.submit_prompt(sessions[name].id, f"what was the word? ({name})")
                    ends[name] = await log.ended(turn)
                    assert without_gaps(log.events)
                    assert not [one for one in log.of("notice") if one.word == "conversation_lost"]
                    earlier = [data(event).state for event in log.events if event.kind == "turn_ended"]
                    assert earlier[0] == "completed", (name, earlier)
                asked = next(one for one in model.turns if one.prompt == f"what was the word? ({name})")
                assert f"I shall remember the word {word}." in str(asked.body)
            settled = await hutch.list_permissions(m.ListPermissions(state="withdrawn"))
            after = {one.name: one for one in await hutch.list_sessions(m.ListSessions())}

        assert {name: end.state for name, end in ends.items()} == dict.fromkeys(ends, "completed")
        assert sorted(one.kind for one in settled) == ["plan", "tool"]
        # both are true of a turn whose executor did not outlive the earlier hutchd; what is noticed first is the reason
        assert {one.message for one in settled} <= {"Withdrawn: its executor is gone.", "Withdrawn: the turn ended."}
        assert {name: (one.state, one.permission_mode) for name, one in after.items()} == {
            "history": ("open", "ask"),
            "asking": ("open", "ask"),
            "planning": ("open", "plan"),
            "closed": ("closed", "ask"),
        }
        assert after["history"].rules.allow == ("Read(docs/**)",)
        assert after["history"].agent_session == sessions["history"].agent_session
        kept = {path: path.read_bytes() for path in (made.home / ".claude").rglob("*") if path.is_file()}
        assert kept == users, "the user's own files are untouched"

from __future__ import annotations

import json
import os
import pwd
from typing import Any

import msgspec
import pytest

from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import UsageSeen
from tests.client.conftest import Hutch
from tests.client.fake_daemon import PERMISSION, SESSION, TURN, FakeDaemon


def test_ps_prints_a_table_that_marks_waiting_sessions(daemon: FakeDaemon, hutch: Hutch) -> None:
    """Its state is `awaiting_permission`, with the number of requests; a name stays in its cell."""
    fresh = msgspec.structs.replace(SESSION, created_at="2999-01-31T12:00:00.000Z")
    waiting: dict[str, Any] = {"active_state": "awaiting_permission", "pending": 2, "queued": 1}
    asks = msgspec.structs.replace(fresh, name="a\x1b[2Jb\nc", **waiting)
    daemon.answers["list_sessions"] = m.Sessions((asks, msgspec.structs.replace(fresh, id="s-2", state="closed")))

    code, out, err = hutch("ps", "-a")

    heads, first, second = out.splitlines()
    assert heads.split() == [*["SESSION", "NAME", "ACCOUNT", "AGENT", "STATE", "ISOLATION", "KEYS", "AGE", "DIRECTORY"]]
    assert first.split("  ")[:2] == ["s-0000000000000001", "a\\x1b[2Jb c"]
    assert first[heads.index("STATE") : heads.index("ISOLATION")].rstrip() == "awaiting_permission (2) +1 queued"
    assert second[heads.index("STATE") : heads.index("ISOLATION")].rstrip() == "closed"
    assert (code, err) == (0, "")
    assert daemon.asked("list_sessions") == [m.ListSessions(state=None)]


def test_ps_shows_a_turn_that_stops_while_it_waits(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The state is the server's; pending requests only add their number."""
    stopping = msgspec.structs.replace(SESSION, active_state="stopping", pending=1, queued=1)
    daemon.answers["list_sessions"] = m.Sessions((stopping,))

    heads, row = hutch("ps")[1].splitlines()

    assert row[heads.index("STATE") : heads.index("ISOLATION")].rstrip() == "stopping (1) +1 queued"


def test_ps_shows_accounts_if_they_differ(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The account is shown if one is not the caller's, or if the list has more than the caller's open sessions."""
    own = msgspec.structs.replace(SESSION, account=pwd.getpwuid(os.geteuid()).pw_name)

    daemon.answers["list_sessions"] = m.Sessions((own,))
    assert ["ACCOUNT" in hutch("ps", *words)[1] for words in ((), ("--all",), ("--everyone",))] == [False, True, True]
    daemon.answers["list_sessions"] = m.Sessions((own, SESSION))
    assert "ACCOUNT" in hutch("ps")[1]


def test_ps_prints_ids_or_json_for_programs(daemon: FakeDaemon, hutch: Hutch) -> None:
    """`-q` prints ids, and `-o json` the records as they were received."""
    daemon.answers["list_sessions"] = m.Sessions((SESSION,))

    ids, records = hutch("ps", "-q"), hutch("ps", "-o", "json")

    assert ids == (0, f"{SESSION.id}\n", "")
    assert msgspec.convert(json.loads(records[1])[0], m.Session) == SESSION
    assert daemon.asked("list_sessions")[0].state == "open"


def test_lists_that_were_cut_say_so(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The warning goes to standard error, so that the records on standard output stay parseable."""
    daemon.answers["list_sessions"] = m.Sessions((SESSION,), more=True)
    daemon.answers["list_turns"] = m.Turns((TURN,), more=True)

    told = [hutch(*words) for words in (["ps", "-q"], ["inspect", "fix"])]

    said = "Only the newest are listed. `-n N` lists more, up to the size limit of an answer.\n"
    assert told[0] == (0, f"{SESSION.id}\n", said)
    assert told[1][2] == said


def test_more_than_the_newest_can_be_listed(daemon: FakeDaemon, hutch: Hutch) -> None:
    """`-n` sets the number."""
    daemon.answers |= {"list_sessions": m.Sessions((SESSION,)), "list_turns": m.Turns((TURN,))}

    assert hutch("ps", "-n", "1000")[0] == 0
    assert hutch("inspect", "fix", "-n", "1000")[0] == 0
    assert daemon.asked("list_sessions") == [m.ListSessions(state="open", limit=1000)]
    assert daemon.asked("list_turns") == [m.ListTurns(SESSION.id, limit=1000)]


@pytest.mark.parametrize("words", ["stop fix", "rm -f fix", "stop -o json fix"])
def test_a_stop_that_is_not_verified_fails(daemon: FakeDaemon, hutch: Hutch, words: str) -> None:
    """It exits with 1 and says what may be left; nothing is removed. `-o json` has the three outcomes."""
    unknown = m.KillResult("unknown", "what is left of it is unknown: the launcher is away")
    daemon.answers["get_session"] = SESSION
    daemon.answers["close_session"] = msgspec.structs.replace(SESSION, state="closed", killed=unknown)

    code, out, err = hutch(*words.split())

    assert code == 1
    assert "fix is closed, but what is left of it is unknown: the launcher is away." in err
    assert [call for call, _ in daemon.calls if call == "delete_session"] == []
    if "json" in words:
        assert json.loads(out)[0]["killed"]["outcome"] == "unknown"


def test_inspect_shows_the_limits_that_were_applied(daemon: FakeDaemon, hutch: Hutch) -> None:
    """Beside a limit that differs it shows what was asked for; without an executor, what the settings ask for."""
    asked = m.ResourceLimits(memory=700 << 20, pids=4096, cpu_weight=100, open_files=65536)
    applied = msgspec.structs.replace(asked, open_files=20000, cpu_weight=99, pids=None)
    isolation = m.Isolation("account", "so", limits="65,536 open files of each process")
    session = msgspec.structs.replace(SESSION, isolation=isolation)
    made = msgspec.structs.replace(session, executor_limits=m.LimitsApplied(applied, asked))
    daemon.answers |= {"list_turns": m.Turns(()), "list_permissions": m.Permissions(())}

    shown = []
    for one in (session, made):
        daemon.answers["get_session"] = one
        out = hutch("inspect", "fix")[1]
        shown.append(next(line for line in out.splitlines() if line.startswith("its limits")))

    assert shown[0].endswith("  65,536 open files of each process")
    assert "  memory 700 MiB, processes and threads not applied (4,096 asked for), cpu weight 99, open" in shown[1]
    assert shown[1].endswith("open files of each process 20,000 (65,536 asked for)")


def test_an_inspection_shows_what_the_broker_counted(daemon: FakeDaemon, hutch: Hutch) -> None:
    """An unknown price is shown as unknown, with its reason; `-o json` has the whole line."""
    why = "The price of the model X is unknown."
    line = m.UsageLine("s-1", 1, UsageSeen(9, 1), UsageSeen(1000, 50, usd=0.25), 5, 8, 2, why)
    daemon.answers |= {"list_turns": m.Turns((TURN,)), "get_usage": m.UsageTable((line,))}

    shown = next(one for one in hutch("inspect", "fix")[1].splitlines() if one.startswith("counted by the broker"))
    found = json.loads(hutch("inspect", "fix", "-o", "json")[1])["counted"]

    assert shown.split("  ")[-1].strip() == (
        "1,000 tokens in, 50 out, cost unknown; "
        "The price of the model X is unknown (2 of 5 requests; the others $0.2500); 8 web searches"
    )
    assert (found["unknown"], found["why_unknown"], found["broker"]["usd"]) == (2, why, 0.25)


def test_an_interrupt_that_is_not_verified_fails(daemon: FakeDaemon, hutch: Hutch) -> None:
    """It exits with 1 and gives the turn's message."""
    daemon.answers["get_session"] = SESSION
    daemon.answers["interrupt_turn"] = msgspec.structs.replace(
        TURN, state="stopped", reason="not_verified", message="It is unknown."
    )

    assert hutch("interrupt", "fix") == (1, "", "hutch: It is unknown.\n")


def test_a_refused_stop_or_removal_names_the_command_that_works(daemon: FakeDaemon, hutch: Hutch) -> None:
    """For a running turn or an open session, the error has the command with the option that works."""

    def busy(params: m.CloseSession) -> m.Session:
        if not params.force:
            raise HutchError(Reason.WRONG_STATE, "A turn runs.")
        return SESSION

    daemon.answers["close_session"] = busy

    stop, remove = hutch("stop", "fix"), hutch("rm", "fix")

    assert stop == (1, "", "hutch: A turn of fix runs or is queued. `hutch stop -f fix` (--force) stops it too.\n")
    assert remove[0] == 1
    assert "`hutch stop fix`; `hutch rm -f fix` (--force) closes and removes it" in remove[2]
    assert daemon.asked("delete_session") == []


def test_an_error_of_one_session_does_not_keep_the_others_from_ending(daemon: FakeDaemon, hutch: Hutch) -> None:
    """Each error is printed; the exit code is that of the first."""

    def one(params: m.SessionRef) -> m.Session:
        if params.session == "gone":
            raise HutchError(Reason.NOT_FOUND, "There is no session gone.")
        return msgspec.structs.replace(SESSION, id=params.session, state="closed")

    def close(params: m.CloseSession) -> m.Session:
        return one(m.SessionRef(params.session))

    daemon.answers |= {"get_session": one, "close_session": close, "delete_session": m.Nothing()}

    told = [hutch(name, "one", "gone", "two") for name in ("stop", "rm")]

    assert told == [(1, "", "hutch: There is no session gone.\n")] * 2
    assert [asked.session for asked in daemon.asked("close_session")] == ["one", "gone", "two"]
    assert daemon.asked("delete_session") == [m.SessionRef("one"), m.SessionRef("two")]


def test_inspect_shows_isolation_keys_and_turns(daemon: FakeDaemon, hutch: Hutch) -> None:
    """It shows the isolation level and the state of its keys, each with the reason."""
    daemon.answers["list_turns"] = m.Turns((msgspec.structs.replace(TURN, state="failed", reason="no_key"),))
    daemon.answers["get_session"] = msgspec.structs.replace(SESSION, usage=UsageSeen(1000, 50, usd=0.25))

    code, out, _ = hutch("inspect", "fix")

    assert code == 0
    assert "keys                 exposed\n" in out
    assert "isolation            reduced: no sandbox\n" in out
    assert "usage                1,000 tokens in, 50 out, $0.2500\n" in out
    assert out.endswith("t-0000000000000001  failed: no_key  2026-01-31T12:00:00.000Z         fix it\n")


def test_inspect_shows_what_was_decided(daemon: FakeDaemon, hutch: Hutch) -> None:
    """For the newest requests: who decided, for what scope, the rule, and the call as it was edited."""
    edited = msgspec.structs.replace(
        PERMISSION, state="allowed", settled_by="uid 1000 (hutch, pid 4)", updated_input={"command": "npm ci"}
    )
    granted = msgspec.structs.replace(
        PERMISSION, id="p-2", state="allowed", settled_by="uid 1000", scope="session", settled_rule="Bash(npm:*)"
    )
    asked = (edited, granted, msgspec.structs.replace(PERMISSION, id="p-3"))
    daemon.answers |= {"list_turns": m.Turns((TURN,)), "list_permissions": m.Permissions(asked)}

    code, out, _ = hutch("inspect", "fix")
    found = json.loads(hutch("inspect", "fix", "-o", "json")[1])

    assert code == 0
    rows = [line.split("  ") for line in out.splitlines()[-3:]]
    assert [[cell.strip() for cell in row if cell] for row in rows] == [
        [PERMISSION.id, "allowed", "uid 1000 (hutch, pid 4)", "Bash npm ci (edited)"],
        ["p-2", "allowed", "uid 1000 session Bash(npm:*)", "Bash npm install"],
        ["p-3", "pending", "Bash npm install"],
    ]
    assert [one["id"] for one in found["permissions"]] == [PERMISSION.id, "p-2", "p-3"]
    assert daemon.asked("list_permissions")[0] == m.ListPermissions(SESSION.id, None, 20, newest=True)


def test_inspect_shows_the_isolation_and_the_needs_of_a_higher_level(daemon: FakeDaemon, hutch: Hutch) -> None:
    """It shows the level, its reason, the required level, the needs of a higher one, and the limits; as JSON too."""
    daemon.answers["list_turns"] = m.Turns(())
    isolation = m.Isolation(
        "account",
        "another account",
        keys_why="by lease",
        asked="account",
        missing="Install bubblewrap.",
        limits="8 GiB",
    )
    daemon.answers["get_session"] = msgspec.structs.replace(
        SESSION, isolation=isolation, keys="brokered", limits=m.Limits(turn_timeout=60, max_turns=3, max_usd=0.5)
    )

    out, told = hutch("inspect", "fix")[1], hutch("inspect", "fix", "-o", "json")[1]

    for line in (
        "account              ann",
        "keys                 brokered: by lease",
        "isolation            account: another account",
        "at least             account",
        "for more             Install bubblewrap.",
        "its limits           8 GiB",
        "turn limits          60 s, 3 requests to the model, $0.5 for the session",
    ):
        assert f"{line}\n" in out
    assert msgspec.convert(json.loads(told)["isolation"], m.Isolation) == isolation


@pytest.mark.parametrize(
    ("kind", "left", "shown"),
    [
        ("bubblewrap", ("loopback",), ["sandbox              bubblewrap", "remains open         loopback"]),
        (
            "landlock",
            ("see-processes", "loopback"),
            ["sandbox              landlock", "remains open         see-processes, loopback"],
        ),
        (None, ("a", "b"), ["sandbox              none: 2 of the attacks in docs/security.md are open"]),
        (None, (), []),
    ],
    ids=["bubblewrap", "landlock", "none", "an earlier hutchd"],
)
def test_inspect_shows_what_the_sandbox_leaves_open(
    daemon: FakeDaemon, hutch: Hutch, kind: m.SandboxKind | None, left: tuple[str, ...], shown: list[str]
) -> None:
    """The session's row of the table of attacks; as JSON too, with all names."""
    daemon.answers["list_turns"] = m.Turns(())
    isolation = m.Isolation("reduced", "why", sandbox=kind, open=left)
    daemon.answers["get_session"] = msgspec.structs.replace(SESSION, isolation=isolation)

    out, told = hutch("inspect", "fix")[1], hutch("inspect", "fix", "-o", "json")[1]

    assert [line for line in out.splitlines() if line.startswith(("sandbox ", "remains open "))] == shown
    assert msgspec.convert(json.loads(told)["isolation"], m.Isolation) == isolation


@pytest.mark.parametrize(
    ("state", "said"),
    [("closed", "fix is closed, so no turn of it runs."), ("open", "fix is idle: there is no turn to stop.")],
)
def test_an_idle_or_closed_session_cannot_be_interrupted(
    daemon: FakeDaemon, hutch: Hutch, state: m.SessionState, said: str
) -> None:
    """The error says that the session is closed or idle, and does not name a turn's state."""

    def refuse(_: m.InterruptTurn) -> m.Turn:
        raise HutchError(Reason.WRONG_STATE, "No such turn is running.")

    daemon.answers["get_session"] = msgspec.structs.replace(SESSION, state=state)
    daemon.answers |= {"interrupt_turn": refuse, "cancel_turn": TURN, "list_turns": m.Turns((TURN,))}

    assert hutch("interrupt", "fix") == (1, "", f"hutch: {said}\n")
    assert hutch("interrupt", "fix", "--queued")[0] == (0 if state == "open" else 1)


def test_mode_interrupt_stop_rm_and_fork_name_the_session_by_id(daemon: FakeDaemon, hutch: Hutch) -> None:
    """They resolve a name or a prefix first; `interrupt` can also empty the queue, and `rm -f` closes first."""
    for method in ("set_permission_mode", "close_session", "fork_session"):
        daemon.answers[method] = SESSION
    daemon.answers |= {
        "interrupt_turn": TURN,
        "cancel_turn": TURN,
        "delete_session": m.Nothing(),
        "list_turns": m.Turns((TURN,)),
    }

    done = [
        hutch(*line.split())
        for line in ("mode fix plan", "interrupt fix --queued", "stop fix --force", "rm fix -f", "fork fix --name two")
    ]

    assert [code for code, _, _ in done] == [0] * 5
    assert done[4][1] == f"{SESSION.id}\n"
    assert [
        (name, params) for name, params in daemon.calls if name not in ("get_version", "get_session", "list_turns")
    ] == [
        ("set_permission_mode", m.SetPermissionMode(SESSION.id, "plan")),
        ("cancel_turn", m.TurnRef(TURN.id)),
        ("interrupt_turn", m.InterruptTurn(SESSION.id)),
        ("close_session", m.CloseSession("fix", force=True)),
        ("close_session", m.CloseSession(SESSION.id, force=True)),
        ("delete_session", m.SessionRef(SESSION.id)),
        ("fork_session", m.ForkSession("fix", "two")),
    ]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.NOT_FOUND, 1),
        (Reason.INVALID_PARAMS, 2),
        (Reason.SHUTTING_DOWN, 3),
        (Reason.NOT_ALLOWED, 4),
        (Reason.INSIDER, 4),
        (Reason.TIMED_OUT, 124),
    ],
)
def test_an_error_is_a_sentence_and_an_exit_code(daemon: FakeDaemon, hutch: Hutch, reason: Reason, code: int) -> None:
    """hutchd's message goes to standard error, without escape sequences."""

    def refuse(params: object) -> m.Session:
        raise HutchError(reason, "No\x1b[31m.")

    daemon.answers["get_session"] = refuse

    assert hutch("inspect", "x") == (code, "", "hutch: No.\n")


def test_no_hutchd_is_exit_3(hutch: Hutch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the command that starts hutchd; `daemon start` does not start one that HUTCH_HOST names."""
    monkeypatch.setenv("HUTCH_HOST", "/nonexistent/client.sock")

    named = hutch("ps")
    monkeypatch.delenv("HUTCH_HOST")
    own = hutch("ps")

    assert [named[:2], own[:2]] == [(3, "")] * 2
    assert named[2].startswith(
        "hutch: No hutchd answers at /nonexistent/client.sock, which HUTCH_HOST names. Start that"
    )
    assert own[2].endswith(".local/state/hutch/run/client.sock. Start one with `hutch daemon start`.\n")


def test_unknown_commands_and_options_are_usage_errors(hutch: Hutch) -> None:
    """The exit code is 2, and the error has the nearest command."""
    assert hutch("pss") == (2, "", "hutch: There is no command `pss`. Did you mean `ps`? `hutch help` lists them.\n")
    assert hutch("ps", "--no-such")[0] == 2
    assert hutch("ps", "--quie")[0] == 2


def test_help_lists_every_command(hutch: Hutch) -> None:
    """`hutch` without a command lists them too."""
    code, out, _ = hutch()

    assert code == 0
    assert hutch("help", "ps") == hutch("ps", "-h")
    assert all(f"\n  {name} " in out for name in ("run", "ps", "approve", "policy", "key", "daemon", "doctor"))

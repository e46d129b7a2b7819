from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from hutch_shared import messages as m
from tests.client.conftest import Hutch
from tests.client.fake_daemon import PERMISSION, SESSION, FakeDaemon

OTHER = msgspec.structs.replace(
    PERMISSION, id="p-1000000000000002", suggestions=(m.Suggestion("Bash(npm install)"), m.Suggestion("Bash(npm i)"))
)
QUESTION = msgspec.structs.replace(
    PERMISSION,
    id="p-2000000000000003",
    session="s-2",
    kind="question",
    questions=(m.Question("Which?", choices=(m.Choice("Red"), m.Choice("Blue"))), m.Question("Why?")),
)


@pytest.fixture(autouse=True)
def _questions(daemon: FakeDaemon) -> None:
    """Two tool calls of one session and a question of another are pending; a fourth request is settled."""
    waiting = (PERMISSION, OTHER, QUESTION)
    settled = msgspec.structs.replace(PERMISSION, id="p-3000000000000004", state="denied")

    def listed(params: m.ListPermissions) -> m.Permissions:
        found = waiting if params.state == "pending" else (*waiting, settled)
        return m.Permissions(tuple(one for one in found if params.session in (None, one.session)))

    daemon.answers |= {"list_permissions": listed, "answer_permission": PERMISSION}


def test_pending_lists_each_request_on_one_line(hutch: Hutch) -> None:
    """Each line has the id that the answer needs."""
    code, out, _ = hutch("pending", "-o", "json")
    lines = hutch("pending")[1].splitlines()

    assert (code, [one["id"] for one in json.loads(out)]) == (0, [PERMISSION.id, OTHER.id, QUESTION.id])
    assert lines[0].split() == ["REQUEST", "SESSION", "STATE", "AGE", "WHAT"]
    assert lines[1].endswith("  Bash npm install")
    assert lines[3].endswith("  Which? / Why?")


def test_all_pages_of_requests_are_fetched(daemon: FakeDaemon, hutch: Hutch) -> None:
    """All pending requests are listed and can be answered, however many pages they fill."""
    waiting = [PERMISSION, OTHER, QUESTION]

    def listed(params: m.ListPermissions) -> m.Permissions:
        begin = 0 if params.after is None else [one.id for one in waiting].index(params.after) + 1
        return m.Permissions((waiting[begin],), more=begin + 1 < len(waiting))

    daemon.answers["list_permissions"] = listed
    lines = hutch("pending", "-o", "jsonl")[1].splitlines()
    code, *_ = hutch("deny", OTHER.id)

    assert [json.loads(line)["id"] for line in lines] == [PERMISSION.id, OTHER.id, QUESTION.id]
    assert (code, [one.permission for one in daemon.asked("answer_permission")]) == (0, [OTHER.id])


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["approve", "p-0"], m.AnswerPermission(PERMISSION.id, "allow")),
        (["approve", "p-1", "--session"], m.AnswerPermission(OTHER.id, "allow", "session", "Bash(npm install)")),
        (
            ["approve", "p-1", "--always", "--rule", "Bash(npm:*)"],
            m.AnswerPermission(OTHER.id, "allow", "always", "Bash(npm:*)"),
        ),
        (["deny", "p-0", "-m", "use pnpm"], m.AnswerPermission(PERMISSION.id, "deny", message="use pnpm")),
        (["deny", "p-0", "--stop"], m.AnswerPermission(PERMISSION.id, "deny", interrupt=True)),
        (["deny", "p-3"], m.AnswerPermission("p-3000000000000004", "deny")),
        (
            ["answer", "p-2", "2", "because"],
            m.AnswerPermission(QUESTION.id, "answer", answers={"Which?": "Blue", "Why?": "because"}),
        ),
    ],
)
def test_each_command_sends_its_decision(
    daemon: FakeDaemon, hutch: Hutch, words: list[str], answer: m.AnswerPermission
) -> None:
    """A prefix of the id names a request. The command also sends an answer to a settled request: hutchd refuses it."""
    assert hutch(*words)[:2] == (0, "")
    assert daemon.asked("answer_permission") == [answer]


@pytest.mark.parametrize(
    "words",
    [
        ["approve", "fix"],
        ["approve", "p-2"],
        ["approve", "p-0", "--rule", "Bash(x)"],
        ["approve", "p-0", "--session", "--always"],
        ["answer", "p-2", "1"],
        ["answer", "p-2", "7", "x"],
        ["pending", "--watch", "-o", "json"],
    ],
)
def test_an_unfitting_answer_is_a_usage_error(daemon: FakeDaemon, hutch: Hutch, words: list[str]) -> None:
    """Examples: a session with two requests, an approved question, a rule for one call, too few answers."""
    assert hutch(*words)[0] == 2
    assert daemon.asked("answer_permission") == []


def test_always_needs_a_rule_that_was_seen(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The command prints the rule that it adds. If the request suggests no rule, the user must give one."""
    added = hutch("approve", "p-1", "--always")
    refused = hutch("approve", "p-0", "--always")

    assert added == (0, "", "Allowed in this project from now on: Bash(npm install)\n")
    assert refused[0] == 2
    assert "--rule" in refused[2]
    assert len(daemon.asked("answer_permission")) == 1


def test_a_session_names_its_only_request(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The user need not copy the id of a request."""
    daemon.answers["get_session"] = msgspec.structs.replace(SESSION, id="s-2")

    assert hutch("answer", "colours", "Red", "so")[0] == 0
    assert daemon.asked("answer_permission")[0].permission == QUESTION.id


def test_an_input_is_edited_in_the_users_editor(
    daemon: FakeDaemon, hutch: Hutch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text that the user saves is the input that may run."""
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i.bak s/install/ci/ "$1"\n')
    editor.chmod(0o700)
    monkeypatch.setenv("EDITOR", str(editor))

    assert hutch("approve", "p-0", "--edit")[0] == 0
    assert daemon.asked("answer_permission")[0].updated_input == {"command": "npm ci"}


@pytest.mark.parametrize(
    ("editor", "words"), [("false", "The editor `false` failed"), ("ed 'x", "The editor `ed 'x` cannot be run")]
)
def test_an_editor_that_fails_allows_nothing(
    daemon: FakeDaemon, hutch: Hutch, monkeypatch: pytest.MonkeyPatch, editor: str, words: str
) -> None:
    """The command sends nothing if the editor fails."""
    monkeypatch.setenv("EDITOR", editor)

    code, _, err = hutch("approve", "p-0", "--edit")

    assert code == 2
    assert words in err
    assert daemon.asked("answer_permission") == []


@pytest.mark.parametrize("scope", ["--session", "--always"])
def test_an_edit_needs_a_rule_for_more_than_one_call(daemon: FakeDaemon, hutch: Hutch, scope: str) -> None:
    """The suggested rule would allow the call that the user does not want."""
    code, _, err = hutch("approve", "p-0", "--edit", scope)

    assert code == 2
    assert f"with --edit and {scope} give a rule with --rule" in err
    assert daemon.asked("answer_permission") == []

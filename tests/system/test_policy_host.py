"""No other layer, mode or user weakens the host's policy."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.system.host import Host
from tests.system.log import allow, log_of
from tests.system.policing import (
    SPARELESS,
    Call,
    asked_of,
    audit_of,
    bash,
    deny,
    policed,
    results_of,
    step,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

HOST = """[permissions]
deny = ["Bash(touch denied:*)", "Edit(secret.txt)"]
ask = ["Bash(touch asked:*)"]
forbid_bypass = true
"""
OPEN = '[permissions]\nallow = ["Bash", "Bash(touch:*)", "Edit(**)"]\n'
EVERYTHING = ("Bash", "Bash(touch:*)", "Edit(**)", "Edit(secret.txt)")
CALLS: Sequence[Call] = (
    bash("touch denied"),
    ("Write", {"file_path": "secret.txt", "content": "x"}),
    bash("touch asked"),
    bash("touch other"),
)


@pytest.fixture(scope="module")
async def guarded() -> AsyncIterator[Host]:
    """A host with this policy."""
    async with policed(HOST, SPARELESS) as made:
        yield made


@pytest.fixture
async def hutch(guarded: Host) -> AsyncIterator[HutchClient]:
    """A client of the host."""
    async with guarded.client() as client:
        yield client


async def open_session(
    host: Host, hutch: HutchClient, folder: Path, tools: tuple[str, ...] = (), **more: Any
) -> m.Session:
    """Open a session that makes the calls, in a folder."""
    script = host.script_file(folder.name, [step(call) for call in CALLS])
    options = m.AgentOptions(script=script, allowed_tools=tools)
    return await hutch.open_session(m.OpenSession("script", str(folder), options=options, **more))


async def assert_guarded(hutch: HutchClient, session: m.Session, *, other: bool) -> None:
    """Check that the host's deny and ask rules hold; `other` is whether the remaining calls pass."""
    async with log_of(hutch, session) as log:
        end = await log.play(session, "go", deny)

        assert end.state == "completed", end
        assert asked_of(log) == ["touch asked"] + ([] if other else ["touch other"])
        assert results_of(log) == {
            "touch denied": False,
            "Write secret.txt": False,
            "touch asked": False,
            "touch other": other,
        }
        assert not Path(session.cwd, "denied").exists()


async def test_a_project_that_is_not_trusted_allows_nothing(guarded: Host, hutch: HutchClient) -> None:
    """It does not even allow calls that the host's policy leaves open."""
    folder = guarded.folder("untrusted")
    _write_policy(folder)
    await assert_guarded(hutch, await open_session(guarded, hutch, folder), other=False)


async def test_a_trusted_project_allows_only_what_the_host_leaves_open(guarded: Host, hutch: HutchClient) -> None:
    """The host's deny and ask rules hold."""
    folder = guarded.folder("trusted")
    _write_policy(folder)
    await guarded.hutch("policy", "trust", str(folder))
    await assert_guarded(hutch, await open_session(guarded, hutch, folder), other=True)


async def test_session_rules_allow_only_what_the_host_leaves_open(guarded: Host, hutch: HutchClient) -> None:
    """The rules of `--allow` are session rules."""
    session = await open_session(guarded, hutch, guarded.folder("session"), rules=m.Rules(allow=EVERYTHING))
    await assert_guarded(hutch, session, other=True)


async def test_tool_options_of_an_agent_are_rules_of_its_session(guarded: Host, hutch: HutchClient) -> None:
    """Allowed tools allow no more than other rules do."""
    session = await open_session(guarded, hutch, guarded.folder("tools"), tools=("Bash", "Write"))
    await assert_guarded(hutch, session, other=True)

    assert session.rules.allow == ("Bash", "Write")


async def test_account_rules_allow_only_what_the_host_leaves_open(guarded: Host, hutch: HutchClient) -> None:
    """A user cannot remove the host's rules."""
    await guarded.hutch("policy", "add", "allow", *EVERYTHING)
    try:
        await assert_guarded(hutch, await open_session(guarded, hutch, guarded.folder("account")), other=True)
        not_theirs = await guarded.hutch("policy", "remove", "deny", "Bash(touch denied:*)", code=1)
    finally:
        await guarded.hutch("policy", "remove", "allow", *EVERYTHING)

    assert "You have no rule to deny 'Bash(touch denied:*)'" in not_theirs.err


async def test_always_does_not_override_an_ask_rule_of_the_host(guarded: Host, hutch: HutchClient) -> None:
    """The next such call needs a decision again."""
    session = await guarded.script(hutch, [step(bash("touch asked")), step(bash("touch asked"))])
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        asked = await log.asked()
        suggested = await guarded.hutch("approve", asked.id, "--always", code=2)
        await guarded.hutch("approve", asked.id, "--always", "--rule", "Bash(touch asked:*)")
        again = await log.asked()
        await hutch.answer_permission(deny(again))
        await log.ended(turn)

        assert "--rule" in suggested.err
        assert (asked.rule, asked.layer) == (again.rule, again.layer) == ("Bash(touch asked:*)", "host")


async def test_bypass_is_refused_if_the_host_forbids_it(guarded: Host, hutch: HutchClient) -> None:
    """The refusal holds for new sessions, for open ones, and for the mode before a plan."""
    folder = guarded.folder("bypass")
    with pytest.raises(HutchError) as refused:
        await open_session(guarded, hutch, folder, permission_mode="bypass")
    session = await open_session(guarded, hutch, folder)
    changed = await guarded.hutch("mode", session.id, "bypass", code=4)

    assert refused.value.reason is Reason.POLICY_FORBIDS
    assert "forbids the mode bypass" in changed.err
    assert (await hutch.get_session(session.id)).permission_mode == "ask"


@pytest.mark.parametrize("mode", ["accept_edits", "plan", "unattended"])
async def test_no_mode_runs_what_the_host_denies_or_asks_about(
    guarded: Host, hutch: HutchClient, mode: m.PermissionMode
) -> None:
    """The session's own rules do not matter."""
    session = await open_session(
        guarded, hutch, guarded.folder(f"mode-{mode}"), permission_mode=mode, rules=m.Rules(allow=EVERYTHING)
    )
    async with log_of(hutch, session) as log:
        await log.play(session, "go", deny)

        ran = {call for call, done in results_of(log).items() if done}
        assert ran <= {"touch other"}


async def test_an_edited_input_is_judged_by_the_host_policy(guarded: Host, hutch: HutchClient) -> None:
    """If the requested input may be allowed but its edit is denied, nothing is decided."""
    session = await guarded.script(hutch, [step(bash("touch asked"))])
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        asked = await log.asked()
        edited = m.AnswerPermission(asked.id, "allow", updated_input={"command": "true && touch denied"})
        with pytest.raises(HutchError) as refused:
            await hutch.answer_permission(edited)
        await hutch.answer_permission(allow(asked))
        await log.ended(turn)

        assert refused.value.reason is Reason.POLICY_FORBIDS
        assert [path.name for path in Path(session.cwd).iterdir()] == ["asked"]


async def test_an_agent_that_writes_the_projects_file_gains_nothing(guarded: Host, hutch: HutchClient) -> None:
    """Writing the file is asked about even if all edits are accepted, and the new file is not trusted."""
    folder = guarded.folder("rewritten")
    _write_policy(folder)
    await guarded.hutch("policy", "trust", str(folder))
    text = OPEN.replace("allow = [", 'allow = ["mcp__any__tool", ')
    write: Call = ("Write", {"file_path": ".hutch/policy.toml", "content": text})
    by_shell = bash(f"printf '%s' {shlex.quote(text)} > .hutch/policy.toml")
    lines = [step(bash("touch other")), step(write), step(by_shell), *(step(call) for call in CALLS)]
    session = await guarded.script(hutch, lines, "rewritten", permission_mode="accept_edits")
    async with log_of(hutch, session) as log:
        end = await log.play(session, "go", lambda asked: (allow if "policy" in str(asked.call) else deny)(asked))
        view = await guarded.hutch("policy", "show", "--session", session.id)

        assert end.state == "completed", end
        assert asked_of(log) == ["Write policy.toml", by_shell[1]["command"], "touch asked", "touch other"]
        assert "mcp__any__tool" in (folder / ".hutch" / "policy.toml").read_text()
        assert not (folder / "denied").exists()
        assert "Not trusted" in view.out


async def test_an_unreadable_project_file_makes_everything_ask(guarded: Host, hutch: HutchClient) -> None:
    """The file might deny anything; the request and `policy show` say why."""
    for name, content, why in (
        ("broken", b"[permissions\n", "line 1"),
        ("large", b"#" * 100_000, "larger than 65536 bytes"),
        ("latin", b"# \xff\n", "utf-8"),
    ):
        folder = guarded.folder(name)
        _write_policy(folder, content)
        session = await guarded.script(hutch, [step(bash("true"))], name, rules=m.Rules(allow=("Bash(true)",)))
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            asked = await log.asked()
            view = await guarded.hutch("policy", "show", "-C", str(folder))
            await hutch.answer_permission(deny(asked))
            await log.ended(turn)

        assert "Every call asks" in asked.why
        assert why in asked.why
        assert why in view.err
        assert "NOT in force" in view.out


async def test_the_audit_names_the_rule_of_the_host(guarded: Host, hutch: HutchClient) -> None:
    """A denial by a rule has a line like every other decision."""
    session = await guarded.script(hutch, [step(bash("touch denied"))])
    async with log_of(hutch, session) as log:
        await log.play(session, "go")

    (line,) = await audit_of(hutch, session, action="permission")
    assert (line.actor, line.outcome, line.rule) == ("rule", "denied", "Bash(touch denied:*)")
    assert line.details["layer"] == "host"


def _write_policy(folder: Path, content: bytes = OPEN.encode()) -> None:
    (folder / ".hutch").mkdir()
    (folder / ".hutch" / "policy.toml").write_bytes(content)

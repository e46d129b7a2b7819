"""The methods with which users read and change events, rules, keys and the state of hutchd."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from hutch_daemon.services.access import Access, Caller
from hutch_daemon.services.history import HistoryService
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import TurnEnded
from tests.daemon.store.examples import report, with_session
from tests.fakes.executors import FakeExecutor
from tests.fakes.stage import Stage


async def test_events_are_read_in_pages_by_cursor(stage: Stage) -> None:
    """A page follows its cursor; a cursor of another journal is refused."""
    async with stage.hutchd():
        session = await stage.open()
        await stage.ended(await stage.submit(session))

        first = await stage.services.history.read_events(stage.me, m.ReadEvents(session.id, limit=2))
        rest = await stage.services.history.read_events(stage.me, m.ReadEvents(session.id, after=2, skip=("text",)))

        assert [json.loads(bytes(event))["kind"] for event in first.events] == ["turn_started", "text"]
        assert [json.loads(bytes(event))["kind"] for event in rest.events] == ["turn_ended"]
        assert (first.more, rest.more, first.head) == (True, False, 3)
        with pytest.raises(HutchError) as refused:
            await stage.services.history.read_events(stage.me, m.ReadEvents(session.id, journal="j-other"))
        assert refused.value.reason is Reason.JOURNAL_REPLACED


async def test_a_page_of_history_is_not_empty_while_there_is_more(tmp_path: Path) -> None:
    """A client that polls and skips kinds always makes progress."""
    caller = Caller(uid=1000, gid=1000, pid=1)
    skipping = m.ReadEvents("s-aaaa", limit=2, skip=("text_delta",))
    async with Store.open(tmp_path / "hutch.db") as store:
        await with_session(store, owner=caller.uid)
        await report(store, *range(1, 8), kind="text_delta")
        await report(store, 8)

        history = HistoryService(store, Access(store))
        page = await history.read_events(caller, skipping)
        last = await history.read_events(caller, msgspec.structs.replace(skipping, after=8))

    assert [json.loads(bytes(event))["seq"] for event in page.events] == [8]
    assert (last.events, last.more) == ((), False)


@pytest.mark.parametrize("model", ["no-price", "no-price[1m]"])
async def test_a_budget_needs_the_price_of_its_model(stage: Stage, model: str) -> None:
    """A session with `max_usd` and a named model without a price is not opened; the reason says what to do."""
    options = m.AgentOptions(model=model)
    async with stage.hutchd():
        with pytest.raises(HutchError, match=r"max_usd needs .*no-price of anthropic has no price\.") as refused:
            await stage.open(agent="claude", limits=m.Limits(max_usd=1.0), options=options)

        assert refused.value.reason is Reason.INVALID_PARAMS
        assert await stage.open(limits=m.Limits(max_usd=1.0), options=options)  # an agent that needs no key


async def test_another_user_sees_and_changes_nothing(stage: Stage) -> None:
    """Lists and event streams omit the records of others; a foreign id looks missing."""
    stranger = Caller(stage.me.uid + 1, stage.me.gid, stage.me.pid, "test")

    async def ask(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        await executor.ask(m.ToolCall("c-1", "run_command", "Bash", {"command": "make"}, command="make"))
        return TurnEnded("completed", "done", "Done.")

    stage.host.play = ask
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())
        asked = await stage.pending()
        seen = [
            (await stage.services.sessions.list_sessions(stranger, m.ListSessions())).sessions,
            (await stage.services.approvals.list_permissions(stranger, m.ListPermissions())).permissions,
            (await stage.services.history.read_events(stranger, m.ReadEvents("*"))).events,
        ]
        refused = []
        for call in (
            stage.services.turns.get_turn(stranger, m.TurnRef(turn.id)),
            stage.services.history.read_events(stranger, m.ReadEvents(turn.session)),
            stage.services.turns.interrupt_turn(stranger, m.InterruptTurn(turn.session)),
            stage.services.approvals.answer_permission(stranger, m.AnswerPermission(asked.id, "allow")),
        ):
            with pytest.raises(HutchError) as raised:
                await call
            refused.append(raised.value.reason)
        await stage.answer(asked, "deny")
        await stage.ended(turn)

    assert seen == [(), (), ()]
    assert set(refused) == {Reason.NOT_FOUND}


async def test_explain_policy_predicts_the_decision(stage: Stage) -> None:
    """It names the decision, the rule and its layer, in a session or in a directory without one."""
    async with stage.hutchd():
        session = await stage.open(rules=m.Rules(deny=("Bash(rm:*)",)))

        there = await stage.services.policy.explain_policy(
            stage.me, m.ExplainPolicy("Bash", {"command": "rm -r x"}, session=session.id)
        )
        without = await stage.services.policy.explain_policy(
            stage.me, m.ExplainPolicy("Bash", {"command": "rm -r x"}, cwd="/proj")
        )

        assert (there.decision, there.rule, there.layer) == ("deny", "Bash(rm:*)", "session")
        assert without.decision == "ask"


async def test_rules_of_the_account_apply_in_its_sessions(stage: Stage) -> None:
    """An added rule is in force and shown, a removed one is not, and an invalid one changes nothing."""
    async with stage.hutchd():
        view = await stage.services.policy.change_rules(stage.me, m.ChangeRules(add=m.Rules(deny=("Bash(rm:*)",))))
        call = m.ExplainPolicy("Bash", {"command": "rm -r x"}, cwd="/proj")
        added = await stage.services.policy.explain_policy(stage.me, call)
        with pytest.raises(HutchError) as refused:
            await stage.services.policy.change_rules(stage.me, m.ChangeRules(add=m.Rules(allow=("Bash(",))))
        await stage.services.policy.change_rules(stage.me, m.ChangeRules(remove=m.Rules(deny=("Bash(rm:*)",))))
        removed = await stage.services.policy.explain_policy(stage.me, call)

        assert [layer.rules.deny for layer in view.layers] == [("Bash(rm:*)",)]
        assert (added.decision, added.layer, removed.decision) == ("deny", "account", "ask")
        assert refused.value.reason is Reason.INVALID_RULE
        page = await stage.services.history.read_audit(stage.me, m.ReadAudit(action="change_rules"))
        assert [entry.outcome for entry in page.entries] == ["added", "removed"]


async def test_policy_cases_are_judged_and_counted(stage: Stage) -> None:
    """test_policy counts right and wrong decisions; it refuses a malformed case."""
    case = {"id": "c1", "tool": "Bash", "input": {"command": "rm x"}, "want": "deny", "rules": {"deny": ["Bash(rm:*)"]}}
    async with stage.hutchd():
        report = await stage.services.policy.test_policy(stage.me, m.TestPolicy(json.dumps(case)))

        assert (report.total, report.right, report.cases[0].got) == (1, 1, "deny")
        with pytest.raises(HutchError):
            await stage.services.policy.test_policy(stage.me, m.TestPolicy("no case"))


async def test_a_stored_key_is_never_returned(stage: Stage) -> None:
    """Lists omit the secret, and the audit records both changes without it."""
    secret = "sk-" + "x" * 40
    async with stage.hutchd():
        kept = await stage.services.keys.put_api_key(stage.me, m.PutApiKey("anthropic", secret))
        explained = await stage.services.keys.explain_key(stage.me, m.ExplainKey(provider="anthropic"))
        listed = await stage.services.keys.list_api_keys(stage.me, m.Nothing())
        await stage.services.keys.delete_api_key(stage.me, m.DeleteApiKey("anthropic"))
        page = await stage.services.history.read_audit(stage.me, m.ReadAudit())

        assert [key.id for key in listed.keys] == [explained.key.id] == [kept.id]
        assert [entry.action for entry in page.entries] == ["put_api_key", "delete_api_key"]
        assert secret not in repr([kept, listed, explained, page])


async def test_secrets_of_mcp_settings_are_sealed(stage: Stage) -> None:
    """Clients do not see them, the database holds them sealed, and the executor gets them whole."""
    servers = {"tracker": {"env": {"TOKEN": "very-secret-token"}}}
    async with stage.hutchd():
        session = await stage.open(options=m.AgentOptions(mcp_servers=servers))
        await stage.ended(await stage.submit(session))

        assert session.options.mcp_servers == {"tracker": {}}
        assert stage.executor.prepared is not None
        assert stage.executor.prepared.options.mcp_servers == servers
    assert b"very-secret-token" not in (stage.folder / "hutch.db").read_bytes()


async def test_the_status_counts_what_the_caller_may_see(stage: Stage) -> None:
    """Another account's status counts none of the caller's sessions and executors."""
    async with stage.hutchd():
        await stage.ended(await stage.submit(await stage.open()))
        other = stage.me.__class__(stage.me.uid + 1, 1, 1)

        mine = await stage.services.host.get_status(stage.me, m.Nothing())
        theirs = await stage.services.host.get_status(other, m.Nothing())

        assert (mine.sessions_open, [one.state for one in mine.executors]) == (1, ["leased"])
        assert (theirs.sessions_open, theirs.executors) == (0, ())
        assert mine.store.ok


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"agent": "hal"}, Reason.AGENT_UNAVAILABLE),
        ({"cwd": "work"}, Reason.INVALID_PARAMS),
        ({"environment": "moon"}, Reason.ISOLATION_UNAVAILABLE),
    ],
)
async def test_an_impossible_session_is_refused(stage: Stage, changes: dict[str, str], reason: Reason) -> None:
    """hutchd checks agent, directory and environment before it stores anything."""
    async with stage.hutchd():
        with pytest.raises(HutchError) as refused:
            await stage.open(**changes)

        assert refused.value.reason is reason
        assert (await stage.services.sessions.list_sessions(stage.me, m.ListSessions())).sessions == ()


@pytest.mark.parametrize("cwd", ["work", "", "/proj/\0", "/" + "a" * 5000])
async def test_an_invalid_directory_is_refused(stage: Stage, cwd: str) -> None:
    """This holds for a session and for a project's rules; nothing is opened or stored."""
    async with stage.hutchd():
        for call in (
            stage.open(cwd=cwd),
            stage.services.policy.change_rules(stage.me, m.ChangeRules(add=m.Rules(allow=("Edit(**)",)), cwd=cwd)),
        ):
            with pytest.raises(HutchError) as refused:
                await call
            assert refused.value.reason is Reason.INVALID_PARAMS

        assert not (await stage.services.sessions.list_sessions(stage.me, m.ListSessions())).sessions
        assert not (await stage.services.policy.show_policy(stage.me, m.ShowPolicy())).layers


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (m.ListSessions, b'{"limit":-1}'),
        (m.ListTurns, b'{"session":"s","limit":9223372036854775808}'),
        (m.ReadEvents, b'{"session":"s","after":9223372036854775808}'),
        (m.FollowEvents, b'{"session":"s","after":-2}'),
        (m.ReadAudit, b'{"after":9223372036854775808}'),
        (m.SubmitPrompt, b'{"session":"s","prompt":"p","timeout":-5}'),
        (m.Limits, b'{"turn_timeout":0}'),
        (m.OpenSession, b'{"agent":"a","cwd":"/","name":"%b"}' % (b"n" * 201)),
    ],
)
def test_numbers_and_names_have_bounds(kind: type[msgspec.Struct], text: bytes) -> None:
    """A number that no store or clock can hold is refused when it is read."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=kind)


async def test_a_key_for_an_unknown_provider_is_refused(stage: Stage) -> None:
    """The error names the nearest known provider and says how to define another."""
    async with stage.hutchd():
        with pytest.raises(HutchError) as refused:
            await stage.services.keys.put_api_key(stage.me, m.PutApiKey("antropic", "sk-" + "x" * 40))
        listed = await stage.services.keys.list_api_keys(stage.me, m.Nothing())

        assert refused.value.reason is Reason.INVALID_PARAMS
        assert "did you mean anthropic? Known here: anthropic, bedrock, gemini" in refused.value.message
        assert "[providers.antropic] with base_url and dialect" in refused.value.message
        assert listed.keys == ()

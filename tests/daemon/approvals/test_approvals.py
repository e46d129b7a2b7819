"""Dialogues about permission requests: an executor asks, and the policy or a user decides."""

from __future__ import annotations

import hashlib
from typing import Any

import anyio
import msgspec
import pytest

from hutch_daemon.settings import PermissionSettings
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import PermissionSettled, TurnEnded
from hutch_shared.rpc.envelope import text_fault
from hutch_shared.vocabulary import to_call
from tests.fakes.executors import FakeExecutor, never_end
from tests.fakes.stage import FakeClock, Stage, settings, until


def command(line: str, call_id: str = "c-1") -> m.ToolCall:
    """Return a Bash call."""
    return m.ToolCall(call_id, "run_command", "Bash", {"command": line}, command=line)


class Asks:
    """A play that requests permission for several calls at once and keeps the decisions."""

    def __init__(self, *calls: m.ToolCall, go_on: bool = False, **changes: Any) -> None:
        self.calls, self.changes, self.go_on = calls, changes, go_on
        self.decided: dict[str, m.PermissionDecision] = {}

    async def __call__(self, executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        async def one(call: m.ToolCall) -> None:
            self.decided[call.call_id] = await executor.ask(call, **self.changes)

        async with anyio.create_task_group() as tasks:
            for call in self.calls:
                tasks.start_soon(one, call)
        if self.go_on:
            await anyio.sleep_forever()
        return TurnEnded("completed", "done", "Done.")


async def test_a_rule_decides_without_a_request(stage: Stage) -> None:
    """A call that the policy allows or denies is decided at once, and recorded in the audit with its rule."""
    asks = stage.host.play = Asks(command("git status"), command("rm x", "c-2"))
    async with stage.hutchd():
        session = await stage.open(rules=m.Rules(allow=("Bash(git status:*)",), deny=("Bash(rm:*)",)))

        await stage.ended(await stage.submit(session))
        page = await stage.services.history.read_audit(stage.me, m.ReadAudit(action="permission"))

        assert [asks.decided[key].decision for key in ("c-1", "c-2")] == ["allow", "deny"]
        assert {(entry.outcome, entry.rule) for entry in page.entries} == {
            ("allowed", "Bash(git status:*)"),
            ("denied", "Bash(rm:*)"),
        }
        assert "permission_asked" not in await stage.kinds(session)


async def test_a_request_is_allowed(stage: Stage) -> None:
    """The decision reaches the waiting call with the judged input and its digest; events and audit record it."""
    asks = stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        asked = await stage.pending()
        waiting = await stage.turn(turn)

        settled = await stage.answer(asked, "allow")
        await stage.ended(turn)

        decision = asks.decided["c-1"]
        assert waiting.awaiting_permission
        assert (settled.state, decision.decision, decision.input) == ("allowed", "allow", {"command": "make"})
        assert decision.digest == input_digest("Bash", {"command": "make"})
        assert [kind for kind in await stage.kinds(session) if kind.startswith("permission")] == [
            "permission_asked",
            "permission_settled",
        ]
        page = await stage.services.history.read_audit(stage.me, m.ReadAudit(action="permission"))
        assert [(entry.outcome, entry.actor) for entry in page.entries] == [("allowed", str(stage.me))]


async def test_a_request_is_denied_with_a_message(stage: Stage) -> None:
    """The agent gets the message, and the turn continues."""
    asks = stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())

        await stage.answer(await stage.pending(), "deny", message="Use ninja.")
        ended = await stage.ended(turn)

        assert (asks.decided["c-1"].decision, asks.decided["c-1"].message) == ("deny", "Use ninja.")
        assert ended.state == "completed"


async def test_deny_and_interrupt_stops_the_turn(stage: Stage) -> None:
    """A denial that interrupts ends the turn as stopped."""
    asks = stage.host.play = Asks(command("make"), go_on=True)
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())

        await stage.answer(await stage.pending(), "deny", interrupt=True)
        ended = await stage.ended(turn)

        assert (ended.state, asks.decided["c-1"].interrupt) == ("stopped", True)
        assert "interrupt_turn" in [name for name, _ in stage.executor.calls]


async def test_the_first_decision_stands_and_the_second_is_refused(stage: Stage) -> None:
    """A late decision gets already_settled with the request as it stands."""
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        await stage.submit(await stage.open())
        asked = await stage.pending()
        outcomes: list[str] = []

        async def answer(decision: m.Decision) -> None:
            try:
                outcomes.append((await stage.answer(asked, decision)).state)
            except HutchError as error:
                outcomes.append(f"{error.reason.word} {error.details['permission']['state']}")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer, "allow")
            tasks.start_soon(answer, "deny")

        won = next(outcome for outcome in outcomes if " " not in outcome)
        assert sorted(outcomes) == sorted([won, f"already_settled {won}"])
        page = await stage.services.history.read_audit(stage.me, m.ReadAudit(action="permission"))
        assert len(page.entries) == 1


async def test_parallel_requests_are_decided_in_any_order(stage: Stage) -> None:
    """Each call gets its own decision."""
    asks = stage.host.play = Asks(*(command(f"make {number}", f"c-{number}") for number in range(4)))
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())
        found: dict[str, m.Permission] = {}
        while len(found) < 4:
            await stage.pending()
            page = await stage.services.approvals.list_permissions(stage.me, m.ListPermissions())
            found = {one.call.call_id: one for one in page.permissions}

        for key in ("c-2", "c-0", "c-3", "c-1"):
            await stage.answer(found[key], "allow" if key in ("c-2", "c-1") else "deny")
        await stage.ended(turn)

        assert {key: one.decision for key, one in asks.decided.items()} == {
            "c-0": "deny",
            "c-1": "allow",
            "c-2": "allow",
            "c-3": "deny",
        }


async def test_an_edited_input_replaces_the_requested_one(stage: Stage) -> None:
    """The decision carries the edited input and its own digest; an input that a rule denies is not accepted."""
    asks = stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        turn = await stage.submit(await stage.open(rules=m.Rules(deny=("Bash(rm:*)",))))
        asked = await stage.pending()

        with pytest.raises(HutchError) as refused:
            await stage.answer(asked, "allow", updated_input={"command": "rm -rf build"})
        await stage.answer(asked, "allow", updated_input={"command": "make -n"})
        await stage.ended(turn)

        decision = asks.decided["c-1"]
        assert refused.value.reason is Reason.POLICY_FORBIDS
        assert decision.input == {"command": "make -n"}
        assert decision.digest == input_digest("Bash", {"command": "make -n"})


@pytest.mark.parametrize(
    ("tool", "given", "harmless", "bad", "rule"),
    [
        ("LS", {"path": "/etc"}, {"path": "/usr"}, {"path": "/secret"}, "LS(//secret/**)"),
        ("Grep", {"pattern": "a", "path": "/etc"}, {"pattern": "/"}, {"path": "/secret"}, "Grep(//secret/**)"),
        ("Glob", {"pattern": "/etc/*"}, {"pattern": "*"}, {"pattern": "/secret/*"}, "Read(//secret/**)"),
        ("Write", {"file_path": "/w/a"}, {"file_path": "/w/b"}, {"file_path": "/secret/a"}, "Edit(//secret/**)"),
        ("MultiEdit", {"file_path": "/w/a"}, {"file_path": "/w/b"}, {"file_path": "/secret/a"}, "Edit(//secret/**)"),
        (
            "NotebookEdit",
            {"notebook_path": "a"},
            {"notebook_path": "b"},
            {"notebook_path": "/secret/a"},
            "Edit(//secret/**)",
        ),
        ("WebFetch", {"url": "https://a.b"}, {"url": "https://c.d"}, {"url": "http://e.f"}, "WebFetch(domain:e.f)"),
        ("WebSearch", {"query": "a"}, {"query": "b"}, None, "WebFetch"),
        ("Task", {"prompt": "a"}, {"prompt": "b"}, None, "Bash"),
    ],
)
async def test_an_edited_input_is_judged_by_the_rules(
    stage: Stage, tool: str, given: dict[str, Any], harmless: dict[str, Any], bad: dict[str, Any] | None, rule: str
) -> None:
    """A deny rule holds for the user's edit as for the agent's input; other edits may run."""
    calls = [to_call(tool, one, f"c-{n}", "/w") for n, one in enumerate((given, bad)) if one is not None]
    asks = stage.host.play = Asks(*calls, cwd="/w")
    async with stage.hutchd():
        turn = await stage.submit(await stage.open(rules=m.Rules(deny=(rule,))))
        asked = await stage.pending()

        if bad is not None:
            with pytest.raises(HutchError) as refused:
                await stage.answer(asked, "allow", updated_input=bad)
            assert refused.value.reason is Reason.POLICY_FORBIDS
            assert refused.value.details["rule"] == rule
        await stage.answer(asked, "allow", updated_input=harmless)
        await stage.ended(turn)

        assert asks.decided["c-0"].input == harmless
        assert bad is None or asks.decided["c-1"].decision == "deny"


async def test_a_question_with_choices_is_answered(stage: Stage) -> None:
    """A question can be answered or denied, but not allowed, whatever the rules say."""
    call = m.ToolCall("c-1", "question", "AskUserQuestion", {"questions": []})
    asks = stage.host.play = Asks(call, kind="question", questions=(m.Question("Which?", choices=(m.Choice("a"),)),))
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())
        asked = await stage.pending()

        with pytest.raises(HutchError) as refused:
            await stage.answer(asked, "allow")
        await stage.answer(asked, "answer", answers={"Which?": "a"})
        await stage.ended(turn)

        assert refused.value.reason is Reason.INVALID_PARAMS
        assert (asks.decided["c-1"].decision, asks.decided["c-1"].answers) == ("answer", {"Which?": "a"})


async def test_always_adds_a_rule_for_the_project_and_session_for_the_session(stage: Stage) -> None:
    """The next such call is allowed without a request: in that directory, or in that session alone."""
    asks = stage.host.play = Asks(command("git fetch origin"))
    async with stage.hutchd():
        here = await stage.open(name="here")
        turn = await stage.submit(here)
        await stage.answer(await stage.pending(), "allow", scope="always", rule="Bash(git fetch:*)")
        await stage.ended(turn)
        asks.decided.clear()

        await stage.ended(await stage.submit(await stage.open(name="same-folder")))
        elsewhere = await stage.open(name="elsewhere", cwd="/other")
        turn = await stage.submit(elsewhere)
        asked = await stage.pending()
        await stage.answer(asked, "allow", scope="session", rule="Bash(git fetch:*)")
        await stage.ended(turn)
        await stage.ended(await stage.submit(elsewhere))
        await stage.submit(await stage.open(name="third", cwd="/other"))

        assert asks.decided["c-1"].decision == "allow"
        assert asked.session == elsewhere.id
        assert (await stage.pending()).session != elsewhere.id


async def test_a_rule_that_cannot_be_read_is_refused(stage: Stage) -> None:
    """A decision with an invalid rule decides nothing."""
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        await stage.submit(await stage.open())
        asked = await stage.pending()

        with pytest.raises(HutchError) as refused:
            await stage.answer(asked, "allow", scope="always", rule="Bash(")

        assert refused.value.reason is Reason.INVALID_RULE
        assert (await stage.pending()).id == asked.id


async def test_an_undecided_request_expires(stage: Stage) -> None:
    """At its deadline the call is denied, the turn continues, and a late decision is refused."""
    clock = stage.clock = FakeClock()
    asks = stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        asked = await stage.pending()
        await stage.services.approvals.approvals.settle_due()
        early = await stage.services.approvals.list_permissions(stage.me, m.ListPermissions())

        clock.now += stage.settings.permissions.expiry
        await stage.services.approvals.approvals.settle_due()
        ended = await stage.ended(turn)

        assert len(early.permissions) == 1
        assert (asks.decided["c-1"].decision, asks.decided["c-1"].state) == ("deny", "expired")
        assert ended.state == "completed"
        with pytest.raises(HutchError) as late:
            await stage.answer(asked, "allow")
        assert late.value.details["permission"]["state"] == "expired"


async def test_with_nobody_there_deny_applies_at_once(stage: Stage) -> None:
    """A session with `deny` does not wait for an absent user."""
    asks = stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        session = await stage.open(when_nobody="deny")

        ended = await stage.ended(await stage.submit(session))
        told = [event for event in await stage.events(session) if event.kind == "permission_settled"]

        assert (ended.state, asks.decided["c-1"].decision) == ("completed", "deny")
        assert [msgspec.json.decode(event.data, type=PermissionSettled).by for event in told] == ["nobody"]


async def test_with_somebody_there_it_waits_until_they_go(stage: Stage) -> None:
    """A follower that can decide counts as present; when the last one leaves, the session's `when_nobody` applies."""
    asks = stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        session = await stage.open(when_nobody="deny")
        async with stage.fanout.follow(session.id, answers=True):
            turn = await stage.submit(session)
            asked = await stage.pending()

        ended = await stage.ended(turn)

        assert asked.state == "pending"
        assert (ended.state, asks.decided["c-1"].decision) == ("completed", "deny")


async def test_with_nobody_there_stop_stops_the_turn(stage: Stage) -> None:
    """A session with `stop` denies the call and stops the turn."""
    stage.host.play = Asks(command("make"), go_on=True)
    async with stage.hutchd():
        ended = await stage.ended(await stage.submit(await stage.open(when_nobody="stop")))

        assert (ended.state, ended.reason) == ("stopped", "interrupted")


async def test_a_notified_user_counts_as_present(stage: Stage) -> None:
    """After a successful notify command, which the executor runs, the request waits."""
    stage.settings = settings(permissions=PermissionSettings(notify=("tell",), return_grace=0.001))
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        turn = await stage.submit(await stage.open(when_nobody="deny"))
        asked = await stage.pending()
        await stage.answer(asked, "allow")

        assert (await stage.ended(turn)).state == "completed"
        assert "run_notify" in [name for name, _ in stage.executor.calls]


async def test_requests_of_a_dead_executor_are_withdrawn(stage: Stage) -> None:
    """A call that can no longer run cannot be allowed."""
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        asked = await stage.pending()

        stage.executor.die()
        await stage.ended(turn)

        with pytest.raises(HutchError) as late:
            await stage.answer(asked, "allow")
        assert late.value.details["permission"]["state"] == "withdrawn"
        assert "permission_settled" in await stage.kinds(session)


async def test_after_an_interrupt_nothing_more_is_allowed(stage: Stage) -> None:
    """Requests of a turn that is being stopped are withdrawn, and new ones are denied."""
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        session = await stage.open(rules=m.Rules(allow=("Bash(ls:*)",)))
        turn = await stage.submit(session)
        asked = await stage.pending()

        await stage.services.turns.interrupt_turn(stage.me, m.InterruptTurn(session.id))
        late = await stage.executor.ask(command("ls"), turn=turn.id)

        assert late.decision == "deny"
        with pytest.raises(HutchError):
            await stage.answer(asked, "allow")


async def test_the_mode_can_change_during_a_turn(stage: Stage) -> None:
    """Calls that wait and the next ones are judged by the new mode; the change is an event and reaches the executor."""
    asks = stage.host.play = Asks(command("make"), go_on=True)
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        await stage.pending()

        await stage.services.modes.set_permission_mode(stage.me, m.SetPermissionMode(session.id, "bypass"))
        decision = await stage.executor.ask(command("make again", "c-2"), turn=turn.id)
        await until(lambda: bool(asks.decided))

        assert (asks.decided["c-1"].decision, decision.decision) == ("allow", "allow")
        assert "set_permission_mode" in [name for name, _ in stage.executor.calls]
        assert "notice" in await stage.kinds(session)


async def test_the_host_can_forbid_bypass_for_sessions(stage: Stage) -> None:
    """Then no session can be opened with this mode or changed to it."""
    (stage.folder / "policy.toml").write_text("[permissions]\nforbid_bypass = true\n")
    async with stage.hutchd():
        session = await stage.open()
        reasons = []
        for attempt in (
            stage.open(permission_mode="bypass"),
            stage.services.modes.set_permission_mode(stage.me, m.SetPermissionMode(session.id, "bypass")),
        ):
            with pytest.raises(HutchError) as refused:
                await attempt
            reasons.append(refused.value.reason)

        assert reasons == [Reason.POLICY_FORBIDS, Reason.POLICY_FORBIDS]


async def test_a_projects_file_only_tightens_until_it_is_trusted(stage: Stage) -> None:
    """A call that an untrusted file allows is asked about; once the user trusts the file's digest, it is allowed."""
    text = '[permissions]\nallow = ["Bash(git fetch:*)"]\n'
    digest = hashlib.sha256(text.encode()).hexdigest()
    asks = stage.host.play = Asks(
        command("git fetch origin"), project=m.ProjectFile("/proj/.hutch/policy.toml", digest, text)
    )
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        await stage.answer(await stage.pending(), "deny")
        await stage.ended(turn)

        await stage.services.policy.trust_policy(stage.me, m.TrustPolicy("/proj/.hutch/policy.toml", digest))
        await stage.ended(await stage.submit(session))

        assert asks.decided["c-1"].decision == "allow"
        view = await stage.services.policy.show_policy(stage.me, m.ShowPolicy(session.id))
        assert [(layer.name, layer.in_force) for layer in view.layers] == [("project", True), ("session", True)]


@pytest.mark.parametrize("cwd", ["/proj", "/elsewhere"])
async def test_trust_covers_one_text_at_one_path(stage: Stage, cwd: str) -> None:
    """Another text is not trusted, nor is the trusted file in another project's session."""
    trusted, other = "[permissions]\n", '[permissions]\nallow = ["Bash(git fetch:*)"]\n'
    text = other if cwd == "/proj" else trusted + other.removeprefix(trusted)
    claimed = trusted if cwd == "/proj" else text
    path, digest = "/proj/.hutch/policy.toml", hashlib.sha256(claimed.encode()).hexdigest()
    stage.host.play = Asks(command("git fetch origin"), project=m.ProjectFile(path, digest, text))
    async with stage.hutchd():
        await stage.services.policy.trust_policy(stage.me, m.TrustPolicy(path, digest))

        await stage.submit(await stage.open(cwd=cwd))

        assert (await stage.pending()).call.command == "git fetch origin"


class _AskTwice:
    """A play that sends one request, and repeats its id with other calls."""

    def __init__(self, *others: dict[str, Any]) -> None:
        self.others = others
        self.refused: list[str] = []

    async def __call__(self, executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        await executor.ask(command("make"), ask="ask-1")
        for other in self.others:
            try:
                again: dict[str, Any] = {"call": command("make"), "ask": "ask-1"} | other
                await executor.ask(**again)
            except HutchError as error:
                self.refused.append(error.reason.word)
        return TurnEnded("completed", "done", "Done.")


async def test_a_decision_covers_only_the_requested_input(stage: Stage) -> None:
    """A repeated request with another input or kind does not get the decision."""
    asks = stage.host.play = _AskTwice({"call": command("rm -r /proj")}, {"kind": "plan"})
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())

        await stage.answer(await stage.pending(), "allow")
        await stage.ended(turn)

        assert asks.refused == ["conflict", "conflict"]


async def test_an_agent_that_does_not_stop_is_allowed_nothing(stage: Stage) -> None:
    """While its turn stops, a call that a rule allows is denied, and no other call becomes a request."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open(rules=m.Rules(allow=("Bash(ls:*)",)))
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        executor.stubborn = True
        stage.host.tasks.start_soon(stage.services.turns.interrupt_turn, stage.me, m.InterruptTurn(session.id))
        await until(lambda: "interrupt_turn" in [name for name, _ in executor.calls])

        decided = [await executor.ask(command(line), turn=turn.id) for line in ("ls", "make")]

        assert (await stage.turn(turn)).state == "stopping"
        assert [(one.decision, one.state, one.interrupt) for one in decided] == [("deny", "withdrawn", True)] * 2


class _SlowPaths:
    """A play that requests an edit whose paths resolve slowly, and requests again after its turn is over."""

    def __init__(self) -> None:
        self.resolves = anyio.Event()
        self.decided: list[m.PermissionDecision] = []
        self.answered = anyio.Event()

    async def __call__(self, executor: FakeExecutor, prompt: m.ExecutePrompt) -> None:
        executor.host.tasks.start_soon(self._ask, executor, prompt.turn)
        await anyio.sleep_forever()

    async def _ask(self, executor: FakeExecutor, turn: str) -> None:
        call = m.ToolCall("c-1", "edit", "Edit", {"file_path": "/proj/a"}, paths=("/proj/a",))
        self.decided.append(await executor.ask(call, turn=turn))
        self.answered.set()


@pytest.mark.parametrize("allow", [(), ("Edit(**)",)])
async def test_nothing_is_allowed_or_asked_after_an_interrupt(stage: Stage, allow: tuple[str, ...]) -> None:
    """A call that is being judged when its turn stops is denied, whatever the rules allow."""
    play = stage.host.play = _SlowPaths()
    stage.host.slow_paths = anyio.Event()
    async with stage.hutchd():
        session = await stage.open(rules=m.Rules(allow=allow))
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        await until(lambda: "resolve_paths" in [name for name, _ in executor.calls])

        await stage.services.turns.interrupt_turn(stage.me, m.InterruptTurn(session.id))
        stage.host.slow_paths.set()
        await play.answered.wait()

        assert [(one.decision, one.state, one.interrupt) for one in play.decided] == [("deny", "withdrawn", True)]
        assert not (await stage.services.approvals.list_permissions(stage.me, m.ListPermissions())).permissions


async def test_a_new_mode_applies_to_a_call_that_is_being_judged(stage: Stage) -> None:
    """A mode set while the account resolves paths is in force when the call is judged."""
    play = stage.host.play = _SlowPaths()
    stage.host.slow_paths = anyio.Event()
    async with stage.hutchd():
        session = await stage.open(permission_mode="bypass")
        executor = await stage.running(await stage.submit(session))
        await until(lambda: "resolve_paths" in [name for name, _ in executor.calls])

        await stage.services.modes.set_permission_mode(stage.me, m.SetPermissionMode(session.id, "ask"))
        stage.host.slow_paths.set()

        assert (await stage.pending()).call.action == "edit"
        assert not play.decided


async def test_only_a_denial_stops_the_turn(stage: Stage) -> None:
    """A decision that allows and interrupts is refused, and nothing is decided."""
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        await stage.submit(await stage.open())
        asked = await stage.pending()

        with pytest.raises(HutchError) as refused:
            await stage.answer(asked, "allow", interrupt=True)

        assert refused.value.reason is Reason.INVALID_PARAMS
        assert (await stage.pending()).state == "pending"


@pytest.mark.parametrize(("depth", "shown"), [(57, True), (58, False)])
async def test_a_request_too_deep_for_clients_is_refused(stage: Stage, depth: int, shown: bool) -> None:
    """A request that no client can read would hide all others from the user."""
    deep: dict[str, Any] = {}
    for _ in range(depth - 1):
        deep = {"in": deep}
    asks = stage.host.play = _AskDeep(m.ToolCall("c-1", "other", "Frob", deep))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        if shown:
            await stage.answer(await stage.pending(), "deny")
        await stage.ended(turn)

        page = await stage.services.history.read_events(stage.me, m.ReadEvents(session.id))
        frame = b'{"result":%b}' % msgspec.json.encode(page)
        assert text_fault(frame) is None
        assert asks.refused is not shown


class _AskDeep:
    """A play that sends one request and notes whether it was accepted."""

    def __init__(self, call: m.ToolCall) -> None:
        self.call = call
        self.refused = False

    async def __call__(self, executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        try:
            await executor.ask(self.call)
        except HutchError:
            self.refused = True
        return TurnEnded("completed", "done", "Done.")

"""The executor's life with a hutchd that stops and returns: sessions, turns, interrupts, the end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
from msgspec.structs import replace

from hutch_executor.account.setup import Setup
from hutch_executor.events.spool_files import read_spool
from hutch_executor.methods import HANDLERS
from hutch_executor.runners.port import AgentRunner, DaemonPort
from hutch_executor.runners.script import ScriptRunner
from hutch_executor.worker import MOVES, Worker
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Text, TurnEnded
from tests.executor.fake_hutchd import SESSION, WAIT, FakeHutchd, boot, decision, prepare, prompt


class FakeRunner:
    """A runner that does what the test prescribes."""

    agent: ClassVar[str] = "script"
    abilities: ClassVar[tuple[str, ...]] = ("clear",)
    open_error: Exception | None = None
    run_error: Exception | None = None
    ignores_interrupt = False
    ends_when_closed = False

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.modes: list[m.PermissionMode] = []
        self.interrupts = 0
        self.is_closed = False
        self.started = anyio.Event()
        self.go = anyio.Event()
        self.daemon: DaemonPort | None = None
        self.setup = Setup()

    @classmethod
    def preload(cls) -> None:
        """Need nothing."""

    async def open(self, session: m.PrepareSession, daemon: DaemonPort) -> m.Prepared:
        if self.open_error is not None:
            raise self.open_error
        self.daemon = daemon
        return m.Prepared(agent_session="mine", keys="none")

    async def run(self, prompt: m.ExecutePrompt) -> TurnEnded:
        self.runs.append(prompt.turn)
        self.started.set()
        if self.run_error is not None:
            raise self.run_error
        await self.go.wait()
        if self.interrupts:
            return TurnEnded("failed", "cut", "It was cut short.")
        return TurnEnded("completed", "completed", "Done.")

    async def interrupt(self) -> None:
        if self.ignores_interrupt:
            raise RuntimeError("it does not listen")
        self.interrupts += 1
        self.go.set()

    async def set_mode(self, mode: m.PermissionMode) -> None:
        self.modes.append(mode)

    async def close(self) -> None:
        self.is_closed = True
        if self.ends_when_closed:
            self.go.set()


def lines(*steps: dict[str, Any]) -> str:
    """Return a prompt that is a script."""
    return "\n".join(map(json.dumps, steps))


@pytest.fixture
def hutchd(tmp_path: Path) -> FakeHutchd:
    return FakeHutchd(tmp_path / "executor.sock")


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


@asynccontextmanager
async def serving(hutchd: FakeHutchd, runner: AgentRunner) -> AsyncIterator[Worker]:
    """Run a worker while the body runs; then it must end in order."""
    worker = Worker(boot(hutchd.path), runner)
    async with anyio.create_task_group() as group:
        group.start_soon(worker.serve, HANDLERS)
        yield worker
        worker.leave("the test is over")
        with anyio.fail_after(WAIT):
            await left(worker)


async def left(worker: Worker) -> None:
    """Return when the worker has closed its connection."""
    while worker.state != "closing" or worker.link.is_up:
        await anyio.sleep(0.01)


async def test_a_prompt_runs_to_its_end(hutchd: FakeHutchd, cwd: Path) -> None:
    """The agent's events lie between `turn_started` and `turn_ended`."""
    async with hutchd.up(), serving(hutchd, ScriptRunner()):
        prepared = await hutchd.call("prepare_session", prepare(cwd))
        accepted = await hutchd.call("execute_prompt", prompt(lines({"text": "hello"})))
        ended = await hutchd.ended()

    assert prepared == m.Prepared(agent_session=f"script-{SESSION}", keys="none", cwd=str(cwd.resolve()))
    assert accepted.accepted
    assert [event.kind for event in hutchd.events] == ["turn_started", "text", "turn_ended"]
    assert {event.turn for event in hutchd.events} == {"t-1"}
    assert hutchd.of_kind("turn_started") == [{"prompt": '{"text": "hello"}', "number": 1}]
    assert (ended["state"], ended["result"]) == ("completed", "hello")


async def test_a_session_is_prepared_once(hutchd: FakeHutchd, cwd: Path) -> None:
    """The same request again gets the same answer; another session is refused."""
    async with hutchd.up(), serving(hutchd, FakeRunner()):
        first = await hutchd.call("prepare_session", prepare(cwd))
        again = await hutchd.call("prepare_session", prepare(cwd))
        with pytest.raises(HutchError) as refused:
            await hutchd.call("prepare_session", prepare(cwd, session="s-2"))

    assert first == again
    assert refused.value.reason is Reason.WRONG_STATE


async def test_a_turn_sent_twice_runs_once(hutchd: FakeHutchd, cwd: Path) -> None:
    """`execute_prompt` is idempotent by turn id, while the turn runs and after it ended."""
    runner = FakeRunner()
    async with hutchd.up(), serving(hutchd, runner):
        await hutchd.call("prepare_session", prepare(cwd))
        answers = [await hutchd.call("execute_prompt", prompt("a")) for _ in range(2)]
        runner.go.set()
        await hutchd.ended()
        answers.append(await hutchd.call("execute_prompt", prompt("a")))

    assert all(answer.accepted for answer in answers)
    assert runner.runs == ["t-1"]
    assert len(hutchd.of_kind("turn_ended")) == 1


async def test_a_second_turn_is_refused_while_one_runs(hutchd: FakeHutchd, cwd: Path) -> None:
    """Turns of a session run one at a time, and a refused one may be sent again."""
    runner = FakeRunner()
    async with hutchd.up(), serving(hutchd, runner):
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt("a"))
        refused = await hutchd.call("execute_prompt", prompt("b", turn="t-2"))
        runner.go.set()
        await hutchd.ended()
        accepted = await hutchd.call("execute_prompt", prompt("b", turn="t-2"))
        await hutchd.ended("t-2")

    assert (refused.accepted, refused.reason) == (False, "running")
    assert accepted.accepted


async def test_a_prompt_before_the_session_is_refused(hutchd: FakeHutchd) -> None:
    """Without a session no agent exists."""
    async with hutchd.up(), serving(hutchd, FakeRunner()):
        with pytest.raises(HutchError) as refused:
            await hutchd.call("execute_prompt", prompt("a"))

    assert refused.value.reason is Reason.WRONG_STATE


async def test_an_interrupt_stops_the_turn(hutchd: FakeHutchd, cwd: Path) -> None:
    """The turn ends as stopped, whatever the runner reports, and the next one runs."""
    runner = FakeRunner()
    async with hutchd.up(), serving(hutchd, runner):
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt("a"))
        await runner.started.wait()
        answer = await hutchd.call("interrupt_turn", m.InterruptExecutor("t-1"))
        ended = await hutchd.ended()
        again = await hutchd.call("interrupt_turn", m.InterruptExecutor("t-1"))
        accepted = await hutchd.call("execute_prompt", prompt("b", turn="t-2"))

    assert answer.was_running
    assert not again.was_running
    assert (ended["state"], ended["reason"]) == ("stopped", "interrupted")
    assert accepted.accepted


async def test_nothing_may_start_after_an_interrupt(hutchd: FakeHutchd, cwd: Path) -> None:
    """A waiting request and a later one are denied without asking the user."""
    is_stopped = anyio.Event()

    async def too_late(request: m.RequestPermission) -> m.PermissionDecision:
        await is_stopped.wait()
        return decision(request.call, "allow")

    hutchd.answer = too_late
    call = {"tool": "Bash", "input": {"command": "touch started"}, "run": True}
    async with hutchd.up(), serving(hutchd, ScriptRunner()):
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt(lines(call, call)))
        await hutchd.until(lambda: hutchd.asked)
        await hutchd.call("interrupt_turn", m.InterruptExecutor("t-1"))
        is_stopped.set()
        ended = await hutchd.ended()

    assert ended["state"] == "stopped"
    assert len(hutchd.asked) == 1
    assert not (cwd / "started").exists()


async def test_a_turn_that_takes_too_long_is_timed_out(hutchd: FakeHutchd, cwd: Path) -> None:
    """The turn is stopped at its time limit and reports the reason."""
    async with hutchd.up(), serving(hutchd, FakeRunner()):
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt("a", timeout=0.0))
        ended = await hutchd.ended()

    assert (ended["state"], ended["reason"]) == ("timed_out", "turn_timeout")


@pytest.mark.parametrize("ends_when_closed", [False, True])
async def test_a_runner_that_does_not_stop_is_closed_and_the_executor_ends(
    hutchd: FakeHutchd, cwd: Path, ends_when_closed: bool
) -> None:
    """After the reply to an interrupt nothing starts: an agent that does not react is killed."""
    runner = FakeRunner()
    runner.ignores_interrupt = True
    runner.ends_when_closed = ends_when_closed
    async with hutchd.up(), serving(hutchd, runner) as worker:
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt("a"))
        await runner.started.wait()
        answer = await hutchd.call("interrupt_turn", m.InterruptExecutor("t-1"))
        assert runner.is_closed
        ended = await hutchd.ended()
        with anyio.fail_after(WAIT):
            await left(worker)

    assert answer.was_running
    assert ended["state"] == ("completed" if ends_when_closed else "stopped")


async def test_a_turn_goes_on_while_hutchd_is_away(hutchd: FakeHutchd, cwd: Path) -> None:
    """Events of an outage arrive after the reconnect, each once and in order, with one `turn_ended`."""
    again: dict[str, Any] = {"repeat": {"times": 50, "line": {"delta": "x"}}}
    script = lines({"delta": "before"}, {"wait_file": "go"}, again, {"text": "z"})
    async with serving(hutchd, ScriptRunner()) as worker:
        async with hutchd.up():
            await hutchd.call("prepare_session", prepare(cwd))
            await hutchd.call("execute_prompt", prompt(script))
            await hutchd.until(lambda: hutchd.of_kind("text_delta"))
        (cwd / "go").touch()
        with anyio.fail_after(WAIT):
            await worker.reporter.wait_safe()
        async with hutchd.up():
            await hutchd.ended()
            await hutchd.until(lambda: worker.reporter.outbox.unacked == 0)
            worker.leave("the test is over")
            with anyio.fail_after(WAIT):
                await left(worker)

    assert [event.n for event in hutchd.events] == list(range(1, 55))
    assert [event.kind for event in hutchd.events][-2:] == ["text", "turn_ended"]
    assert hutchd.hellos[1].session == SESSION
    assert hutchd.hellos[1].turn == "t-1"


async def test_lost_acknowledgements_duplicate_no_event(hutchd: FakeHutchd, cwd: Path) -> None:
    """Events that hutchd reports as stored in `hello` are not sent again."""
    hutchd.acknowledges = False
    async with hutchd.up(), serving(hutchd, ScriptRunner()) as worker:
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt(lines({"text": "a"})))
        await hutchd.ended()
        assert worker.reporter.outbox.unacked == 3
        await hutchd.cut()
        await hutchd.until(lambda: len(hutchd.hellos) == 2)
        await hutchd.until(lambda: worker.reporter.outbox.unacked == 0)

    assert (hutchd.hellos[1].turn, hutchd.hellos[1].last_n) == ("t-1", 3)
    assert len(hutchd.events) == 3


async def test_a_permission_request_is_sent_again_after_a_reconnect(hutchd: FakeHutchd, cwd: Path) -> None:
    """The request carries the same ask id, and the decision reaches the waiting call."""

    async def answer(request: m.RequestPermission) -> m.PermissionDecision:
        if len(hutchd.asked) == 1:
            await anyio.sleep_forever()
        return decision(request.call, "allow", input={"command": "echo edited"})

    hutchd.answer = answer
    steps = {"tool": "Bash", "input": {"command": "echo asked"}, "run": True}
    async with serving(hutchd, ScriptRunner()) as worker:
        async with hutchd.up():
            await hutchd.call("prepare_session", prepare(cwd))
            await hutchd.call("execute_prompt", prompt(lines(steps)))
            await hutchd.until(lambda: hutchd.asked)
        async with hutchd.up():
            ended = await hutchd.ended()
            worker.leave("the test is over")
            with anyio.fail_after(WAIT):
                await left(worker)

    assert ended["state"] == "completed"
    assert len({request.ask for request in hutchd.asked}) == 1
    assert len(hutchd.asked) == 2
    assert hutchd.of_kind("tool_result")[0]["text"] == "edited\n"


async def test_the_tool_call_is_reported_before_its_permission_request(hutchd: FakeHutchd, cwd: Path) -> None:
    """The user sees the call before the request."""
    seen: list[int] = []

    async def answer(request: m.RequestPermission) -> m.PermissionDecision:
        seen.append(len(hutchd.of_kind("tool_call")))
        return decision(request.call, "deny", message="no")

    hutchd.answer = answer
    (cwd / ".hutch").mkdir()
    (cwd / ".hutch" / "policy.toml").write_text("[permissions]\n")
    async with hutchd.up(), serving(hutchd, ScriptRunner()):
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt(lines({"tool": "Bash", "input": {"command": "ls"}})))
        await hutchd.ended()

    assert seen == [1]
    assert hutchd.asked[0].project is not None
    assert hutchd.asked[0].project.text == "[permissions]\n"


async def test_an_agent_that_cannot_be_opened_says_why_and_the_executor_ends(hutchd: FakeHutchd, cwd: Path) -> None:
    """The reason reaches the caller of `prepare_session`."""
    runner = FakeRunner()
    runner.open_error = HutchError(Reason.AGENT_UNAVAILABLE, "There is no such agent.")
    async with hutchd.up(), serving(hutchd, runner) as worker:
        with pytest.raises(HutchError, match="no such agent"):
            await hutchd.call("prepare_session", prepare(cwd))
        with anyio.fail_after(WAIT):
            await left(worker)


async def test_a_missing_directory_is_reported(hutchd: FakeHutchd, cwd: Path) -> None:
    """A session does not start in a directory that its account cannot enter."""
    async with hutchd.up(), serving(hutchd, FakeRunner()):
        with pytest.raises(HutchError, match="does not exist") as refused:
            await hutchd.call("prepare_session", prepare(cwd / "none"))

    assert refused.value.reason is Reason.AGENT_UNAVAILABLE


@pytest.mark.parametrize("link", ["work", "above"])
async def test_a_link_in_place_of_the_directory_is_refused(hutchd: FakeHutchd, cwd: Path, link: str) -> None:
    """Its links were resolved before: another agent has put this one there. Without `real_cwd` links are resolved."""
    other = cwd.parent / "above" / "other"
    other.mkdir(parents=True)
    wanted = cwd.parent / "link" if link == "work" else cwd.parent / "link" / "other"
    (cwd.parent / "link").symlink_to(other if link == "work" else other.parent)
    async with hutchd.up(), serving(hutchd, FakeRunner()):
        with pytest.raises(HutchError, match="symbolic link") as refused:
            await hutchd.call("prepare_session", replace(prepare(wanted), real_cwd=True))
    async with hutchd.up(), serving(hutchd, FakeRunner()):
        prepared = await hutchd.call("prepare_session", prepare(wanted))

    assert refused.value.reason is Reason.AGENT_UNAVAILABLE
    assert prepared.cwd == str(other)


async def test_a_runner_that_fails_inside_ends_the_turn_without_its_text(hutchd: FakeHutchd, cwd: Path) -> None:
    """An unexpected error is reported by an id; then the executor ends."""
    runner = FakeRunner()
    runner.run_error = RuntimeError("with a secret in it")
    async with hutchd.up(), serving(hutchd, runner) as worker:
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt("a"))
        ended = await hutchd.ended()
        with anyio.fail_after(WAIT):
            await left(worker)

    assert (ended["state"], ended["reason"]) == ("failed", "internal")
    assert "secret" not in ended["message"]


async def test_shutdown_stops_the_turn_and_says_so(hutchd: FakeHutchd, cwd: Path) -> None:
    """The last events are sent and acknowledged before the connection closes."""
    runner = FakeRunner()
    async with hutchd.up(), serving(hutchd, runner) as worker:
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt("a"))
        await hutchd.call("shutdown", m.Shutdown("the session was closed"))
        ended = await hutchd.ended()
        with anyio.fail_after(WAIT):
            await left(worker)

    assert (ended["state"], ended["reason"]) == ("stopped", "executor_stopped")
    assert runner.is_closed
    assert worker.reporter.outbox.unacked == 0


async def test_shutdown_may_let_the_turn_end_first(hutchd: FakeHutchd, cwd: Path) -> None:
    """While draining, the executor accepts no new prompt and stops no turn."""
    runner = FakeRunner()
    async with hutchd.up(), serving(hutchd, runner) as worker:
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt("a"))
        await hutchd.call("shutdown", m.Shutdown("drain", finish_turn=True))
        refused = await hutchd.call("execute_prompt", prompt("b", turn="t-2"))
        runner.go.set()
        ended = await hutchd.ended()
        with anyio.fail_after(WAIT):
            await left(worker)

    assert (refused.accepted, refused.reason) == (False, "leaving")
    assert ended["state"] == "completed"


async def test_a_superseded_executor_stops_and_keeps_its_events_on_disk(hutchd: FakeHutchd, cwd: Path) -> None:
    """`lease_lost` ends it; unacknowledged events are in its spool."""
    runner = FakeRunner()
    async with hutchd.up(), serving(hutchd, runner) as worker:
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt("a"))
        await hutchd.until(lambda: hutchd.of_kind("turn_started"))
        hutchd.refuse = HutchError(Reason.LEASE_LOST)
        await hutchd.cut()
        with anyio.fail_after(WAIT):
            await left(worker)

    _, records = read_spool(next((cwd.parent / "spool").glob("*.spool")))
    assert b'"executor_stopped"' in list(records)[-1][1]


async def test_the_mode_reaches_the_runner(hutchd: FakeHutchd, cwd: Path) -> None:
    """The mode may change during a turn."""
    runner = FakeRunner()
    async with hutchd.up(), serving(hutchd, runner):
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("set_permission_mode", m.SetMode(SESSION, "plan"))

    assert runner.modes == ["plan"]


async def test_paths_are_resolved_from_the_sessions_directory(hutchd: FakeHutchd, cwd: Path) -> None:
    """hutchd requests it; the account decides."""
    (cwd / "link").symlink_to("/etc/hostname")
    async with hutchd.up(), serving(hutchd, FakeRunner()):
        await hutchd.call("prepare_session", prepare(cwd))
        resolved = await hutchd.call("resolve_paths", m.ResolvePaths(SESSION, ("link", "/dev/../tmp")))

    assert resolved.real == {"link": "/etc/hostname", "/dev/../tmp": str(Path("/tmp").resolve())}


async def test_a_runner_may_report_before_a_turn(hutchd: FakeHutchd, cwd: Path) -> None:
    """Events reported while the agent is opened belong to no turn."""
    runner = FakeRunner()
    async with hutchd.up(), serving(hutchd, runner):
        await hutchd.call("prepare_session", prepare(cwd))
        assert runner.daemon is not None
        await runner.daemon.report("text", Text("up"))
        await hutchd.until(lambda: hutchd.events)

    assert hutchd.events[0].turn is None


def test_every_state_leads_to_the_end() -> None:
    """An executor can end from every state."""
    assert all("closing" in after for state, after in MOVES.items() if state != "closing")


async def test_a_turn_that_hutchd_has_ended_is_stopped(hutchd: FakeHutchd, cwd: Path) -> None:
    """If hutchd ended the turn during an outage, the executor stops it after the reconnect."""
    runner = FakeRunner()
    async with hutchd.up(), serving(hutchd, runner):
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt("go"))
        await runner.started.wait()
        hutchd.believes = lambda _: None
        await hutchd.cut()
        ended = await hutchd.ended()

    assert (ended["state"], ended["reason"]) == ("stopped", "interrupted")
    assert runner.interrupts == 1

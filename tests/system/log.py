"""A session's events as a client follows them, and waits for particular ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import msgspec

from hutch_client.client import Follow, HutchClient
from hutch_shared import messages as m
from hutch_shared.events import DATA_OF_KIND, Event, EventKind, TurnEnded
from tests.rehearsal import Model, Say, Step, Steps, anything
from tests.system import processes

DEADLINE = 90.0
"""The most seconds of any one wait, on a slow machine."""

T = TypeVar("T")
Answer = Callable[[m.Permission], m.AnswerPermission]


def data(event: Event) -> Any:
    """The event's data as the struct of its kind."""
    return msgspec.json.decode(event.data, type=DATA_OF_KIND[event.kind])


class Log:
    """The events of a follow that the test has waited for so far."""

    def __init__(self, hutch: HutchClient, follow: Follow) -> None:
        self.hutch = hutch
        self.follow = follow
        self.events: list[Event] = []
        self._handed_out: set[str] = set()

    async def until(self, find: Callable[[Log], T | None]) -> T:
        """Read until `find(self)` returns something; return that."""
        with anyio.move_on_after(DEADLINE):
            while not (found := find(self)):
                self.events.append(await anext(self.follow))
            return found
        last = [(event.seq, event.kind, bytes(event.data)[:200]) for event in self.events[-8:]]
        raise AssertionError(f"it did not come in {DEADLINE:g} s; the last events are {last}")

    def of(self, kind: EventKind) -> list[Any]:
        """Return the data of all events of a kind."""
        return [data(event) for event in self.events if event.kind == kind]

    async def asked(self) -> m.Permission:
        """Return the next permission request."""

        def find(_: Log) -> m.Permission | None:
            questions = (msgspec.convert(asked.permission, m.Permission) for asked in self.of("permission_asked"))
            return next((one for one in questions if one.id not in self._handed_out), None)

        found = await self.until(find)
        self._handed_out.add(found.id)
        return found

    async def ended(self, turn: m.Turn | str) -> TurnEnded:
        """Return how a turn ended."""
        wanted = turn if isinstance(turn, str) else turn.id

        def find(_: Log) -> TurnEnded | None:
            ends = (event for event in self.events if event.kind == "turn_ended" and event.turn == wanted)
            return next((data(event) for event in ends), None)

        return await self.until(find)

    async def play(self, session: m.Session, prompt: str, answer: Answer | None = None) -> TurnEnded:
        """Submit a prompt, decide each of its permission requests, and return how it ended."""
        turn = await self.hutch.submit_prompt(session.id, prompt)

        def next_thing(_: Log) -> bool:
            return any(e.turn == turn.id and e.kind == "turn_ended" for e in self.events) or self._has_new_question()

        while True:
            await self.until(next_thing)
            if not self._has_new_question():
                return await self.ended(turn)
            asked = await self.asked()
            assert answer is not None, f"asked: {asked}"
            await self.hutch.answer_permission(answer(asked))

    def _has_new_question(self) -> bool:
        return any(asked.permission["id"] not in self._handed_out for asked in self.of("permission_asked"))


@asynccontextmanager
async def log_of(
    hutch: HutchClient, session: m.Session | str, *, after: int = 0, answers: bool = True
) -> AsyncIterator[Log]:
    """Follow a session (or `"*"`) from the cursor, as a client that can decide."""
    wanted = session if isinstance(session, str) else session.id
    async with hutch.follow(m.FollowEvents(wanted, after=after, answers=answers)) as follow:
        yield Log(hutch, follow)


def allow(asked: m.Permission) -> m.AnswerPermission:
    """Allow the request."""
    return m.AnswerPermission(asked.id, "allow")


def without_gaps(events: Iterable[Event]) -> bool:
    """Return whether these are the events 1, 2, 3 … of one session, each once."""
    seqs = [event.seq for event in events]
    return seqs == list(range(1, len(seqs) + 1))


async def wait_for(find: Callable[[], T | None]) -> T:
    """Wait until `find` returns something, which depends on another process."""
    with anyio.fail_after(DEADLINE):
        while not (found := find()):
            await anyio.sleep(0.02)
    return found


async def goes_on(log: Log, model: Model, session: m.Session) -> None:
    """Check that the session's next prompt completes and that its record has no gap."""
    model.script = Steps(Step(anything, Say("ok"), None))
    again = await log.play(session, "again")
    assert again.state == "completed", again
    assert without_gaps(log.events)


async def executor_of(hutch: HutchClient, session: m.Session) -> int:
    """Return the pid of a session's executor."""
    (executor,) = [one.pid for one in (await hutch.get_status()).executors if one.session == session.id]
    return executor


async def cli_of(hutch: HutchClient, session: m.Session) -> int:
    """Return the pid of a session's Claude CLI or its double, without its wrappers."""
    family = processes.family(await executor_of(hutch, session))
    return next(one.pid for one in family if any(word.endswith("/claude") for word in one.command.split(" ")[:3]))

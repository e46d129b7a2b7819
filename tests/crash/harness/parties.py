"""The parties of the load: clients that write each promise into a notebook, and can be killed at any moment.

A *player* has a session of its own. It submits prompts, some of them twice, like a client that lost the reply; it
follows the session's events, and decides the permission requests that it sees. A *watcher* follows every session, and
all sessions together. A *rival* decides every permission request that it finds. Each sometimes closes a connection and
returns with its cursor.

    python -m tests.crash.harness.parties SOCKET FOLDER SEED ROLE...

runs parties in one process: `player:NAME:MODE`, `watcher`, `rival`. After SIGTERM a player finishes once all its turns
have ended, and a watcher once it has every event.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import anyio

from tests.crash.harness.notebook import Notebook
from tests.crash.harness.prompts import CLAUDE, script_of
from tests.crash.harness.verdict import ALL
from tests.crash.harness.wire import Line, LostError, RefusedError, connect, digest

AGAIN = 0.03
"""Seconds until a retry."""
LOOK = 0.1
"""Seconds between two polls."""
CATCHES_UP = 10.0
"""Seconds in which recorded events must reach a follower."""
OUTSTANDING = 2
"""The most unfinished turns of a player."""
PASSES = frozenset({"overloaded", "store_unavailable", "shutting_down", "timed_out"})
"""Reasons after which a party retries."""
APART = "apart"
"""The prefix of sessions whose permission requests no party decides."""


@dataclass(slots=True)
class Stage:
    """The state that all parties of a process share."""

    socket: Path
    folder: Path
    seed: str
    finishing: anyio.Event = field(default_factory=anyio.Event)

    def notebook(self, name: str) -> Notebook:
        return Notebook(self.folder / f"{name}.notes")

    async def until_done(self, act: Callable[[Line], Awaitable[Any]]) -> Any:
        """Return the result of `act` on a connection. If the connection is lost, try again."""
        while True:
            try:
                async with connect(self.socket) as line:
                    return await act(line)
            except LostError:
                pass
            except RefusedError as error:
                if error.reason not in PASSES:
                    raise
            await anyio.sleep(AGAIN)

    async def ask(self, method: str, **params: Any) -> Any:
        """Call a method that may be called twice. Try again until there is an answer."""
        return await self.until_done(lambda line: line.ask(method, **params))


class Cursor:
    """Follows a session over any number of connections."""

    def __init__(self, stage: Stage, notes: Notebook, session: str, hear: Callable[[dict[str, Any]], object]) -> None:
        self._stage, self._notes, self._session, self._hear = stage, notes, session, hear
        self._rng = Random(f"{stage.seed} {session}")
        self.number = "position" if session == "*" else "seq"
        got = [line[self.number] for line in notes.lines if line.get("follow") == session]
        self.after: int = got[-1] if got else 0
        self.moved = anyio.Event()

    async def run(self) -> None:
        """Follow until cancelled, or until hutchd refuses the cursor."""
        while True:
            try:
                async with connect(self._stage.socket) as line:
                    await line.ask("follow_events", session=self._session, after=self.after)
                    for _ in range(self._rng.randint(20, 300)):
                        self._take(await line.event())
            except LostError:
                await anyio.sleep(AGAIN)
            except RefusedError as error:
                if error.reason not in PASSES:
                    self._notes.write(cursor_refused=self._session, after=self.after, why=str(error))
                    return
                await anyio.sleep(AGAIN)

    def _take(self, event: dict[str, Any]) -> None:
        self._notes.write(
            follow=self._session,
            seq=event["seq"],
            position=event["position"],
            digest=digest(event),
            session=event["session"],
            asks=event["data"]["permission"]["id"] if event["kind"] == "permission_asked" else None,
        )
        self.after = event[self.number]
        self.moved.set()
        self.moved = anyio.Event()
        self._hear(event)

    async def reach(self, head: int) -> None:
        """Return once every event up to `head` has arrived."""
        while self.after < head:
            await self.moved.wait()


async def answer(stage: Stage, notes: Notebook, permission: str, rng: Random) -> None:
    """Decide a permission request, and note which decision stands: ours, or another party's."""
    decision = rng.choice(("allow", "allow", "allow", "deny"))
    try:
        settled = await stage.ask("answer_permission", permission=permission, decision=decision)
        notes.write(answered=permission, state=settled["state"])
    except RefusedError as error:
        if error.reason == "already_settled":
            notes.write(told=permission, state=error.data["permission"]["state"])
        elif error.reason != "not_found":
            notes.write(odd=f"answering {permission}: {error}")
        else:
            notes.write(question_unknown=permission)


class Player:
    """A session and its user."""

    def __init__(self, stage: Stage, name: str, mode: str) -> None:
        self._stage, self._name, self._mode = stage, name, mode
        self._notes = stage.notebook(name)
        self._rng = Random(f"{stage.seed} {name} {len(self._notes.lines)}")
        ended = {line["ended"] for line in self._notes.lines if "ended" in line}
        self._open = {line["turn"] for line in self._notes.lines if "turn" in line} - ended
        self._ended = ended
        self._changed = anyio.Event()
        self._tasks: anyio.abc.TaskGroup

    async def run(self) -> None:
        """Play until told to finish and all turns have ended."""
        cwd = self._stage.folder / self._name
        cwd.mkdir(exist_ok=True)
        agent = CLAUDE if self._name.startswith(CLAUDE) else "script"
        session = await self._stage.ask(
            "open_session", agent=agent, cwd=str(cwd), name=self._name, permission_mode=self._mode,
            idempotency_key=self._name,
        )  # fmt: skip
        cursor = Cursor(self._stage, self._notes, session["id"], self._hear)
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(cursor.run)
            try:
                await self._submit_all(session["id"])
            except RefusedError as error:
                self._notes.write(refused=str(error))
            head = (await self._stage.ask("follow_events", session=session["id"], after=-1))["head"]
            with anyio.move_on_after(CATCHES_UP):
                await cursor.reach(head)
            self._tasks.cancel_scope.cancel()
        self._notes.write(finished=head)

    async def _submit_all(self, session: str) -> None:
        keys = [line["key"] for line in self._notes.lines if "key" in line]
        accepted = {line["accepted"] for line in self._notes.lines if "accepted" in line}
        for key in keys:
            if key not in accepted:
                await self._submit(session, key)
        number = len(keys)
        while not self._stage.finishing.is_set() or self._open:
            if len(self._open) < OUTSTANDING and not self._stage.finishing.is_set():
                number += 1
                self._notes.write(key=(key := f"{self._name}-{number}"))
                await self._submit(session, key)
                if self._rng.random() < 0.4:
                    await self._submit(session, key)
            else:
                changed = self._changed
                with anyio.move_on_after(1.0) as waiting:
                    await changed.wait()
                if waiting.cancelled_caught:
                    await self._look()

    async def _submit(self, session: str, key: str) -> None:
        turn = await self._stage.ask(
            "submit_prompt", session=session, prompt=script_of(key).prompt, idempotency_key=key
        )
        self._notes.write(accepted=key, turn=turn["id"])
        if turn["id"] not in self._ended:
            self._open.add(turn["id"])

    async def _look(self) -> None:
        """Poll which turns have ended. The verdict, not this method, checks for missing events."""
        for turn in list(self._open):
            try:
                found = await self._stage.ask("get_turn", turn=turn)
            except RefusedError as error:
                self._notes.write(turn_refused=turn, why=str(error))
                self._over(turn)
                continue
            if found.get("ended_at") is not None:
                self._over(turn)

    def _hear(self, event: dict[str, Any]) -> None:
        if event["kind"] == "turn_ended":
            self._over(event["turn"])
        elif event["kind"] == "permission_asked":
            self._tasks.start_soon(self._answer, event["data"]["permission"]["id"])

    async def _answer(self, permission: str) -> None:
        await anyio.sleep(self._rng.uniform(0.0, 0.3))
        await answer(self._stage, self._notes, permission, self._rng)

    def _over(self, turn: str) -> None:
        self._notes.write(ended=turn)
        self._ended.add(turn)
        self._open.discard(turn)
        self._changed.set()
        self._changed = anyio.Event()


async def watch(stage: Stage) -> None:
    """Follow every session, and all sessions together."""
    notes = stage.notebook("watcher")
    cursors = {"*": Cursor(stage, notes, "*", lambda _: None)}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cursors["*"].run)
        while not stage.finishing.is_set():
            for session in (await stage.ask("list_sessions"))["sessions"]:
                if session["id"] not in cursors:
                    cursors[session["id"]] = Cursor(stage, notes, session["id"], lambda _: None)
                    tasks.start_soon(cursors[session["id"]].run)
            with anyio.move_on_after(LOOK * 5):
                await stage.finishing.wait()
        for session, cursor in cursors.items():
            async with connect(stage.socket) as line:
                head = (await line.ask("follow_events", session=session, after=-1))["head"]
            await cursor.reach(head)
        tasks.cancel_scope.cancel()
    notes.write(finished=ALL)


async def rival(stage: Stage) -> None:
    """Decide every permission request that waits, until told to finish."""
    notes = stage.notebook("rival")
    rng = Random(f"{stage.seed} rival {len(notes.lines)}")
    apart: set[str] = set()
    while not stage.finishing.is_set():
        apart |= {one["id"] for one in (await stage.ask("list_sessions"))["sessions"] if one["name"].startswith(APART)}
        for question in (await stage.ask("list_permissions"))["permissions"]:
            if question["session"] not in apart:
                await answer(stage, notes, question["id"], rng)
        with anyio.move_on_after(LOOK):
            await stage.finishing.wait()


async def run(stage: Stage, roles: list[str]) -> None:
    """Run these parties until they have finished. SIGTERM tells them to finish."""
    async with anyio.create_task_group() as group:
        group.start_soon(_listen, stage)
        async with anyio.create_task_group() as parties:
            for role in roles:
                match role.split(":"):
                    case ["player", name, mode]:
                        parties.start_soon(Player(stage, name, mode).run)
                    case ["watcher"]:
                        parties.start_soon(watch, stage)
                    case ["rival"]:
                        parties.start_soon(rival, stage)
        group.cancel_scope.cancel()


def handles_sigterm(folder: Path, pid: int) -> Path:
    """Return the file that exists once a process of parties handles SIGTERM; before, the signal would kill it."""
    return folder / f"handles_sigterm-{pid}"


async def _listen(stage: Stage) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        handles_sigterm(stage.folder, os.getpid()).touch()
        async for _ in signals:
            stage.finishing.set()


if __name__ == "__main__":
    socket, folder, seed, *roles = sys.argv[1:]
    anyio.run(run, Stage(Path(socket), Path(folder), seed), roles)

"""A person at a session: its events on the screen, its questions asked, Ctrl-C minded.

Closing loses nothing: the turn goes on, and whoever comes back sees what happened meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import anyio
import msgspec

from hutch_client import exits
from hutch_client.client import Follow, HutchClient
from hutch_client.console import Console
from hutch_client.editor import edit_input
from hutch_client.questions import WORDS, chosen, read_reply
from hutch_client.show import Screen
from hutch_client.streams import columns
from hutch_client.untrusted import escaped_json, one_line, plain
from hutch_client.waiting import long_enough
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import KINDS, Event, PermissionAsked, PermissionSettled, TurnEnded

__all__ = ["TurnWatch", "WatchOptions", "json_line"]

_AGAIN_WITHIN: Final = 1.5
_NEWS: Final = ("permission_asked", "permission_settled", "turn_ended")
_DELTAS: Final = ("text_delta", "thinking_delta")
_PLAN_WORDS: Final = "[y]es  [n]o or n MESSAGE  [x] no, and stop"
_ASKED_AGAIN: Final = (Reason.INVALID_PARAMS, Reason.INVALID_RULE, Reason.POLICY_FORBIDS)


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """How to watch: what is printed, and whether the person can be asked."""

    output: str = "text"
    """`text`, `jsonl` (the events) or `json` (nothing but what the caller prints at the end)."""
    questions: Literal["inline", "tell", "refuse"] = "inline"
    """Ask the person here; say where the answer can be given; or end the watch with exit code 5."""
    prompts: bool = True

    @property
    def interactive(self) -> bool:
        """Questions are asked inline."""
        return self.questions == "inline" and self.output == "text" and sys.stdin.isatty() and sys.stderr.isatty()

    @property
    def skip(self) -> tuple[str, ...]:
        """The kinds of events that are not needed."""
        if self.interactive:
            return ()  # then the head of the history is sure to come, and with it the time to ask
        if self.output == "json":
            return tuple(kind for kind in KINDS if kind not in _NEWS)
        return () if self.output == "jsonl" or sys.stdout.isatty() else _DELTAS

    def console(self) -> Console:
        """Return a console for where the output goes."""
        colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        width = columns(2) - 8 if sys.stderr.isatty() else 100
        return Console(colour=colour, live=sys.stdout.isatty(), prompts=self.prompts, width=max(width, 20))


def json_line(event: Event) -> str:
    """Return an event as one JSON line that is safe to print."""
    line = escaped_json(msgspec.json.encode(msgspec.structs.replace(event, follow=None)).decode())
    if line.isascii() or (sys.stdout.encoding or "utf-8").lower().replace("-", "") == "utf8":
        return line
    return json.dumps(json.loads(line))  # a stream of another encoding: escaped, nothing gets lost


class TurnWatch:
    """Watches one session until a turn ends, the session goes or the person leaves; `run` gives the exit code."""

    def __init__(self, hutch: HutchClient, session: str, options: WatchOptions, *, turn: str | None = None) -> None:
        """Watch `turn` to its end, or the session for as long as the person stays."""
        self._hutch = hutch
        self._session = session
        self._options = options
        self._turn = turn
        self._screen = Screen(options.console())
        self._console = self._screen.console
        self._code = exits.OK
        self._waiting: dict[str, m.Permission] = {}
        self._settled: set[str] = set()
        self._begun = anyio.Event()
        self._news = anyio.Event()
        self._asking: tuple[str, anyio.CancelScope] | None = None

    async def run(self, after: int, journal: str | None = None) -> int:
        """Watch from the cursor on. Ctrl-C detaches and says how to stop the turn; a second one interrupts it."""
        params: m.FollowEvents | None = m.FollowEvents(
            self._session, after=after, journal=journal, skip=self._options.skip, answers=self._options.interactive
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._mind_interrupts, tasks.cancel_scope)
            if self._options.output == "text":
                tasks.start_soon(self._screen.spin)
            if self._options.interactive:
                tasks.start_soon(self._answer_questions)
            if self._turn is not None:
                tasks.start_soon(self._tell_why_it_waits)
            while params is not None:
                params = await self._follow(params)
            tasks.cancel_scope.cancel()
        return self._code

    async def _follow(self, params: m.FollowEvents) -> m.FollowEvents | None:
        """Follow to the end; where events are missing say so, and return how to go on after them."""
        try:
            async with self._hutch.follow(params, on_line=self._tell_line) as follow:
                head = follow.head
                waiting = await self._hutch.list_permissions(m.ListPermissions(self._session))
                await self._show(follow, head, waiting)
        except HutchError as error:
            self._screen.say(f"hutch: {plain(error.message)}")
            if error.reason is Reason.COMPACTED and "oldest" in error.details:
                return msgspec.structs.replace(params, after=error.details["oldest"] - 1)
            self._code = exits.of_error(error)
        except BrokenPipeError:
            pass  # whoever read our output has gone
        return None

    async def _show(self, follow: Follow, head: int, waiting: Sequence[m.Permission]) -> None:
        """Show the history up to `head`, ask what has been `waiting` since then, and go on with what comes."""
        if not self._options.interactive or follow.after >= head:
            self._ask(*waiting)
        if self._code == exits.NEEDS_ANSWER:
            return
        async for event in follow:
            if self._turn is None or event.turn in (None, self._turn):
                self._take(event, is_news=event.seq > head)
            if event.seq == head and self._options.interactive:
                self._ask(*waiting)
            if self._code == exits.NEEDS_ANSWER or (event.kind == "turn_ended" and event.turn == self._turn):
                return

    def _take(self, event: Event, *, is_news: bool) -> None:
        if self._options.output == "jsonl":
            print(json_line(event), flush=True)
        elif self._options.output == "text":
            self._screen.write(self._console.feed(event))
        if event.kind == "permission_asked" and is_news:
            self._ask(msgspec.convert(_data(event, PermissionAsked).permission, m.Permission))
        elif event.kind == "turn_started":
            self._begun.set()
        elif event.kind == "permission_settled":
            self._settle(_data(event, PermissionSettled).permission)
        elif event.kind == "turn_ended" and event.turn == self._turn:
            self._code = exits.of_turn(_data(event, TurnEnded).state)

    # ------------------------------------------------------------ questions

    def _ask(self, *questions: m.Permission) -> None:
        for asked in questions:
            if self._turn not in (None, asked.turn) or asked.id in self._settled:
                continue
            if self._options.interactive:
                self._waiting[asked.id] = asked
                self._news.set()
                continue
            if self._options.output == "text":
                self._screen.write(self._console.question(asked))
            verb = "answer" if asked.kind == "question" else "approve"
            self._screen.say(f"Waits for an answer: `hutch {verb} {asked.id}` or `hutch deny {asked.id}`.")
            if self._options.questions == "refuse":
                self._code = exits.NEEDS_ANSWER

    def _settle(self, permission: str) -> None:
        self._settled.add(permission)
        self._waiting.pop(permission, None)
        if self._asking is not None and self._asking[0] == permission:
            self._asking[1].cancel()

    async def _answer_questions(self) -> None:
        """Ask one question after the other; one that is settled elsewhere meanwhile is taken away."""
        while True:
            while not self._waiting:
                self._news = anyio.Event()
                await self._news.wait()
            asked = next(iter(self._waiting.values()))
            try:
                if (answer := await self._typed(asked)) is not None:
                    await self._hutch.answer_permission(answer)
                    self._waiting.pop(asked.id, None)
            except EOFError:
                self._screen.say(f"Nothing more can be typed here; `hutch pending` lists what waits ({asked.id}).")
                return
            except HutchError as error:
                self._screen.say(f"hutch: {plain(error.message)}")
                if error.reason not in _ASKED_AGAIN:
                    self._waiting.pop(asked.id, None)

    async def _typed(self, asked: m.Permission) -> m.AnswerPermission | None:
        """Ask the person; None when it was settled elsewhere meanwhile. An answer on its way is not taken back."""
        reply = None
        with anyio.CancelScope() as scope:
            self._asking = (asked.id, scope)
            self._screen.forget_typed()
            self._screen.write(self._console.question(asked))
            try:
                reply = await self._reply(asked)
            finally:
                self._asking = None
        return reply

    async def _reply(self, asked: m.Permission) -> m.AnswerPermission:
        if asked.kind == "question":
            answers = {one.question: await self._choice(one) for one in asked.questions}
            return m.AnswerPermission(asked.id, "answer", answers=answers)
        plan = asked.kind == "plan"
        while True:
            reply = read_reply(await self._screen.ask(f"  {_PLAN_WORDS if plan else WORDS} › "))
            if reply == "edit" and not plan:
                with self._screen.lent():
                    changed = await anyio.to_thread.run_sync(edit_input, asked.call.input)
                return m.AnswerPermission(asked.id, "allow", updated_input=changed)
            if isinstance(reply, dict) and not (plan and "scope" in reply):
                return m.AnswerPermission(asked.id, **reply)

    async def _choice(self, question: m.Question) -> str | list[str]:
        labels = [choice.label for choice in question.choices]
        while True:
            line = await self._screen.ask(f"  {one_line(question.header or 'answer', 30)} › ")
            answer = chosen(labels, line, several=question.several)
            if answer is not None:
                return answer

    # ------------------------------------------------------------ coming and going

    async def _tell_why_it_waits(self) -> None:
        """Say once what keeps the turn from starting; on a terminal beside the spinner, for as long as it does."""
        await long_enough()
        told = False
        while not self._begun.is_set():
            try:
                words = _why_it_waits(await self._hutch.get_status(), self._session)
            except HutchError as error:
                words = f"waiting for hutchd: {one_line(error.message)}"
            if self._begun.is_set():
                return
            self._console.doing = words
            if not told and not (sys.stderr.isatty() and self._options.output == "text"):
                told = True
                self._screen.say(f"The turn has not started yet: {words}")
            await long_enough()

    def _tell_line(self, is_there: bool) -> None:
        self._screen.say("hutchd is back." if is_there else "hutchd went away; waiting for it to come back.")

    async def _mind_interrupts(self, watching: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGINT) as signals:
            await anext(signals)
            if self._turn is None and self._console.doing == "idle":  # nothing runs that could be stopped
                self._leave(watching)
                return
            self._screen.say(f"Ctrl-C again within {_AGAIN_WITHIN:g} s stops the turn; else it goes on without you.")
            again = False
            with anyio.move_on_after(_AGAIN_WITHIN):
                await anext(signals)
                again = True
            if again:
                try:
                    await self._hutch.interrupt_turn(self._session, self._turn)
                    if self._turn is not None:
                        await anext(signals)  # the turn's end ends the watch, unless the person cannot wait
                except HutchError as error:
                    self._screen.say(f"hutch: {plain(error.message)}")
            else:
                self._screen.say(
                    f"Detached. `hutch attach {self._session}` comes back, `hutch interrupt {self._session}` stops it."
                )
            self._leave(watching)

    def _leave(self, watching: anyio.CancelScope) -> None:
        self._code = exits.INTERRUPTED
        watching.cancel()


def _why_it_waits(status: m.Status, session: str) -> str:
    """Return what a turn of `session` that has not started waits for."""
    if status.draining:
        return "waiting for the next hutchd, since this one is stopping"
    if not status.store.ok:
        return f"waiting for room to store it: {one_line(status.store.detail or 'the store cannot write')}"
    if all(one.session != session for one in status.executors):
        return "waiting for an executor"
    return "waiting for its turn, or for the agent to start"


D = TypeVar("D", bound=msgspec.Struct)


def _data(event: Event, kind: type[D]) -> D:
    return msgspec.json.decode(event.data, type=kind)

"""Watches a session in a terminal: shows its events, asks the user about permission requests, handles Ctrl-C.

Closing the terminal loses nothing: the turn goes on, and `hutch attach` shows what happened.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Final, TypeVar

import anyio
import msgspec

from hutch_client import exits
from hutch_client.client import Follow, HutchClient
from hutch_client.editor import edit_input
from hutch_client.questions import WORDS, answers_by_name, chosen, not_an_answer, read_reply
from hutch_client.show import Screen
from hutch_client.untrusted import one_line, plain
from hutch_client.waiting import two_seconds
from hutch_client.watch_options import WatchOptions, json_line
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Event, PermissionAsked, PermissionSettled, TurnEnded

__all__ = ["TurnWatch"]

_AGAIN_WITHIN: Final = 1.5
_PLAN_WORDS: Final = "[y]es  [n]o or n MESSAGE  [x] no, and stop"
_ASK_AGAIN: Final = (Reason.INVALID_PARAMS, Reason.INVALID_RULE, Reason.POLICY_FORBIDS)


class TurnWatch:
    """Watches one session until its turn ends, the session is removed or the user leaves."""

    def __init__(self, hutch: HutchClient, session: str, options: WatchOptions, *, turn: str | None = None) -> None:
        """Watch `turn` to its end, or without a turn the session until the user leaves."""
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
        self._asked = anyio.Event()
        self._asking: tuple[str, anyio.CancelScope] | None = None

    async def run(self, after: int, journal: str | None = None) -> int:
        """Watch from the cursor on; return the exit code. Ctrl-C detaches; a second one soon after stops the turn."""
        params: m.FollowEvents | None = m.FollowEvents(
            self._session, after=after, journal=journal, skip=self._options.skip, answers=self._options.interactive
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._handle_ctrl_c, tasks.cancel_scope)
            if self._options.output == "text":
                tasks.start_soon(self._screen.spin)
            if self._options.interactive:
                tasks.start_soon(self._answer_questions)
            if self._turn is not None:
                tasks.start_soon(self._report_why_it_waits)
            while params is not None:
                params = await self._follow(params)
            tasks.cancel_scope.cancel()
        return self._code

    async def _follow(self, params: m.FollowEvents) -> m.FollowEvents | None:
        """Follow to the end. If events were compacted, report it and return the parameters to continue after them."""
        try:
            async with self._hutch.follow(params, on_connection=self._report_connection) as follow:
                head = follow.head
                waiting = await self._hutch.list_permissions(m.ListPermissions(self._session))
                await self._show(follow, head, waiting)
        except HutchError as error:
            self._screen.say(f"hutch: {plain(error.message)}")
            if error.reason is Reason.COMPACTED and "oldest" in error.details:
                return msgspec.structs.replace(params, after=error.details["oldest"] - 1)
            self._code = exits.of_error(error)
        except BrokenPipeError:
            pass  # the reader of our output has closed it
        return None

    async def _show(self, follow: Follow, head: int, waiting: Sequence[m.Permission]) -> None:
        """Show the history up to `head`, ask the user about the `waiting` requests, then show new events."""
        if not self._options.interactive or follow.after >= head:
            self._ask(*waiting)
        if self._code == exits.NEEDS_ANSWER:
            return
        async for event in follow:
            if self._turn is None or event.turn in (None, self._turn):
                self._take(event, is_new=event.seq > head)
            if event.seq == head and self._options.interactive:
                self._ask(*waiting)
            if self._code == exits.NEEDS_ANSWER or (event.kind == "turn_ended" and event.turn == self._turn):
                return

    def _take(self, event: Event, *, is_new: bool) -> None:
        if self._options.output == "jsonl":
            print(json_line(event), flush=True)
        elif self._options.output == "text":
            self._screen.write(self._console.feed(event))
        if event.kind == "permission_asked" and is_new:
            self._ask(msgspec.convert(_data(event, PermissionAsked).permission, m.Permission))
        elif event.kind == "turn_started":
            self._begun.set()
        elif event.kind == "permission_settled":
            self._settle(_data(event, PermissionSettled).permission)
        elif event.kind == "turn_ended" and event.turn == self._turn:
            self._code = exits.of_turn(_data(event, TurnEnded).state)

    # ------------------------------------------------------------ permission requests

    def _ask(self, *questions: m.Permission) -> None:
        for asked in questions:
            if self._turn not in (None, asked.turn) or asked.id in self._settled:
                continue
            if self._options.interactive:
                self._waiting[asked.id] = asked
                self._asked.set()
                continue
            if self._options.output == "text":
                self._screen.write(self._console.question(asked))
            verb = "answer" if asked.kind == "question" else "approve"
            self._screen.say(f"Waiting for a decision: `hutch {verb} {asked.id}` or `hutch deny {asked.id}`.")
            if self._options.questions == "refuse":
                self._code = exits.NEEDS_ANSWER

    def _settle(self, permission: str) -> None:
        self._settled.add(permission)
        self._waiting.pop(permission, None)
        if self._asking is not None and self._asking[0] == permission:
            self._asking[1].cancel()

    async def _answer_questions(self) -> None:
        """Ask the user about one request after the other. A request settled elsewhere disappears from the screen."""
        while True:
            while not self._waiting:
                self._asked = anyio.Event()
                await self._asked.wait()
            asked = next(iter(self._waiting.values()))
            try:
                if (answer := await self._typed(asked)) is not None:
                    await self._hutch.answer_permission(answer)
                    self._waiting.pop(asked.id, None)
            except EOFError:
                self._screen.say(
                    f"Standard input has ended, so {asked.id} still waits. `hutch pending` lists all that wait."
                )
                return
            except HutchError as error:
                self._screen.say(f"hutch: {plain(error.message)}")
                if error.reason not in _ASK_AGAIN:
                    self._waiting.pop(asked.id, None)

    async def _typed(self, asked: m.Permission) -> m.AnswerPermission | None:
        """Return the user's answer; None if the request was settled elsewhere first. A sent answer is not withdrawn."""
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
            answers = [await self._choice(asked.questions, at) for at in range(len(asked.questions))]
            named = answers_by_name([one.question for one in asked.questions], answers)
            return m.AnswerPermission(asked.id, "answer", answers=named)
        plan = asked.kind == "plan"
        while True:
            line = await self._screen.ask(f"  {_PLAN_WORDS if plan else WORDS} › ")
            reply = read_reply(line)
            if reply == "edit" and not plan:
                with self._screen.lent():
                    changed = await anyio.to_thread.run_sync(edit_input, asked.call.input)
                return m.AnswerPermission(asked.id, "allow", updated_input=changed)
            if isinstance(reply, dict) and not (plan and "scope" in reply):
                return m.AnswerPermission(asked.id, **reply)
            if line.strip():
                self._screen.say(f"  `{one_line(line, 40)}` is none of these. A message can follow only `n` or `x`.")

    async def _choice(self, questions: Sequence[m.Question], at: int) -> str | list[str]:
        question = questions[at]
        labels = [choice.label for choice in question.choices]
        position = f"{at + 1} of {len(questions)} · " if len(questions) > 1 else ""
        while True:
            line = await self._screen.ask(f"  {position}{one_line(question.header or 'answer', 30)} › ")
            answer = chosen(labels, line, several=question.several)
            if answer is not None:
                return answer
            if line.strip():
                self._screen.say(f"  {not_an_answer(labels, line)}")

    # ------------------------------------------------------------ the connection and Ctrl-C

    async def _report_why_it_waits(self) -> None:
        """Print once why the turn has not started; on a terminal also show that beside the spinner until it starts."""
        await two_seconds()
        reported = False
        while not self._begun.is_set():
            try:
                words = _why_it_waits(await self._hutch.get_status(), self._session)
            except HutchError as error:
                words = f"waiting for hutchd: {one_line(error.message)}"
            if self._begun.is_set():
                return
            self._console.doing = words
            if not reported and not (sys.stderr.isatty() and self._options.output == "text"):
                reported = True
                self._screen.say(f"The turn has not started yet: {words}")
            await two_seconds()

    def _report_connection(self, is_there: bool) -> None:
        self._screen.say("hutchd is back." if is_there else "The connection to hutchd is lost; trying again.")

    async def _handle_ctrl_c(self, watching: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGINT) as signals:
            await anext(signals)
            if self._turn is None and self._console.doing == "idle":  # no turn runs that a second Ctrl-C could stop
                self._leave(watching)
                return
            self._screen.say(
                f"Press Ctrl-C again within {_AGAIN_WITHIN:g} s to stop the turn; otherwise it goes on without you."
            )
            again = False
            with anyio.move_on_after(_AGAIN_WITHIN):
                await anext(signals)
                again = True
            if again:
                try:
                    await self._hutch.interrupt_turn(self._session, self._turn)
                    if self._turn is not None:
                        await anext(signals)  # the turn's end ends the watch; a third Ctrl-C ends it at once
                except HutchError as error:
                    self._screen.say(f"hutch: {plain(error.message)}")
            else:
                self._screen.say(
                    f"Detached. `hutch attach {self._session}` returns, `hutch interrupt {self._session}` stops it."
                )
            self._leave(watching)

    def _leave(self, watching: anyio.CancelScope) -> None:
        self._code = exits.INTERRUPTED
        watching.cancel()


def _why_it_waits(status: m.Status, session: str) -> str:
    """Return why a turn of `session` has not started."""
    if status.draining:
        return "waiting for the next hutchd; this one is stopping"
    if not status.store.ok:
        return f"waiting for space in the store: {one_line(status.store.detail or 'the store cannot write')}"
    if all(one.session != session for one in status.executors):
        return "waiting for an executor"
    return "waiting for a free executor or for the agent to start"


D = TypeVar("D", bound=msgspec.Struct)


def _data(event: Event, kind: type[D]) -> D:
    return msgspec.json.decode(event.data, type=kind)

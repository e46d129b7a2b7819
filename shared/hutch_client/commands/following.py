"""attach, logs, wait, pending --watch: the commands that follow events."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import msgspec

from hutch_client import exits
from hutch_client.client import HutchClient
from hutch_client.questions import headline
from hutch_client.show import Screen
from hutch_client.untrusted import escaped_json, one_line, plain
from hutch_client.watch import TurnWatch
from hutch_client.watch_options import WatchOptions, json_line
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import KINDS, Event, PermissionAsked

__all__ = ["attach", "logs", "wait", "watch_pending"]


def _talk(conversation: Callable[[HutchClient], Awaitable[int]]) -> int:
    async def connected() -> int:
        async with HutchClient.connect() as hutch:
            return await conversation(hutch)

    return anyio.run(connected)


def attach(given: argparse.Namespace, *, look_back: int) -> int:
    """Watch a session from `given.since` on, or from `look_back` events before its end; return the exit code."""

    async def watch(hutch: HutchClient) -> int:
        session = await hutch.get_session(given.session)
        since = max(0, session.head_seq - look_back) if given.since is None else given.since
        options = WatchOptions(given.output, "refuse" if given.no_input else "inline")
        return await TurnWatch(hutch, session.id, options).run(since, session.journal)

    return _talk(watch)


def logs(given: argparse.Namespace) -> int:
    """Print a session's events, with `given.follow` also new ones; return the exit code."""

    async def show(hutch: HutchClient) -> int:
        session = await hutch.get_session(given.session)
        options = WatchOptions(given.output, "tell")
        if given.follow:
            return await TurnWatch(hutch, session.id, options).run(given.since, session.journal)
        screen = Screen(options.console())
        async for event in _history(hutch, session, given.since):
            if given.output == "jsonl":
                print(json_line(event))
            else:
                screen.write(screen.console.feed(event))
        return exits.OK

    return _talk(show)


async def _history(hutch: HutchClient, session: m.Session, after: int) -> AsyncIterator[Event]:
    more = True
    while more:
        try:
            page: m.EventsPage = await hutch.call(
                "read_events", m.ReadEvents(session.id, after, journal=session.journal)
            )
        except HutchError as error:
            if error.reason is not Reason.COMPACTED or "oldest" not in error.details:
                raise
            print(f"hutch: {plain(error.message)}", file=sys.stderr)
            after = error.details["oldest"] - 1
            continue
        for raw in page.events:
            event = msgspec.json.decode(raw, type=Event)
            after = event.seq
            yield event
        more = page.more and bool(page.events)


def wait(given: argparse.Namespace) -> int:
    """Wait until the sessions are idle; return the exit code of their last turns. HutchError TIMED_OUT."""

    async def watch(hutch: HutchClient) -> int:
        code = exits.OK
        try:
            with anyio.fail_after(given.timeout):
                for ref in given.sessions:
                    code = await _until_idle(hutch, ref) or code
        except TimeoutError:
            raise HutchError(Reason.TIMED_OUT, f"Still busy after {given.timeout:g} s. The turn goes on.") from None
        return code

    return _talk(watch)


async def _until_idle(hutch: HutchClient, ref: str) -> int:
    """Wait until no turn of the session runs or is queued; return the exit code of its last turn.

    If the turn waits for a permission, say so once.
    """
    session = (await hutch.get_session(ref)).id
    skip = tuple(kind for kind in KINDS if kind not in ("turn_ended", "permission_asked"))
    reported = False
    async with hutch.follow(m.FollowEvents(session, after=-1, skip=skip)) as follow:
        while True:
            record = await hutch.get_session(session)
            if record.active_turn is None and not record.queued:
                turns = await hutch.list_turns(session)
                return exits.of_turn(turns[-1].state) if turns else exits.OK
            if record.active_state == "awaiting_permission" and not reported:
                reported = True
                print(f"{one_line(ref)} is awaiting permission: `hutch pending {one_line(ref)}`.", file=sys.stderr)
            await anext(follow)


def watch_pending(ref: str | None, *, jsonl: bool) -> int:
    """Print the pending permission requests, then each new one, one per line, until the user leaves."""

    async def watch(hutch: HutchClient) -> int:
        session = (await hutch.get_session(ref)).id if ref else None
        skip = tuple(kind for kind in KINDS if kind != "permission_asked")
        async with hutch.follow(m.FollowEvents("*", after=-1, skip=skip, answers=True)) as follow:
            seen = set()
            for waiting in await hutch.list_permissions(m.ListPermissions(session)):
                seen.add(waiting.id)
                _print_request(msgspec.to_builtins(waiting), jsonl=jsonl)
            async for event in follow:
                asked = msgspec.json.decode(event.data, type=PermissionAsked).permission
                if asked["id"] not in seen and session in (None, event.session):
                    _print_request(asked, jsonl=jsonl)
        return exits.OK

    return _talk(watch)


def _print_request(asked: dict[str, object], *, jsonl: bool) -> None:
    if jsonl:
        print(escaped_json(json.dumps(asked)), flush=True)
    else:
        print(f"{asked['id']}  {asked['session']}  {one_line(headline(asked))}", flush=True)

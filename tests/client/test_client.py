from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from hutch_client import Follow, HutchClient
from hutch_client.blocking import PROTOCOL
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.secret import Secret
from tests.client.fake_daemon import PERMISSION, SESSION, TURN, FakeDaemon, event


def _texts(begin: int, end: int) -> list[object]:
    return [event(seq, "text", {"text": str(seq)}) for seq in range(begin, end)]


@asynccontextmanager
async def _following(after: int = 0, **more: object) -> AsyncIterator[tuple[HutchClient, Follow]]:
    async with (
        HutchClient.connect() as hutch,
        hutch.follow(m.FollowEvents(SESSION.id, after=after, **more)) as follow,  # type: ignore[arg-type]
    ):
        yield hutch, follow


def test_both_clients_speak_the_same_protocol() -> None:
    """The blocking client has a copy of the protocol number, which must be the same."""
    assert PROTOCOL == m.PROTOCOL


async def test_calls_are_typed_and_share_one_connection(daemon: FakeDaemon) -> None:
    """A result has the type from the methods table."""
    daemon.answers |= {"list_permissions": m.Permissions((PERMISSION,)), "answer_permission": PERMISSION}

    async with HutchClient.connect() as hutch:
        session = await hutch.get_session("fix")
        (asked,) = await hutch.list_permissions()
        await hutch.answer_permission(m.AnswerPermission(asked.id, "allow"))

    assert (session, asked) == (SESSION, PERMISSION)
    assert len(daemon.asked("get_version")) == 1


async def test_a_text_without_a_utf8_form_is_not_sent(daemon: FakeDaemon) -> None:
    """The caller hears so, and the connection goes on."""
    async with HutchClient.connect() as hutch:
        with pytest.raises(HutchError, match="UTF-8") as refused:
            await hutch.submit_prompt("fix", "half \ud83d")
        session = await hutch.get_session("fix")

    assert refused.value.reason is Reason.INVALID_PARAMS
    assert session == SESSION


async def test_permission_requests_come_from_all_pages(daemon: FakeDaemon) -> None:
    """The client calls until it has `limit` requests. Each page begins after the last request of the one before."""
    pages = {None: "p-1", "p-1": "p-2", "p-2": "p-3"}

    def listed(params: m.ListPermissions) -> m.Permissions:
        return m.Permissions((msgspec.structs.replace(PERMISSION, id=pages[params.after]),), params.after != "p-2")

    daemon.answers["list_permissions"] = listed

    async with HutchClient.connect() as hutch:
        every = await hutch.list_permissions()
        some = await hutch.list_permissions(m.ListPermissions(limit=2))

    assert [one.id for one in every] == ["p-1", "p-2", "p-3"]
    assert [one.id for one in some] == ["p-1", "p-2"]


async def test_a_refusal_is_raised_with_its_reason(daemon: FakeDaemon) -> None:
    """The caller gets hutchd's HutchError itself, not an exception group."""

    def refuse(_: object) -> m.Turn:
        raise HutchError(Reason.SESSION_CLOSED)

    daemon.answers["submit_prompt"] = refuse

    with pytest.raises(HutchError, match="closed") as refused:
        async with HutchClient.connect() as hutch:
            await hutch.submit_prompt(SESSION.id, "hello")

    assert refused.value.reason is Reason.SESSION_CLOSED


async def test_a_missing_hutchd_is_reported_at_once(tmp_path: Path) -> None:
    """`connect` raises at once and does not dial again."""
    with pytest.raises(HutchError, match="hutch daemon start"):
        async with HutchClient.connect(tmp_path / "none.sock"):
            pass


async def test_a_repeatable_call_survives_a_lost_connection(daemon: FakeDaemon) -> None:
    """A repeated prompt has the same idempotency key."""
    lost = False

    def answer(_: object) -> m.Turn:
        nonlocal lost
        if not lost:
            lost = True
            daemon.drop()
        return TURN

    daemon.answers["submit_prompt"] = answer

    async with HutchClient.connect() as hutch:
        turn = await hutch.submit_prompt(SESSION.id, "hello")

    first, second = daemon.asked("submit_prompt")
    assert turn == TURN
    assert first == second
    assert first.idempotency_key


async def test_a_call_that_may_not_be_repeated_is_reported_as_lost(daemon: FakeDaemon) -> None:
    """The client cannot know whether hutchd carried it out. The next call dials again."""

    def hang_up(_: object) -> m.ApiKey:
        daemon.drop()
        return m.ApiKey("k-1", "anthropic", "default", 1000, "2026-01-31T12:00:00.000Z", "")

    daemon.answers["put_api_key"] = hang_up

    async with HutchClient.connect() as hutch:
        with pytest.raises(HutchError) as lost:
            await hutch.put_api_key("anthropic", Secret("sk-1"))
        again = await hutch.get_session("fix")

    assert lost.value.reason is Reason.CONNECTION_LOST
    assert len(daemon.asked("put_api_key")) == 1
    assert again == SESSION


async def test_a_follow_gives_history_then_live_events(daemon: FakeDaemon) -> None:
    """The events begin after the cursor and have no gap."""
    daemon.events = _texts(1, 4)  # type: ignore[assignment]

    async with _following(1) as (_, follow):
        history = [(await anext(follow)).seq for _ in range(2)]
        await anyio.to_thread.run_sync(daemon.publish, event(4, "text", {"text": "4"}))
        live = (await anext(follow)).seq

    assert (history, live, follow.after, follow.head) == ([2, 3], 4, 4, 3)


async def test_a_follow_dials_again_with_its_cursor(daemon: FakeDaemon) -> None:
    """Each event arrives once, even if the connection breaks in between."""
    daemon.events = _texts(1, 4)  # type: ignore[assignment]

    async with _following() as (_, follow):
        seen = [(await anext(follow)).seq for _ in range(3)]
        for seq in (4, 5, 6):
            daemon.drop()
            await anyio.to_thread.run_sync(daemon.publish, event(seq, "text", {"text": "x"}))
            seen.append((await anext(follow)).seq)

    cursors = [asked.after for asked in daemon.asked("follow_events")]
    assert seen == [1, 2, 3, 4, 5, 6]
    assert cursors == sorted(cursors)
    assert {asked.journal for asked in daemon.asked("follow_events")[1:]} == {"j-1"}


async def test_a_follower_that_was_too_slow_comes_back(daemon: FakeDaemon) -> None:
    """If hutchd ends a slow follow, the client continues after the last event that it received."""
    daemon.events = _texts(1, 2)  # type: ignore[assignment]

    async with _following() as (_, follow):
        first = (await anext(follow)).seq
        daemon.tell("follow_ended", m.FollowEnded(7, "too_slow", "You are too slow.", 1))
        await anyio.to_thread.run_sync(daemon.wait, lambda: len(daemon.asked("follow_events")) == 2)
        daemon.publish(event(2, "text", {"text": "2"}))
        second = (await anext(follow)).seq

    assert (first, second) == (1, 2)


async def test_a_follow_ends_with_its_session(daemon: FakeDaemon) -> None:
    """The iteration ends when the session is removed."""
    async with _following() as (_, follow):
        daemon.tell("follow_ended", m.FollowEnded(7, "session_removed", "It was removed.", 0))

        assert [one async for one in follow] == []


async def test_a_replaced_journal_is_an_error(daemon: FakeDaemon) -> None:
    """The follow raises an error, both at its start and after a lost connection."""
    with pytest.raises(HutchError) as at_start:
        async with _following(journal="j-0"):
            pass
    async with _following() as (_, follow):
        daemon.journal = "j-2"
        daemon.drop()
        with pytest.raises(HutchError) as later:
            await anext(follow)

    assert (at_start.value.reason, later.value.reason) == (Reason.JOURNAL_REPLACED, Reason.JOURNAL_REPLACED)


async def test_a_follow_reports_when_hutchd_is_away_and_back(daemon: FakeDaemon) -> None:
    """`on_connection` is called once for each, and not at all if the connection is back at once."""
    there = daemon.answers["get_version"]
    told: list[bool] = []
    away = anyio.Event()

    def refuse(_: object) -> m.Version:
        raise HutchError(Reason.SHUTTING_DOWN)

    def tell(is_there: bool) -> None:
        told.append(is_there)
        away.set()

    async with HutchClient.connect() as hutch, hutch.follow(m.FollowEvents(SESSION.id), tell) as follow:
        daemon.drop()
        daemon.publish(event(1, "text", {"text": "1"}))
        await anext(follow)
        daemon.answers["get_version"] = refuse
        daemon.drop()
        await away.wait()
        daemon.answers["get_version"] = there
        daemon.publish(event(2, "text", {"text": "2"}))
        await anext(follow)

    assert told == [False, True]


async def test_a_follow_gives_up_when_hutchd_stays_away(daemon: FakeDaemon) -> None:
    """The follow raises CONNECTION_LOST after `redial_for` seconds."""

    def refuse(_: object) -> m.Version:
        raise HutchError(Reason.SHUTTING_DOWN)

    async with (
        HutchClient.connect(redial_for=0.0) as hutch,
        hutch.follow(m.FollowEvents(SESSION.id)) as follow,
    ):
        daemon.answers["get_version"] = refuse
        daemon.drop()
        with pytest.raises(HutchError) as lost:
            await anext(follow)

    assert lost.value.reason is Reason.CONNECTION_LOST


async def test_the_client_answers_pings(daemon: FakeDaemon) -> None:
    """The client answers pings while no call is in progress."""
    async with HutchClient.connect():
        daemon.ping_all()
        await anyio.to_thread.run_sync(daemon.wait, lambda: daemon.pongs == 1)

    assert daemon.pongs == 1

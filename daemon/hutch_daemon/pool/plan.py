"""Plans the pool's next actions: `plan(state, now)` returns the actions that are due, and when to plan again. Pure.

The pool plans whenever its state changes, at the plan's `look_at`, and every few seconds (`look_interval`). Carrying
out a plan changes the state, so the pool plans again, until no action is due. The rules:

- Executors that are silent, lost, given up, idle or surplus are ended. Quarantined executors are checked again.
- An outdated executor without a session is ended: it was made of other limits, groups or files than one made now.
- A waiting lease gets a ready executor of its key; the oldest lease comes first.
- The leases of a key that failed to start too often are refused for a while. While hutchd stops, all are refused.
- For a lease without a starting executor, one is started if there is space. If there is none, a spare of another key is
  ended, or the executor that has been idle longest. If an executor is already ending, the lease waits for its space.
- Spares are started last: one at a time for each key, and only if there is space.

At most `starts_at_once` executors start at the same time, and only a quarter of that for each account other than
hutchd's, so that a failing account does not starve the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from hutch_daemon.pool.start_history import NO_FAILURES
from hutch_daemon.pool.view import ExecutorKey, ExecutorView, LeaseView, PoolPlan, PoolState, Retirement
from hutch_daemon.settings import ExecutorSettings

__all__ = ["look_interval", "plan"]

_INTERVAL: Final = 5.0
_SHORTEST_INTERVAL: Final = 0.05


def plan(state: PoolState, now: float) -> PoolPlan:
    """Return the actions that are due in this state at the time `now`."""
    overdue = _overdue(state, now)
    check = tuple(one.id for one in state.executors if _is_check_due(state, one, now))
    look_at = _look_at(state, now)
    if state.stopping:
        return PoolPlan(overdue, check, refuse=tuple(lease.number for lease in state.leases), look_at=look_at)
    ending = {one.executor for one in overdue}
    hand_out = _hand_out(state, ending)
    served = dict(hand_out)
    overdue = (*overdue, *_surplus(state, ending | set(served.values())))
    ending = {one.executor for one in overdue}
    waiting = [lease for lease in state.leases if lease.number not in served]
    refused = [lease for lease in waiting if _is_blocked(state, lease.key, now)]
    waiting = [lease for lease in waiting if lease not in refused]
    starts, evicted = _starts(state, waiting, ending, set(served.values()), now)
    return PoolPlan(
        retire=(*overdue, *evicted),
        check=check,
        hand_out=tuple(hand_out),
        refuse=tuple(lease.number for lease in refused),
        start=tuple(starts),
        abandon=tuple(_unneeded(state, waiting, ending | set(served.values()))),
        look_at=look_at,
    )


def look_interval(settings: ExecutorSettings) -> float:
    """Return the most seconds between two plans."""
    return max(_SHORTEST_INTERVAL, min(_INTERVAL, settings.heartbeat_timeout / 4, settings.lost_timeout / 4))


# ---------------------------------------------------------------- time


def _overdue(state: PoolState, now: float) -> tuple[Retirement, ...]:
    """Return the executors to end because a timeout has passed, or because they are outdated."""
    return tuple(retired for one in state.executors if (retired := _timed_out(state, one, now)) is not None)


def _surplus(state: PoolState, taken: set[str]) -> Iterator[Retirement]:
    """Return the ready executors above the number of spares that the settings ask for, the newest first."""
    ready = Counter(one.key for one in state.executors if one.state == "ready" and one.id not in taken)
    for one in reversed(state.executors):
        if one.state == "ready" and one.id not in taken and ready[one.key] > state.most_spares(one.key):
            ready[one.key] -= 1
            yield Retirement(one.id, "no session needed it", 2.0)


def _timed_out(state: PoolState, one: ExecutorView, now: float) -> Retirement | None:
    settings = state.settings
    if one.state == "ready" and one.outdated:
        return Retirement(one.id, "the settings, its account or Hutch's files changed after its start", 2.0)
    if one.state in ("ready", "leased") and now - one.last_seen >= settings.heartbeat_timeout:
        return Retirement(one.id, f"it was silent for {settings.heartbeat_timeout:.0f} s")
    if one.state == "starting" and now - one.since >= settings.hello_timeout + settings.lost_timeout:
        return Retirement(one.id, "its start was given up")
    if one.state == "detached" and now - one.since >= settings.lost_timeout:
        return Retirement(one.id, f"it had no connection for {settings.lost_timeout:.0f} s")
    if one.state == "leased" and one.idle_since is not None and now - one.idle_since >= settings.idle_timeout:
        return Retirement(one.id, "its session was idle", 5.0)
    if one.state == "ready" and now - one.since >= settings.idle_timeout and not state.wants_spares(one.key):
        return Retirement(one.id, "no session needed it", 2.0)
    return None


def _is_check_due(state: PoolState, one: ExecutorView, now: float) -> bool:
    return one.state == "quarantined" and not one.checking and _check_at(state, one) <= now


def _check_at(state: PoolState, one: ExecutorView) -> float:
    return one.checked + look_interval(state.settings)


def _look_at(state: PoolState, now: float) -> float:
    """Return the earliest time at which the plan can differ although the state is the same."""
    times = (at for at in _times(state) if at > now)
    return min(times, default=now + look_interval(state.settings))


def _times(state: PoolState) -> Iterator[float]:
    settings = state.settings
    for one in state.executors:
        if one.state in ("ready", "leased"):
            yield one.last_seen + settings.heartbeat_timeout
        if one.state == "ready":
            yield one.since + settings.idle_timeout
        if one.state == "leased" and one.idle_since is not None:
            yield one.idle_since + settings.idle_timeout
        if one.state == "starting":
            yield one.since + settings.hello_timeout + settings.lost_timeout
        if one.state == "detached":
            yield one.since + settings.lost_timeout
        if one.state == "quarantined":
            yield _check_at(state, one)
    for lease in state.leases:
        yield state.retry_at(lease.key)
    for key in state.kept:
        yield max(state.retry_at(key), state.spare_at.get(key, 0.0))


# ---------------------------------------------------------------- leases and starts


def _hand_out(state: PoolState, ending: set[str]) -> list[tuple[int, str]]:
    ready = [one for one in state.executors if one.state == "ready" and one.id not in ending]
    found: list[tuple[int, str]] = []
    for lease in state.leases:
        if (one := next((one for one in ready if one.key == lease.key), None)) is not None:
            ready.remove(one)
            found.append((lease.number, one.id))
    return found


def _is_blocked(state: PoolState, key: ExecutorKey, now: float) -> bool:
    history = state.histories.get(key, NO_FAILURES)
    return history.blocked(state.settings.start_attempts) and state.retry_at(key) > now


class _Room:
    """Counts how many more executors may be started, in all and per account, including the starts planned so far."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._count = len(state.executors)
        self._of_account = Counter(one.key.uid for one in state.executors)
        self._starting = Counter(one.key.uid for one in state.executors if one.launching)
        self._memory = sum(one.rss for one in state.executors)

    def is_full(self) -> bool:
        """Return whether no account may have another executor."""
        settings = self._state.settings
        return self._count >= settings.maximum or (settings.memory is not None and self._memory >= settings.memory)

    def has_place(self, uid: int) -> bool:
        """Return whether an account may have another executor."""
        limit = self._state.account_limit
        return not self.is_full() and (limit is None or self._of_account[uid] < limit)

    def may_start(self, uid: int) -> bool:
        """Return whether a start for an account may begin now."""
        at_once = self._state.starts_at_once
        share = at_once if uid == self._state.own_uid else max(1, at_once // 4)
        return self._starting.total() < at_once and self._starting[uid] < share

    def take(self, uid: int) -> None:
        """Count a planned start."""
        self._count += 1
        self._of_account[uid] += 1
        self._starting[uid] += 1


def _starts(
    state: PoolState, waiting: Iterable[LeaseView], ending: set[str], served: set[str], now: float
) -> tuple[list[ExecutorKey], list[Retirement]]:
    """Return the keys to start, for leases first and then for spares, and the executors to end to make room."""
    room = _Room(state)
    on_their_way = Counter(
        one.key
        for one in state.executors
        if one.launching and ((one.state == "starting" and not one.outdated) or one.over)
    )
    makes_room = {one.id for one in state.executors if one.state == "draining"} | ending
    starts: list[ExecutorKey] = []
    evicted: list[Retirement] = []
    for lease in waiting:
        key, uid = lease.key, lease.key.uid
        if on_their_way[key] > 0:
            on_their_way[key] -= 1
        elif state.retry_at(key) > now:
            continue
        elif not room.has_place(uid):
            among = [one for one in state.executors if room.is_full() or one.key.uid == uid]
            if (one := next((one for one in among if one.id in makes_room), None)) is not None:
                makes_room.remove(one.id)  # this lease waits for the slot of that executor
            elif (one := _victim(among, key, ending | served | {one.executor for one in evicted})) is not None:
                evicted.append(Retirement(one.id, "its slot was needed", 2.0 if one.state == "ready" else 5.0))
        elif room.may_start(uid):
            room.take(uid)
            starts.append(key)
    gone = ending | served | {one.executor for one in evicted}
    starts += _spares(state, room, starts, gone, now)
    return starts, evicted


def _spares(state: PoolState, room: _Room, starts: list[ExecutorKey], gone: set[str], now: float) -> list[ExecutorKey]:
    """Return the keys for which to start a spare, given the `starts` for leases."""
    found: list[ExecutorKey] = []
    for key in state.kept:
        spares = [one for one in state.executors if one.key == key and one.session is None and not one.over]
        spares = [one for one in spares if one.id not in gone and not one.outdated]
        if not state.wants_spares(key) or len(spares) >= state.settings.spares:
            continue
        if key in starts or any(one.state == "starting" for one in spares):
            continue
        uid, at = key.uid, max(state.retry_at(key), state.spare_at.get(key, 0.0))
        if at <= now and room.has_place(uid) and room.may_start(uid):
            room.take(uid)
            found.append(key)
    return found


def _victim(among: Iterable[ExecutorView], key: ExecutorKey, taken: set[str]) -> ExecutorView | None:
    """Return the executor to end for a lease of `key`: a spare of another key, or the one that is idle longest."""
    free = [one for one in among if one.id not in taken]
    spare = next((one for one in free if one.state == "ready" and one.key != key), None)
    idle = (one for one in free if one.state == "leased" and one.idle_since is not None)
    return spare or min(idle, key=lambda one: one.idle_since or 0.0, default=None)


def _unneeded(state: PoolState, waiting: Iterable[LeaseView], ending: set[str]) -> Iterator[str]:
    """Return the starts that are outdated, and the newest that neither a lease nor the number of spares needs."""
    needed = Counter(lease.key for lease in waiting)
    ready = Counter(one.key for one in state.executors if one.state == "ready" and one.id not in ending)
    for key in {one.key for one in state.executors}:
        if state.wants_spares(key):
            needed[key] += max(0, state.settings.spares - ready[key])
    for one in state.executors:
        if one.state == "starting" and one.id not in ending:
            needed[one.key] -= not one.outdated
            if one.outdated or needed[one.key] < 0:
                yield one.id

"""Stops hutchd, in whatever state it is, and reports what runs on.

A hutchd that answers is asked. One that is starting and has opened nothing yet is ended with SIGTERM; otherwise it is
asked as soon as it answers. One that runs and cannot be reached gets SIGTERM after a while. One that restores a backup
is named and left alone. Nothing is sent to a process that is not found by a lock, or by its recorded pid and start
time.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Final, NamedTuple

from hutch_client.blocking import BlockingConnection
from hutch_client.endpoint import find_endpoint, own_state
from hutch_shared.errors import HutchError, Reason
from hutch_shared.hutchd_lock import find_hutchd
from hutch_shared.process_record import BROKER, RecordedProcess, read_record
from hutch_shared.processes import start_time

__all__ = ["Stopped", "end_processes", "stop"]

_GRACE: Final = 30.0
"""Seconds beyond the time for draining, because closing takes a while."""
_UNREACHABLE: Final = 3.0
"""Seconds that a running hutchd gets to become reachable: it binds a lost socket again within one."""
_SETTLE: Final = 3.0
"""Seconds that the broker and the executors that hutchd ended get to be gone."""
_SETTLE_SERVING: Final = 0.5
"""The same for the broker while executors of sessions run on: it ends now only if none of them has a lease."""
_TERM: Final = 10.0
"""Seconds that an executor gets after SIGTERM to stop its turn."""
_KILL: Final = 2.0
_BETWEEN: Final = 0.02


class Stopped(NamedTuple):
    """The result of a stop."""

    ran: bool
    """Whether a hutchd ran, or was starting."""
    left: list[RecordedProcess]
    """The processes of Hutch that are known and still run."""


def stop(how: str, timeout: float) -> Stopped:
    """Stop hutchd as its method `stop_daemon` does with `how`, draining for `timeout` seconds; wait for its end.

    HutchError: CONNECTION_LOST, with the pid, for a hutchd that cannot be stopped; TIMED_OUT if it still runs.
    """
    path = find_endpoint().socket
    ran = asked = False
    begin = time.monotonic()
    known: list[RecordedProcess] = []
    while True:
        try:
            with BlockingConnection(path) as hutch:
                known += _ask(hutch, how, timeout)
            ran = True
            break
        except HutchError as error:
            state = own_state(path) if error.reason is Reason.CONNECTION_LOST else None
            if state is None:
                raise
            found = find_hutchd(state)
            waited = time.monotonic() - begin
            if found is None and "pid" in error.details:
                raise  # it lives, and the caller may not read its locks
            if found is None:
                known = read_record(state)
                break
            if found.state in ("stopped", "restoring") or (
                found.holds_database and not found.pid and waited > _UNREACHABLE
            ):
                raise
            ran = True
            if found.pid and not asked and (not found.holds_database or waited > _UNREACHABLE):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(found.pid, signal.SIGTERM)
                asked = True
            if waited > timeout + _GRACE:
                raise HutchError(Reason.TIMED_OUT, f"hutchd (pid {found.pid}) still runs.") from None
        time.sleep(_BETWEEN)
    if ran:  # otherwise nothing is ending them
        staying = [one for one in known if one.session and how != "stop"]
        broker = [one for one in known if one.name == BROKER and staying]
        _wait_gone([one for one in known if one not in (*staying, *broker)], _SETTLE)
        _wait_gone(broker, _SETTLE_SERVING)
    return Stopped(ran, [one for one in known if one.lives])


def _ask(hutch: BlockingConnection, how: str, timeout: float) -> list[RecordedProcess]:
    """Stop a hutchd that answers, and wait for its end; return the processes that it had before."""
    status = hutch.call("get_status")
    hutchd = _recorded("hutchd", status["pid"])
    known = []
    is_visible = hutch.server_pid() == status["pid"]  # otherwise its pids are those of another pid namespace
    if is_visible:
        executors = status.get("executors", ())
        known = [_recorded(f"executor {one['id']}", one["pid"], one.get("session") or "") for one in executors]
        known.append(_recorded(BROKER, (status.get("broker") or {}).get("pid", 0)))
    hutch.call("stop_daemon", how=how, timeout=timeout)
    if not hutch.wait_closed(timeout + _GRACE):
        raise HutchError(
            Reason.TIMED_OUT,
            f"hutchd (pid {status['pid']}) still runs. `hutch daemon status` shows what it waits for, and"
            " `hutch daemon stop --stop` stops running turns.",
        )
    hutch.close()  # hutchd waits a while for its clients to do so
    if is_visible:
        _wait_gone([hutchd], _GRACE)
    return [one for one in known if one.lives]


def _recorded(name: str, pid: int, session: str = "") -> RecordedProcess:
    """Return a process as it is now; one that does not exist gets a start time that no process has."""
    started = start_time(pid) if pid > 0 else None
    return RecordedProcess(name, pid, -1 if started is None else started, session)


def end_processes(processes: list[RecordedProcess]) -> list[RecordedProcess]:
    """End processes that a hutchd which is gone has left; return those that still run.

    An executor gets SIGTERM and some seconds: it stops its turn and keeps the events for the next hutchd. Whatever is
    left gets SIGKILL. A process that the caller may not end is left alone.
    """
    for number, seconds in ((signal.SIGTERM, _TERM), (signal.SIGKILL, _KILL)):
        for one in processes:
            with suppress(ProcessLookupError, PermissionError):
                if one.lives:
                    os.kill(one.pid, number)
        _wait_gone(processes, seconds)
    return [one for one in processes if one.lives]


def _wait_gone(processes: list[RecordedProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(one.lives for one in processes) and time.monotonic() < deadline:
        time.sleep(_BETWEEN)

"""The gate: every method × caller × phase has an answer, and the default is no."""

from __future__ import annotations

import pytest

from hutch_daemon.api.gate import CLIENT_GATE, EXECUTOR_GATE, Phase, admit_client, admit_executor
from hutch_daemon.conductor.callers import Caller
from hutch_shared.errors import HutchError
from hutch_shared.methods import CLIENT, EXECUTOR

DAEMON = 500
OPERATING = ("rotate_master_key", "stop_daemon", "backup_store")
CALLERS = {
    "person": Caller(uid=1000, gid=1000, pid=1),
    "insider": Caller(uid=1000, gid=1000, pid=1, insider="x-1"),
    "admin": Caller(uid=1001, gid=1001, pid=1, admin=True),
    "insider as root": Caller(uid=0, gid=0, pid=1, admin=True, insider="x-1"),
    "hutchd's own account": Caller(uid=DAEMON, gid=DAEMON, pid=1),
}


def test_every_method_has_a_row() -> None:
    """The tables name exactly the methods of the wire."""
    assert set(CLIENT_GATE) == set(CLIENT)
    assert set(EXECUTOR_GATE) == set(EXECUTOR)


@pytest.mark.parametrize("method", CLIENT)
@pytest.mark.parametrize("who", CALLERS)
@pytest.mark.parametrize("phase", Phase)
def test_each_cell(method: str, who: str, phase: Phase) -> None:
    """What changes is closed to insiders, what operates is for operators, what begins is not while draining."""
    caller = CALLERS[who]
    expected = None
    if caller.insider and CLIENT[method].changes:
        expected = "insider"
    elif method in OPERATING and who == "person":
        expected = "not_allowed"
    elif phase is Phase.DRAINING and method in ("open_session", "submit_prompt", "fork_session"):
        expected = "shutting_down"

    try:
        admit_client(method, caller, daemon_uid=DAEMON, phase=phase)
        said = None
    except HutchError as error:
        said = error.reason.word

    assert said == expected


def test_an_unknown_method_is_refused() -> None:
    """A method without a row is closed, even to root."""
    with pytest.raises(HutchError, match="not"):
        admit_client("make_coffee", Caller(uid=0, gid=0, pid=1, admin=True), daemon_uid=0, phase=Phase.SERVING)


@pytest.mark.parametrize("method", EXECUTOR)
@pytest.mark.parametrize(
    ("executor", "leased", "session"),
    [(None, None, None), (None, None, "s-1"), ("x-1", None, "s-1"), ("x-1", "s-2", "s-1"), ("x-1", "s-1", "s-1")],
)
def test_each_executor_cell(method: str, executor: str | None, leased: str | None, session: str | None) -> None:
    """Before hello there is only hello; after it an executor speaks for the session of its lease and for no other."""
    open_to_all = method in ("ping", "hello")
    about_a_session = method in ("get_api_key", "request_permission", "report_message")
    expected = None
    if not open_to_all and executor is None:
        expected = "hello_first"
    elif about_a_session and (leased is None or leased != session):
        expected = "lease_lost"

    try:
        admit_executor(method, executor=executor, leased=leased, session=session)
        said = None
    except HutchError as error:
        said = error.reason.word

    assert said == expected

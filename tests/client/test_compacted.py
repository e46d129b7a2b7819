"""Events that are no longer kept: the command reports that and continues with the oldest kept event."""

from __future__ import annotations

import json

import msgspec
import pytest

from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Text, TurnEnded
from tests.client.conftest import Hutch
from tests.client.fake_daemon import SESSION, TURN, FakeDaemon, event

OLDEST = 41
SAYS = f"hutch: Events before {OLDEST} are no longer kept.\n"


@pytest.fixture(autouse=True)
def pruned(daemon: FakeDaemon) -> None:
    """A hutchd that keeps two events of a session, with the numbers 41 and 42."""
    kept = [event(OLDEST, "text", Text("left")), event(42, "turn_ended", TurnEnded("completed", "done", "Done."))]
    daemon.events = kept

    def refuse_old(after: int) -> None:
        if after < OLDEST - 1:
            raise HutchError(Reason.COMPACTED, f"Events before {OLDEST} are no longer kept.", oldest=OLDEST)

    def read(params: m.ReadEvents) -> m.EventsPage:
        refuse_old(params.after)
        return m.EventsPage(tuple(msgspec.Raw(msgspec.json.encode(one)) for one in kept), "j-1", 42, more=False)

    def follow(params: m.FollowEvents) -> m.Following:
        refuse_old(params.after)
        return m.Following(7, "j-1", 42, OLDEST)

    daemon.answers |= {"read_events": read, "follow_events": follow}


def test_logs_begin_with_the_oldest_kept_event(hutch: Hutch) -> None:
    """The command reports on standard error that events are missing."""
    code, out, err = hutch("logs", SESSION.id, "-o", "jsonl")

    assert code == 0
    assert [json.loads(line)["seq"] for line in out.splitlines()] == [OLDEST, 42]
    assert err == SAYS


def test_a_follow_continues_with_the_oldest_kept_event(daemon: FakeDaemon, hutch: Hutch) -> None:
    """`run` does the same in a session whose cursor is too old."""
    daemon.answers["submit_prompt"] = TURN

    code, out, err = hutch("run", "--session", SESSION.id, "-o", "jsonl", "go on")

    assert code == 0
    assert [json.loads(line)["seq"] for line in out.splitlines()] == [OLDEST, 42]
    assert SAYS in err

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from hutch_client.since import FORMS, read_since
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.client.conftest import Hutch
from tests.client.fake_daemon import FakeDaemon

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=timezone(timedelta(hours=2)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h", "2026-01-31T08:00:00.000Z"),
        ("30 min", "2026-01-31T09:30:00.000Z"),
        ("5m", "2026-01-31T09:55:00.000Z"),
        ("7d", "2026-01-24T10:00:00.000Z"),
        ("2w ago", "2026-01-17T10:00:00.000Z"),
        ("2026-01-31T00:00:00Z", "2026-01-31T00:00:00.000Z"),
        ("2026-01-31T00:00:00.5+01:00", "2026-01-30T23:00:00.500Z"),
    ],
)
def test_a_time_may_be_relative_or_absolute(text: str, expected: str) -> None:
    """The time may be relative or absolute; hutchd gets RFC 3339."""
    assert read_since(text, NOW) == expected


@pytest.mark.parametrize(
    ("text", "local"), [("today", "2026-01-31"), ("Yesterday", "2026-01-30"), ("2026-01-02", "2026-01-02")]
)
def test_a_day_begins_at_local_midnight(text: str, local: str) -> None:
    """A date without a time means local midnight too."""
    now = datetime.fromisoformat("2026-01-31T12:00:00").astimezone()

    begins = datetime.fromisoformat(read_since(text, now))

    assert begins == datetime.fromisoformat(local).astimezone()


@pytest.mark.parametrize("text", ["", "last week", "2x", "-2h", "2026-13-01", "999999w", "0001-01-01"])
def test_an_invalid_time_is_refused_with_the_valid_forms(text: str) -> None:
    """Every other text is refused."""
    with pytest.raises(HutchError) as refused:
        read_since(text, NOW)

    assert refused.value.reason is Reason.INVALID_PARAMS
    assert refused.value.message == f"`{text}` is not a time that `hutch` understands. Give {FORMS}."


def test_usage_and_audit_take_such_times(daemon: FakeDaemon, hutch: Hutch) -> None:
    """Other texts are refused before hutchd is called."""
    daemon.answers |= {"get_usage": m.UsageTable(()), "read_audit": m.AuditPage((), more=False)}

    codes = [hutch(name, "--since", since)[0] for name in ("usage", "audit") for since in ("yesterday", "whenever")]

    assert codes == [0, 2, 0, 2]
    assert [asked.since[-1] for name in ("get_usage", "read_audit") for asked in daemon.asked(name)] == ["Z", "Z"]

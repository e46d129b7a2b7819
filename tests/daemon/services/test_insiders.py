"""Finding the executor that a calling process belongs to."""

from __future__ import annotations

import pytest

from hutch_daemon.services.access import insider_of
from hutch_shared.errors import HutchError, Reason

EXECUTORS = {100: "x-1", 200: "x-2"}


@pytest.mark.parametrize(
    ("groups", "line", "marks", "found"),
    [
        ((), [500, 400, 1], {}, None),
        (("hutch.service", "hutch-x-2"), [500, 1], {}, "x-2"),
        (("hutch-x-other", "x-2"), [500, 1], {}, None),
        ((), [500, 100, 1], {}, "x-1"),
        ((), [100, 1], {}, "x-1"),
        ((), [500, 1], {500: "x-1"}, "x-1"),
        ((), [500, 499, 1], {499: "x-2"}, "x-2"),
        ((), [500, 1], {500: "x-gone"}, None),
        (("hutch-x-2",), [500, 100, 1], {500: "x-1"}, "x-2"),
    ],
)
def test_a_process_is_found_by_cgroup_descent_or_mark(
    groups: tuple[str, ...], line: list[int], marks: dict[int, str], found: str | None
) -> None:
    """They are tried in this order; the mark may be an ancestor's. Only live executors of this hutchd count."""
    assert (
        insider_of(500, EXECUTORS, line=lambda _: line, mark=lambda pid, _: marks.get(pid), group=lambda _: groups)
        == found
    )


def test_an_unidentifiable_process_is_refused() -> None:
    """A process that has ended, or whose ancestors keep changing, may belong to a session."""
    with pytest.raises(HutchError) as refused:
        insider_of(500, EXECUTORS, line=lambda pid: [] if pid == 500 else [pid, 1], mark=lambda *_: None, group=_none)

    assert refused.value.reason is Reason.NOT_ALLOWED


def _none(_: int) -> tuple[str, ...]:
    return ()

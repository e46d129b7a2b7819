"""When a failed start may be tried again."""

from __future__ import annotations

from hutch_daemon.pool.start_history import NO_FAILURES

LIMIT, WINDOW = 4, 60.0


def test_a_failure_delays_the_next_start_by_its_pause() -> None:
    """Without a failure, the next start may be tried at once."""
    assert NO_FAILURES.not_before(LIMIT, WINDOW) == 0.0
    assert NO_FAILURES.failed(100.0, "no", WINDOW, 0.25).not_before(LIMIT, WINDOW) == 100.25


def test_the_limit_blocks_until_the_oldest_counted_failure_leaves_the_window() -> None:
    """Then one start may be tried; failures before the window do not count."""
    history = NO_FAILURES
    for now in (100.0, 101.0, 102.0, 103.0):
        assert not history.blocked(LIMIT)
        history = history.failed(now, "no", WINDOW, 0.25)

    assert history.blocked(LIMIT)
    assert history.not_before(LIMIT, WINDOW) == 160.0
    assert history.error == "no"
    assert not history.failed(200.0, "no", WINDOW, 0.25).blocked(LIMIT)

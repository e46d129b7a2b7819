"""The latch: wakes a waiting task, keeps a notification that comes too early, and counts many as one."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hutch_shared.latch import Latch


async def returns_at_once(latch: Latch) -> bool:
    with anyio.move_on_after(0.01) as scope:
        await latch.wait()
    return not scope.cancelled_caught


async def test_a_waiting_task_is_woken() -> None:
    """`wait` returns after `notify`."""
    latch = Latch()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(latch.wait)
        await anyio.wait_all_tasks_blocked()
        assert repr(latch) == "<Latch clear, 1 waiting>"
        latch.notify()

    assert repr(latch) == "<Latch clear, 0 waiting>"


async def test_a_notification_before_the_wait_is_kept() -> None:
    """A notification between a look and its wait is not lost."""
    latch = Latch()
    latch.notify()

    assert await returns_at_once(latch)


async def test_many_notifications_count_as_one() -> None:
    """The first `wait` uses up all of them."""
    latch = Latch()
    for _ in range(3):
        latch.notify()

    assert await returns_at_once(latch)
    assert not await returns_at_once(latch)


async def test_a_notification_that_wakes_a_task_is_used_up() -> None:
    """The next `wait` does not return because of it."""
    latch = Latch()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(latch.wait)
        await anyio.wait_all_tasks_blocked()
        latch.notify()

    assert not await returns_at_once(latch)


async def test_all_waiting_tasks_are_woken() -> None:
    """Each task looks again; those that find nothing wait again."""
    latch = Latch()
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(latch.wait)
        await anyio.wait_all_tasks_blocked()
        latch.notify()

    assert repr(latch) == "<Latch clear, 0 waiting>"


@pytest.mark.parametrize("cancelled_first", [False, True])
async def test_a_cancelled_wait_loses_no_notification(cancelled_first: bool) -> None:
    """A task that is cancelled while it is woken either returns or leaves the notification."""
    latch = Latch()
    returned: list[bool] = []

    async def waiter() -> None:
        await latch.wait()
        returned.append(True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waiter)
        await anyio.wait_all_tasks_blocked()
        if cancelled_first:
            tasks.cancel_scope.cancel()
        latch.notify()
        tasks.cancel_scope.cancel()

    assert [*returned, *([True] if await returns_at_once(latch) else [])] == [True]


async def test_a_cancelled_wait_without_a_notification_leaves_none() -> None:
    """A wait that timed out changes nothing."""
    latch = Latch()

    assert not await returns_at_once(latch)
    assert repr(latch) == "<Latch clear, 0 waiting>"


@pytest.mark.parametrize("pauses", range(4))
async def test_a_loop_that_looks_and_waits_sees_each_change(pauses: int) -> None:
    """Wherever the changes fall between the loop's steps, the loop sees the last one."""
    latch = Latch()
    state = seen = 0

    async def loop() -> None:
        nonlocal seen
        while seen < 50:
            looked_at = state
            for _ in range(pauses):  # stands for a slow look, such as a read of the store
                await checkpoint()
            seen = looked_at
            if seen < 50:
                await latch.wait()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop)
            for number in range(1, 51):
                state = number
                latch.notify()
                if number % 3:
                    await checkpoint()

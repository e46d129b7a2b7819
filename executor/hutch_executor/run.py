"""An executor's process from its boot line to its end.

All that a session will need is imported before the first `hello`, so that files replaced under it do not matter.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from typing import Final

import anyio
from anyio import to_thread

from hutch_executor.account.environment import scrub_environment
from hutch_executor.link.boot import read_boot
from hutch_executor.process.children import Zombies, kill_descendants
from hutch_executor.process.hardening import replace_stdin
from hutch_executor.process.memory import limit_memory
from hutch_executor.runners.port import AgentRunner
from hutch_executor.runners.registry import load_runner
from hutch_executor.sandbox.plan import try_all
from hutch_executor.worker import Worker
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from hutch_shared.logs import LEVELS, set_up_logs
from hutch_shared.rpc import dispatch

__all__ = ["live"]

_LEAVE_DEADLINE: Final = 60.0
_SWEEP_DEADLINE: Final = 3.0
_REAP_EVERY: Final = 5.0
_THREADS: Final = (3, 5.0, 0.005)
"""Threads that are kept at hand, how often they are used for it (those idle for 10 s end), and how long; seconds."""

_log: Final = logging.getLogger(__name__)


def live() -> int:
    """Read the boot line, serve hutchd to the end, leave no process behind; return the exit code."""
    scrub_environment()
    level = os.environ.get("HUTCH_LOG_LEVEL", "")
    set_up_logs(level if level in LEVELS else "info")
    try:
        boot = read_boot(0)
        if boot.trial is not None:
            with suppress(OSError):  # hutchd no longer waits for the result
                os.write(0, try_all(boot.trial, os.path.expanduser("~")) + b"\n")
            return 0
        replace_stdin()
        runner = load_runner(boot.agent)
        runner.preload()
    except HutchError as error:
        _log.error("cannot start: %s", error.message)
        return 2
    assert dispatch, "imported, so that it is there when the first request comes"
    if boot.memory_limit is not None:
        limit_memory(boot.memory_limit)
    gc.freeze()
    anyio.run(_live, boot, runner)
    return 0


async def _live(boot: m.Boot, runner: type[AgentRunner]) -> None:
    """Serve, listen to signals, take ended orphans away; at the end leave no process behind."""
    worker = Worker(boot, runner(), sweep=_sweep)
    is_leaving = threading.Event()
    threading.Thread(target=_make_sure, args=(is_leaving,), daemon=True).start()
    async with anyio.create_task_group() as group:
        group.start_soon(_listen, worker)
        group.start_soon(_reap)
        group.start_soon(_keep_threads)
        group.start_soon(_watch_leaving, worker, is_leaving)
        await worker.serve()
        group.cancel_scope.cancel()
    await _sweep()


async def _sweep() -> None:
    if left := await kill_descendants(_SWEEP_DEADLINE):
        _log.error("processes are left over: %s", left)


async def _listen(worker: Worker) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            worker.leave(f"it got {number.name}")


async def _reap() -> None:
    zombies = Zombies()
    while True:
        await anyio.sleep(_REAP_EVERY)
        zombies.reap()


async def _keep_threads() -> None:
    """Keep some threads: in a session that has as many processes as it may, none could be started to spool with."""
    count, every, use = _THREADS
    while True:
        try:
            async with anyio.create_task_group() as group:
                for _ in range(count):
                    group.start_soon(to_thread.run_sync, time.sleep, use)
        except* RuntimeError:  # it has as many already
            pass
        await anyio.sleep(every)


async def _watch_leaving(worker: Worker, is_leaving: threading.Event) -> None:
    await worker.wait_leaving()
    is_leaving.set()


def _make_sure(is_leaving: threading.Event) -> None:
    """Make sure of the end, even when the event loop hangs by then."""
    is_leaving.wait()
    time.sleep(_LEAVE_DEADLINE)
    os._exit(3)

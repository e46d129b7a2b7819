"""The process of an executor, from its boot line to its end.

Everything that a session needs is imported before the first `hello`, so files replaced later do not matter.
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
from hutch_executor.methods import HANDLERS
from hutch_executor.process.children import Zombies, kill_descendants
from hutch_executor.process.hardening import replace_stdin
from hutch_executor.process.memory import limit_memory, limit_open_files
from hutch_executor.process.reaper import Reaper
from hutch_executor.runners.port import AgentRunner
from hutch_executor.runners.registry import load_runner
from hutch_executor.sandbox.probe import probe_networks
from hutch_executor.sandbox.workspace import remove_abandoned
from hutch_executor.worker import Worker
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from hutch_shared.logs import LEVELS, set_up_logs

__all__ = ["run"]

_LEAVE_DEADLINE: Final = 60.0
_SWEEP_DEADLINE: Final = 3.0
_REAP_EVERY: Final = 5.0
_SPARE_THREADS: Final = 3
_USE_THREADS_EVERY: Final = 5.0
"""Seconds between two uses of the spare threads. anyio ends a thread that was idle for 10 s."""
_THREAD_USE: Final = 0.005
"""Seconds that one use keeps a thread busy: long enough that each use gets a thread of its own."""

_log: Final = logging.getLogger(__name__)


def run(reaper: Reaper | None = None) -> int:
    """Read the boot line, serve hutchd to the end and leave no process behind; return the exit code.

    0: left in order. 2: could not start; the log says why. When `reaper` is gone, nothing would end what the executor
    starts, so the executor leaves.
    """
    scrub_environment()
    level = os.environ.get("HUTCH_LOG_LEVEL", "")
    set_up_logs(level if level in LEVELS else "info")
    try:
        boot = read_boot(0)
        if boot.trial is not None:
            with suppress(OSError):  # hutchd no longer waits for the result
                os.write(0, probe_networks(boot.trial, os.path.expanduser("~")) + b"\n")
            return 0
        replace_stdin()
        runner = load_runner(boot.agent)
        runner.preload()
    except HutchError as error:
        _log.error("cannot start: %s", error.message)
        return 2
    if boot.memory_limit is not None:
        limit_memory(boot.memory_limit)
    if boot.open_files is not None:
        limit_open_files(boot.open_files)
    gc.freeze()
    anyio.run(_serve, boot, runner, reaper)
    return 0


async def _serve(boot: m.Boot, runner: type[AgentRunner], reaper: Reaper | None) -> None:
    """Serve hutchd, handle signals and reap orphans; then kill every process that is left."""
    worker = Worker(boot, runner(), sweep=_sweep)
    is_leaving = threading.Event()
    threading.Thread(target=_exit_after_deadline, args=(is_leaving,), daemon=True).start()
    async with anyio.create_task_group() as group:
        group.start_soon(_handle_signals, worker, reaper)
        group.start_soon(_reap)
        group.start_soon(to_thread.run_sync, remove_abandoned)
        group.start_soon(_keep_threads)
        group.start_soon(_watch_leaving, worker, is_leaving)
        await worker.serve(HANDLERS)
        group.cancel_scope.cancel()
    await _sweep()


async def _sweep() -> None:
    if left := await kill_descendants(_SWEEP_DEADLINE):
        _log.error("processes are left over: %s", left)


async def _handle_signals(worker: Worker, reaper: Reaper | None) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        if reaper is not None and reaper.is_gone:  # it ended before signals were received
            worker.leave("its reaper was killed")
        async for number in signals:
            is_alone = reaper is not None and reaper.is_gone
            worker.leave("its reaper was killed" if is_alone else f"it got {number.name}")


async def _reap() -> None:
    zombies = Zombies()
    while True:
        await anyio.sleep(_REAP_EVERY)
        zombies.reap()


async def _keep_threads() -> None:
    """Keep spare threads alive. The spool needs one, and a session at its process limit cannot start it."""
    while True:
        try:
            async with anyio.create_task_group() as group:
                for _ in range(_SPARE_THREADS):
                    group.start_soon(to_thread.run_sync, time.sleep, _THREAD_USE)
        except* RuntimeError:  # at the process limit: the existing threads stay
            pass
        await anyio.sleep(_USE_THREADS_EVERY)


async def _watch_leaving(worker: Worker, is_leaving: threading.Event) -> None:
    await worker.wait_leaving()
    is_leaving.set()


def _exit_after_deadline(is_leaving: threading.Event) -> None:
    """End the process with code 3 if it does not leave in time, even if the event loop hangs."""
    is_leaving.wait()
    time.sleep(_LEAVE_DEADLINE)
    os._exit(3)

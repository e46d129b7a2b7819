"""`python -m hutch_executor`: an executor. It gets its boot line on standard input and dials hutchd.

All that a session will need is imported before the first `hello`, so that files replaced under it do not matter. Exit
codes: 0 it left as it was told to, 2 it could not start, 3 it did not manage to leave in time.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from typing import Final

import anyio

from hutch_executor.boot import read_boot
from hutch_executor.children import Zombies, kill_descendants
from hutch_executor.hardening import harden, replace_stdin, scrub_environment
from hutch_executor.memory import limit_memory
from hutch_executor.runners.port import AgentRunner
from hutch_executor.runners.registry import load_runner
from hutch_executor.worker import Worker
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from hutch_shared.logs import LEVELS, set_up_logs
from hutch_shared.rpc import dispatch

__all__ = ["main"]

_LEAVE_DEADLINE: Final = 60.0
_SWEEP_DEADLINE: Final = 3.0
_REAP_EVERY: Final = 5.0

_log: Final = logging.getLogger(__name__)


def main() -> int:
    """Run an executor to its end; return the exit code."""
    harden()
    scrub_environment()
    level = os.environ.get("HUTCH_LOG_LEVEL", "")
    set_up_logs(level if level in LEVELS else "info")
    try:
        boot = read_boot(0)
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
    worker = Worker(boot, runner())
    async with anyio.create_task_group() as group:
        group.start_soon(_listen, worker)
        group.start_soon(_reap)
        group.start_soon(_watch_leaving, worker)
        await worker.serve()
        group.cancel_scope.cancel()
    left = await kill_descendants(_SWEEP_DEADLINE)
    if left:
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


async def _watch_leaving(worker: Worker) -> None:
    """Make sure of the end, even when the event loop hangs by then."""
    await worker.wait_leaving()
    timer = threading.Timer(_LEAVE_DEADLINE, os._exit, [3])
    timer.daemon = True
    timer.start()


def _exit() -> None:
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # a thread that hangs in a file system must not hold it up


if __name__ == "__main__":
    _exit()

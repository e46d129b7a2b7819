"""`python -m hutch_broker`: hutchd starts it and writes one line to its standard input. No arguments, no files."""

from __future__ import annotations

import gc
import os
import signal
import sys

import anyio
import msgspec

from hutch_shared.broker_link import PROTOCOL, BrokerBoot
from hutch_shared.errors import HutchError, Reason
from hutch_shared.hardening import forbid_dumps, forbid_new_privileges
from hutch_shared.logs import set_up_logs

__all__ = ["main"]

_MAX_BOOT_LINE = 1 << 20


def main() -> int:
    """Serve until SIGTERM or hutchd's `shutdown`. Exit codes: 0 ended, 2 unusable boot line, 3 another broker runs."""
    os.umask(0o077)
    forbid_dumps()
    forbid_new_privileges()
    set_up_logs(os.environ.get("HUTCH_LOG_LEVEL", "info"))
    line = sys.stdin.buffer.readline(_MAX_BOOT_LINE)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        boot = msgspec.json.decode(line, type=BrokerBoot)
    except msgspec.DecodeError:
        sys.stderr.write("hutchd starts hutch-broker, with a boot line on its standard input\n")
        return 2
    if boot.protocol != PROTOCOL:
        return 2
    return anyio.run(_serve, boot)


async def _serve(boot: BrokerBoot) -> int:
    from hutch_broker.broker import serving  # slow to import: first read the boot line that hutchd is writing
    from hutch_broker.prices import load_table

    try:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async with serving(boot) as ended, anyio.create_task_group() as tasks:

                async def end_on_sigterm() -> None:
                    async for number in signals:
                        if number == signal.SIGTERM:
                            ended.set()

                async def freeze_heap() -> None:
                    await load_table()
                    gc.collect()
                    gc.freeze()  # a later collection would scan the price table and stop all streams for tens of ms

                tasks.start_soon(end_on_sigterm)
                tasks.start_soon(freeze_heap)
                await ended.wait()
                tasks.cancel_scope.cancel()
    except HutchError as error:
        if error.reason is Reason.WRONG_STATE:
            return 3
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())

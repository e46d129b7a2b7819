"""Followers that only count events: READERS that read, and STALLED that stop reading.

`followers SOCKET SESSION READERS STALLED`. It prints `ready` once all follow. For each line on standard input it then
waits until every reader has received a turn up to its end, and prints the number of events of each, and the seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Final

_END: Final = b"turn_ended"
_HELLO: Final = (
    b'{"jsonrpc":"2.0","method":"get_version","params":{"protocol":1,"client":"follower"},"id":1}\n'
    b'{"jsonrpc":"2.0","method":"follow_events","params":{"session":"%b","after":-1},"id":2}\n'
)


class Reader(asyncio.BufferedProtocol):
    """A follower. With `stalled` it reads the two answers and nothing more."""

    def __init__(self, session: str, *, stalled: bool) -> None:
        """Follow `session`."""
        self._hello = _HELLO % session.encode()
        self._stalled = stalled
        self._buffer = bytearray(1 << 18)
        self._view = memoryview(self._buffer)
        self._tail = b""
        self._transport: asyncio.Transport
        self.answers = 2
        self.ready = asyncio.Event()
        self.begin()

    def begin(self) -> None:
        """Reset the counters for the next turn."""
        self.lines = 0
        self.first = self.last = 0.0
        self.over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the two requests."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._hello)

    def get_buffer(self, sizehint: int) -> bytearray | memoryview:
        """Return the only buffer."""
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        """Count lines, and look for the end of the turn."""
        lines = self._buffer.count(b"\n", 0, nbytes)
        if self.answers:
            self.answers -= lines
            if self.answers <= 0:
                self.ready.set()
                if self._stalled:
                    self._transport.pause_reading()
            return
        self.lines += lines
        if not self.first:
            self.first = time.perf_counter()
        tail = self._tail + bytes(self._view[max(0, nbytes - 1024) : nbytes])
        self._tail = tail[-1024:]
        if self._tail.endswith(b"\n") and _END in self._tail:
            self.last = time.perf_counter()
            self._tail = b""
            self.over.set()


async def main(path: str, session: str, readers: int, stalled: int) -> None:
    """Run all followers."""
    loop = asyncio.get_running_loop()
    all_of_them = [Reader(session, stalled=number >= readers) for number in range(readers + stalled)]
    for one in all_of_them:
        await loop.create_unix_connection(lambda one=one: one, path)  # type: ignore[misc]
        await one.ready.wait()
    reading = all_of_them[:readers]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while await loop.run_in_executor(None, sys.stdin.readline):
        for one in reading:
            await one.over.wait()
        seconds = max(one.last for one in reading) - min(one.first for one in reading)
        sys.stdout.write(json.dumps({"events": [one.lines for one in reading], "seconds": seconds}) + "\n")
        sys.stdout.flush()
        for one in reading:
            one.begin()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))

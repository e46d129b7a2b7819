"""A user at a terminal: runs the command on a pseudo-terminal, reads the screen, types."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from hutch_client.untrusted import plain
from tests.preloaded import PRELOADED, Started


class Terminal:
    """The command's terminal. `screen` is all output so far, without control sequences."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes] | Started) -> None:
        self.process = process
        self._descriptor = descriptor
        self._written = b""

    @property
    def raw(self) -> str:
        """All output so far, with control sequences."""
        return self._written.decode(errors="replace")

    @property
    def screen(self) -> str:
        """All output so far, as text."""
        return plain(self.raw)

    def wait_for(self, text: str, then: str = "") -> None:
        """Read until `text` appears, and then `then` somewhere after it."""
        deadline = time.monotonic() + 30
        while then not in self.screen.partition(text)[2] or text not in self.screen:
            more = time.monotonic() < deadline and self._read()
            assert more, f"{text!r} did not come; the screen ends with:\n{self.screen[-2000:]}"

    def type(self, text: str) -> None:
        """Type `text`."""
        os.write(self._descriptor, text.encode())

    def press_ctrl_c(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """Read the rest of the output; return the exit code."""
        while self._read():
            pass
        return self.process.wait(60)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._descriptor], [], [], 30)
        assert ready, f"nothing more came; the screen ends with:\n{self.screen[-2000:]}"
        with suppress(OSError):  # EIO: the command has closed the terminal
            if chunk := os.read(self._descriptor, 1 << 16):
                self._written += chunk
                return True
        return False


@contextmanager
def at_terminal(
    *words: str, environment: Mapping[str, str] | None = None, width: int = 0, program: Sequence[str] | None = None
) -> Iterator[Terminal]:
    """Run `hutch`, or `program`, with `words` on a terminal of `width` columns (0: of unknown width).

    The process is killed at the end of the block.
    """
    ours, theirs = pty.openpty()
    if width:
        termios.tcsetwinsize(theirs, (24, width))
    env = {**os.environ, **(environment or {})}
    process: subprocess.Popen[bytes] | Started
    if program is None:
        process = PRELOADED.start("hutch", *words, files=dict.fromkeys((0, 1, 2), theirs), environment=env)
    else:
        process = subprocess.Popen(
            [*program, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)

"""Writes the console's pieces to the terminal, keeps the bottom line up to date, and reads what the user types.

Data goes to standard output, everything else to standard error. The bottom line (a spinner, or a prompt) exists only
if standard error is a terminal; it is erased before each piece and drawn again after it.
"""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TextIO

import anyio

from hutch_client.console import Console, Piece
from hutch_shared.times import from_wire, now_ms

__all__ = ["Screen"]

_ERASE: Final = "\r\x1b[2K"
_SPINNER: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_TICK: Final = 0.1
_CHUNK: Final = 4096


def _age(at: str | None) -> float:
    """Return the seconds since `at`, a time of the wire; 0 without one, or if it has not come yet."""
    return max(0.0, (now_ms() - from_wire(at)) / 1000) if at else 0.0


class Screen:
    """One terminal (or two files). `say` and `write` may be called from any task of the loop, not from threads."""

    def __init__(
        self, console: Console, *, out: TextIO | None = None, err: TextIO | None = None, typed: int = 0
    ) -> None:
        """Draw for `console` to `out` and `err` (default: the process's own); read lines from descriptor `typed`."""
        self.console = console
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._typed = typed
        self._is_terminal = self._err.isatty()
        self._bottom = ""
        self._question: str | None = None
        self._begun = b""
        self._held: list[Piece] | None = None

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write pieces unchanged, above the bottom line."""
        if self._held is not None:
            self._held += pieces
            return
        self._clear()
        for piece in pieces:
            stream = self._out if piece.to == "data" else self._err
            stream.write(piece.text)
            stream.flush()
        if self._question is not None:
            self._draw(self._question)

    def say(self, sentence: str) -> None:
        """Write a sentence of Hutch on a line of its own. Untrusted text in it must be `plain` already."""
        start = "" if self.console.at_line_start else "\n"
        self.console.at_line_start = True
        self.write([Piece("talk", f"{start}{sentence}\n")])

    async def spin(self) -> None:
        """Show what the agent is doing, until cancelled. Does nothing without a terminal."""
        if not self._is_terminal:
            return
        begun, doing = anyio.current_time(), ""
        frame = 0
        try:
            while True:
                await anyio.sleep(_TICK)
                frame += 1
                if doing != self.console.doing:
                    begun, doing = anyio.current_time() - _age(self.console.doing_since), self.console.doing
                if self._question is None and self.console.at_line_start and doing != "idle":
                    seconds = anyio.current_time() - begun
                    line = f"{_SPINNER[frame % len(_SPINNER)]} {doing}{f' · {seconds:.0f} s' if seconds >= 1 else ''}"
                    self._draw(line[: self.console.width])
        finally:
            self._clear()

    async def ask(self, prompt: str) -> str:
        """Show `prompt` and return the typed line. Raises EOFError at the end of the input.

        On cancel the prompt disappears.
        """
        self._question = prompt
        self._clear()
        self._draw(prompt)
        try:
            line = await self._line()
        except BaseException:
            self._question = None
            self._clear()
            raise
        self._question, self._bottom = None, ""  # Enter has moved the prompt up
        return line

    def forget_typed(self) -> None:
        """Discard the input typed so far: it was not meant for the request that follows."""
        self._begun = b""
        if os.isatty(self._typed):
            termios.tcflush(self._typed, termios.TCIFLUSH)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Give the terminal to another program; pieces are held back while the body runs."""
        self._clear()
        held: list[Piece] = []
        self._held = held
        try:
            yield
        finally:
            self._held = None
            self.write(held)

    async def _line(self) -> str:
        while b"\n" not in self._begun:
            await anyio.wait_readable(self._typed)
            try:
                chunk = os.read(self._typed, _CHUNK)
            except OSError:  # EIO: the terminal was closed
                chunk = b""
            if not chunk:
                raise EOFError
            self._begun += chunk
        line, _, self._begun = self._begun.partition(b"\n")
        return line.decode(errors="replace")

    def _draw(self, bottom: str) -> None:
        if self._is_terminal and self._held is None:
            self._err.write(f"{_ERASE}{bottom}")
            self._err.flush()
            self._bottom = bottom

    def _clear(self) -> None:
        if self._bottom:
            self._err.write(_ERASE)
            self._err.flush()
            self._bottom = ""

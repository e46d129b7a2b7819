"""The logs of a run: copied as they grow, since hutchd removes those of executors that are gone; searched for bugs.

A traceback has no time. Therefore `scan` is called before each kill, and its signs belong to the previous kill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.crash.harness.verdict import Kill, Violation

__all__ = ["SIGNS", "Logs"]

SIGNS = (
    b"Traceback (most recent call last)",
    b"failed inside",
    b"a session's task broke",
    b"Task exception was never retrieved",
    b"was never awaited",
    b"Exception ignored in",
)
"""A log line with one of these shows a bug."""
BEFORE, AFTER = 5, 40
"""The number of lines that a violation shows before and after its sign."""
PER_LOG = 3
"""The most violations that are reported for one log."""


@dataclass(frozen=True, slots=True)
class _Sign:
    log: str
    offset: int
    after: Kill | None


class Logs:
    """Copies of all logs, in one folder."""

    def __init__(self, folder: Path, sources: Callable[[], Iterable[Path]]) -> None:
        """`sources` returns the paths of all current logs. A copy in `folder` has the name of its log."""
        folder.mkdir()
        self.folder = folder
        self._sources = sources
        self._read: Counter[Path] = Counter()
        self._signs: list[_Sign] = []

    def scan(self, after: Kill | None) -> None:
        """Copy the new complete lines, and note the signs in them. `after` is the last kill."""
        for source in self._sources():
            try:
                with source.open("rb") as file:
                    file.seek(self._read[source])
                    text = file.read()
            except FileNotFoundError:
                continue
            text = text[: text.rfind(b"\n") + 1]
            self._read[source] += len(text)
            self._take(source.name, text, after)

    def _take(self, name: str, text: bytes, after: Kill | None) -> None:
        with (self.folder / name).open("ab") as copy:
            offset = copy.tell()
            copy.write(text)
        for line in text.splitlines(keepends=True):
            if any(sign in line for sign in SIGNS):
                self._signs.append(_Sign(name, offset, after))
            offset += len(line)

    def violations(self) -> list[Violation]:
        """Return a violation for each sign, with the lines around it. Skip a sign among the lines already shown."""
        found = []
        shown: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for sign in self._signs:
            text = (self.folder / sign.log).read_bytes()
            before = text[: sign.offset].decode(errors="replace").splitlines()
            rest = text[sign.offset :].decode(errors="replace").splitlines()
            if len(before) >= shown[sign.log] and count[sign.log] < PER_LOG:
                shown[sign.log] = len(before) + 1 + AFTER
                count[sign.log] += 1
                detail = f"{sign.log}:{len(before) + 1}: {rest[0].strip()}"
                lines = (*before[-BEFORE:], *rest[: AFTER + 1])
                found.append(Violation("bug", detail, after=sign.after, lines=lines))
        return found

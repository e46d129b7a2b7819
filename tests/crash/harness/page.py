"""Writes docs/crash.md from the tables: `python -m tests.crash.harness.page`."""

from __future__ import annotations

from pathlib import Path

from tests.crash.harness.faults import FAULTS
from tests.crash.harness.places import FAILPOINTS

FILE = Path(__file__).parents[3] / "docs" / "crash.md"

_BEGINNING = """# Killed at any moment

This page is written from the tables of `tests/crash/harness/{places,faults}.py` by
`python -m tests.crash.harness.page`.

`scripts/crash [--kills N] [--seed S] [--seconds T] [--claude]` runs a real hutchd under load. It kills hutchd,
executors, processes that agents started, and clients: at random moments, and at the failpoints below. With `--claude`
some sessions run the real Claude. Every party writes down outside of hutchd what it was promised: accepted prompts,
events that followers received, with their cursors, accepted decisions, receipts of executors. At the end the harness
compares these promises with the record. It prints JSON lines, and exits with 1 if a promise was broken:

- The events of a session are numbered without gaps. Every follower received each event once, in order, and finally all.
- A turn says the text of its script from the beginning, and the whole text if it completed. It ends once, and fails
  only if its executor was killed.
- An accepted prompt is one turn, and its command runs once. A command that was not allowed does not run.
- A permission request has one decision, the accepted one. The decision is an event once, and is carried out. No request
  waits after its turn has ended. A request that waited before a restart can be decided once hutchd listens again.
- An event that an executor has a receipt for, or has synced to its spool, is in the record: once, and in order.
- Living executors are adopted. No process of a closed session is left.
- No process logs a traceback, or another sign of a bug.

A violation is printed with the lines of the log around it and the last kill before it was noticed: its number, its
process, its moment, and the failpoint for which the processes were started. The logs of a failed run, its kills, its
notebooks and its record are kept in `$HUTCH_CRASH_LOGS/hutch-crash-SEED-PID` (default: the system's temporary
directory); the summary names the folder.

The seed decides which process is killed, where and when. It does not decide how processes are scheduled. The summary
says how long adoption took, from the moment the executor socket accepted connections, and how long it took until a
waiting permission request was decided.

## Failpoints

`HUTCH_FAILPOINT=name[:k]` in hutchd's environment kills the process when it passes the failpoint for the k-th time.
Executors inherit it. *load*: random runs kill there too; the other failpoints have tests of their own.

| failpoint | process | what happens there | load |
|---|---|---|---|
"""

_FAULTS = """
## Faults that can be planted

`python -P tests/crash/harness/planted.py FAULT hutch_daemon` starts hutchd, and through it executors, with functions
replaced by faulty ones, which `tests/crash/harness/faults.py` lists. `tests/crash/test_planted.py` demands that each
is caught.

| fault | what it is | brought out by | caught as |
|---|---|---|---|
"""


def page() -> str:
    """Return the page."""
    places = "".join(
        f"| `{name}` | {place.process} | {place.what} | {'yes' if place.under_load else ''} |\n"
        for name, place in FAILPOINTS.items()
    )
    faults = "".join(
        f"| `{name}` | {fault.what} | {', '.join(fault.actions) or 'the load alone'} |"
        f" {', '.join(f'`{word}`' for word in sorted(fault.caught_as))} |\n"
        for name, fault in FAULTS.items()
    )
    return _BEGINNING + places + _FAULTS + faults


if __name__ == "__main__":
    FILE.write_text(page())

"""docs/crash.md, written from the tables: `python -m tests.crash.harness.page`."""

from __future__ import annotations

from pathlib import Path

from tests.crash.harness.faults import FAULTS
from tests.crash.harness.places import FAILPOINTS

FILE = Path(__file__).parents[3] / "docs" / "crash.md"

_BEGINNING = """# Killed at any moment

This page is written from the tables of `tests/crash/harness/{places,faults}.py` by
`python -m tests.crash.harness.page`.

`scripts/crash [--kills N] [--seed S] [--seconds T] [--claude]` runs a real hutchd under load and kills hutchd,
executors, what agents started, and clients: at random moments, and at the named places below; with `--claude` some of
the sessions are the real Claude's. What each party was promised it writes down outside of hutchd: prompts that were
accepted, events that followers got, with their cursors, decisions that were accepted, receipts that executors had.
At the end that is held against the record. It prints JSON lines and ends with 1
when a promise was not kept:

- events of a session are numbered without gaps; every follower got each once, in order, and in the end all of them;
- a turn says what its script says, from the beginning, and all of it when it completed; it ends once, and fails only
  when its executor was killed;
- an accepted prompt is one turn, and what it runs, runs once; what was not allowed does not run;
- a question has one decision, the one that was accepted; it is told once and carried out, and none waits on after its
  turn; what waited before a restart can be answered when hutchd listens again;
- what an executor has a receipt for, or had synced to its spool, is in the record: each event that it made, of every
  kind, once and in order;
- executors that live are adopted; when a session is closed nothing of it is left.

The seed decides what is killed, where and when; how the processes are scheduled it cannot decide. The summary has how
long adoption took from the moment the executor socket was there, and how long until a question that had waited was
answered.

## Places where a process can be made to die

`HUTCH_FAILPOINT=name[:k]` in hutchd's environment; executors inherit it. *load*: the random runs kill there too; the
others have tests of their own.

| place | process | what happens there | load |
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

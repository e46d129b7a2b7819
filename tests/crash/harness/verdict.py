"""Compares the promises with the record. Pure: evidence in, violations out."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.crash.harness.prompts import CLAUDE, script_of
from tests.crash.harness.wire import digest

Row = dict[str, Any]
Event = dict[str, Any]

TERMINAL = frozenset({"completed", "failed", "stopped", "timed_out"})
ALL = "all"
"""The last line of a party that received every event; other parties end with the last number of their session."""
SAID_BY_HUTCHD = frozenset({"permission_asked", "permission_settled", "turn_ended", "notice"})
DENIED = frozenset({"denied", "expired", "withdrawn"})


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill of a run: its number (from 1), the process, and the time in seconds since the start."""

    number: int
    process: str
    at: float
    failpoint: str | None = None
    """The failpoint for which the current hutchd and its executors were started."""

    def __str__(self) -> str:
        failpoint = f", failpoint {self.failpoint}" if self.failpoint is not None else ""
        return f"kill {self.number}: {self.process} at {self.at:.2f} s{failpoint}"


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was not kept: its stable word and the details."""

    word: str
    detail: str
    after: Kill | None = None
    """The last kill before the violation was noticed; None if only the evidence of the whole run shows it."""
    lines: tuple[str, ...] = ()
    """The lines of the log around it."""

    def __str__(self) -> str:
        return f"{self.word}: {self.detail}" + (f" (after {self.after})" if self.after is not None else "")

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON, without `lines`."""
        return {"violation": str(self), **({"lines": list(self.lines)} if self.lines else {})}


@dataclass(slots=True)
class Evidence:
    """The facts known at the end of a run."""

    notes: dict[str, list[dict[str, Any]]]
    """The lines of each party's notebook."""
    histories: dict[str, list[Event]]
    """All events of each session as a client reads them; under `"*"` those of all sessions."""
    turns: list[Row]
    permissions: list[Row]
    executors: list[Row]
    ran: dict[str, list[str]]
    """The keys that the commands of each session wrote, in order."""
    witness: list[list[Any]]
    killed: set[str]
    """Executors that were killed on purpose."""
    disturbed: set[str]
    """Sessions whose agent was killed on purpose, so that their turns may fail."""
    noticed: list[Violation] = field(default_factory=list)
    """Violations that were noticed during the run."""

    @property
    def accepted(self) -> Iterator[tuple[str, str]]:
        """Every (key, turn) that a party received."""
        return ((line["accepted"], line["turn"]) for lines in self.notes.values() for line in lines if "turn" in line)

    def said(self, word: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every line of any notebook that has `word`."""
        return ((party, line) for party, lines in self.notes.items() for line in lines if word in line)


Check = Callable[[Evidence], Iterator[Violation]]


def judge(evidence: Evidence, checks: Sequence[Check]) -> list[Violation]:
    """Return a violation for every broken promise."""
    return [*evidence.noticed, *(violation for check in checks for violation in check(evidence))]


def _numbers(evidence: Evidence) -> Iterator[Violation]:
    """Events of a session are numbered 1, 2, 3 …, and their positions rise."""
    for session, events in evidence.histories.items():
        if session == "*":
            continue
        seqs = [event["seq"] for event in events]
        if seqs != list(range(1, len(seqs) + 1)):
            yield Violation("gap", f"{session} has {seqs[:1]}…{seqs[-1:]}, {len(seqs)} of them")
        positions = [event["position"] for event in events]
        if positions != sorted(set(positions)):
            yield Violation("reordered", f"the positions of {session} do not rise")


def _all_together(evidence: Evidence) -> Iterator[Violation]:
    """The events of all sessions together are those of each session, in one order."""
    every = evidence.histories["*"]
    positions = [event["position"] for event in every]
    if positions != sorted(set(positions)):
        yield Violation("reordered", "the positions of all sessions do not rise")
    apart = {digest(event) for session, events in evidence.histories.items() if session != "*" for event in events}
    if apart != {digest(event) for event in every}:
        yield Violation("gap", "the events of all sessions together are not those of each session")


def _followers(evidence: Evidence) -> Iterator[Violation]:
    """A follower received the events of the record, each once, in order, and finally all of them."""
    record = {
        (event["session"], event["seq"]): digest(event) for events in evidence.histories.values() for event in events
    }
    for party, lines in evidence.notes.items():
        follows: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            if "follow" in line:
                follows.setdefault(line["follow"], []).append(line)
        finished = next((line["finished"] for line in lines if "finished" in line), None)
        for followed, got in follows.items():
            number = "position" if followed == "*" else "seq"
            numbers = [line[number] for line in got]
            who = f"{party} following {followed}"
            if len(set(numbers)) < len(numbers):
                yield Violation("doubled", f"{who} got a number twice")
            elif numbers != sorted(numbers):
                yield Violation("reordered", f"{who} got numbers out of order")
            for line in got:
                if record.get((line["session"], line["seq"])) != line["digest"]:
                    yield Violation(
                        "lost_event", f"{who} got {line['session']}#{line['seq']}, which is not in the record"
                    )
                    break
            there = [event[number] for event in evidence.histories.get(followed, [])]
            last = max(there, default=0) if finished == ALL else finished or 0
            upto = max(numbers[-1], last)
            if missing := {n for n in there if n <= upto} - set(numbers):
                yield Violation("incomplete", f"{who} never got {len(missing)} events, the first is {min(missing)}")
    for party, line in evidence.said("cursor_refused"):
        yield Violation("lost_event", f"{party} has a cursor that hutchd refuses: {line['why']}")


def _prompts(evidence: Evidence) -> Iterator[Violation]:
    """An accepted prompt is one turn, and the turn has ended."""
    turns = {row["id"]: row for row in evidence.turns}
    told: dict[str, set[str]] = {}
    for key, turn in evidence.accepted:
        told.setdefault(key, set()).add(turn)
        if turn not in turns:
            yield Violation("prompt_lost", f"{turn} for {key} was accepted, and is not in the record")
        elif turns[turn]["state"] not in TERMINAL:
            yield Violation("prompt_lost", f"{turn} for {key} is {turns[turn]['state']}")
    prompts = Counter((row["session"], row["prompt"]) for row in evidence.turns)
    for key, made in told.items():
        if (
            len(made) > 1
            or prompts[next(((row["session"], row["prompt"]) for row in evidence.turns if row["id"] in made), ("", ""))]
            > 1
        ):
            yield Violation("prompt_doubled", f"{key} is {len(made)} turns")
    for party, line in evidence.said("refused"):
        yield Violation("forgotten", f"{party}: {line['refused']}")
    for party, line in evidence.said("turn_refused"):
        yield Violation("prompt_lost", f"{party} asked for {line['turn_refused']}: {line['why']}")


def _runs(evidence: Evidence) -> Iterator[Violation]:
    """No prompt runs twice, and no command runs that was not allowed."""
    for session, keys in evidence.ran.items():
        for key, count in Counter(keys).items():
            if count > 1:
                yield Violation("ran_twice", f"{key} of {session} ran {count} times")
    allowed = {row["turn"] for row in evidence.permissions if row["state"] == "allowed"}
    asked = {row["turn"] for row in evidence.permissions}
    key_of = {turn: key for key, turn in evidence.accepted}
    for row in evidence.turns:
        if row["id"] in asked - allowed and key_of.get(row["id"]) in evidence.ran.get(row["session"], []):
            yield Violation("ran_unasked", f"{row['id']} ran a command that was not allowed")


def _turns(evidence: Evidence) -> Iterator[Violation]:
    """A turn says the text of its script from the beginning, and all of it if it completed. It ends once."""
    key_of = {turn: key for key, turn in evidence.accepted}
    executor_of = {row["id"]: row["executor"] for row in evidence.turns}
    pids = {row["id"]: row["pid"] for row in evidence.executors}
    died = {line[2] for line in evidence.witness if line[0] == "died"}
    by_turn: dict[str, list[Event]] = {}
    for event in evidence.histories["*"]:
        if event.get("turn") is not None:
            by_turn.setdefault(event["turn"], []).append(event)
    for row in evidence.turns:
        turn, events = row["id"], by_turn.get(row["id"], [])
        ends = [event["data"] for event in events if event["kind"] == "turn_ended"]
        if row["state"] in TERMINAL and [end["state"] for end in ends] != [row["state"]]:
            yield Violation("end_wrong", f"{turn} is {row['state']}, its ends are {[end['state'] for end in ends]}")
        if turn in key_of:
            wanted = list(script_of(key_of[turn]).says)
            kinds = {"text"} if key_of[turn].startswith(CLAUDE) else {"text", "text_delta"}
            said = [(event["kind"], event["data"]["text"]) for event in events if event["kind"] in kinds]
            if said != (wanted if row["state"] == "completed" else wanted[: len(said)]):
                yield Violation("garbled", f"{turn} ({row['state']}) said {said}, its script is {wanted}")
        executor = executor_of[turn]
        if (
            row["state"] == "failed"
            and row["session"] not in evidence.disturbed
            and executor not in evidence.killed
            and pids.get(executor) not in died
        ):
            yield Violation(
                "failed_alone", f"{turn} failed ({row['reason']}: {row['message']}), though nobody killed {executor}"
            )


def _decisions(evidence: Evidence) -> Iterator[Violation]:
    """A permission request has one decision, the accepted one. It is one event, and is carried out."""
    rows = {row["id"]: row for row in evidence.permissions}
    turns = {row["id"]: row for row in evidence.turns}
    accepted = Counter(line["answered"] for _, line in evidence.said("answered"))
    for party, line in (*evidence.said("answered"), *evidence.said("told")):
        permission = line.get("answered") or line["told"]
        if permission not in rows:
            yield Violation("question_lost", f"{permission} was decided for {party}, and is not in the record")
        elif rows[permission]["state"] != line["state"]:
            yield Violation(
                "decision_changed", f"{permission} is {rows[permission]['state']}, {party} received {line['state']}"
            )
    for permission, count in accepted.items():
        if count > 1:
            yield Violation("decision_changed", f"{permission} was decided {count} times")
    for party, line in evidence.said("asks"):
        if line["asks"] is not None and line["asks"] not in rows:
            yield Violation("question_lost", f"{party} was asked {line['asks']}, which is not in the record")
    for party, line in evidence.said("question_unknown"):
        yield Violation("question_lost", f"{party} answered {line['question_unknown']}, which hutchd does not know")
    settled = Counter(
        (event["data"]["permission"], event["data"]["state"])
        for event in evidence.histories["*"]
        if event["kind"] == "permission_settled"
    )
    results = {event["turn"]: event["data"] for event in evidence.histories["*"] if event["kind"] == "tool_result"}
    for row in rows.values():
        if row["state"] == "pending":
            if turns[row["turn"]]["state"] in TERMINAL:
                yield Violation("question_left", f"{row['id']} still waits, though its turn has ended")
        elif settled[row["id"], row["state"]] != 1:
            yield Violation(
                "decision_changed", f"{row['id']} is {row['state']}, with {settled[row['id'], row['state']]} events"
            )
        result = results.get(row["turn"])
        if result is not None and (row["state"] in DENIED) is (result.get("digest") is not None):
            yield Violation("undelivered", f"{row['id']} is {row['state']}, its result: {result}")
    for party, line in evidence.said("odd"):
        yield Violation("odd", f"{party}: {line['odd']}")


def _receipts(evidence: Evidence) -> Iterator[Violation]:
    """The record has every event for which an executor has a receipt, and every event that it synced to its spool."""
    stored = {row["id"]: row["acked_n"] for row in evidence.executors}
    words = {"acked": "ack_not_durable", "spooled": "spool_lost"}
    highest: dict[tuple[str, str], int] = {}
    for name, *values in evidence.witness:
        if name in words:
            highest[name, values[0]] = max(values[1], highest.get((name, values[0]), 0))
    for (name, executor), n in highest.items():
        if stored.get(executor, 0) < n:
            yield Violation(words[name], f"{executor} {name} {n}, the record has {stored.get(executor)}")


def _as_made(evidence: Evidence) -> Iterator[Violation]:
    """The record has an executor's events of every kind up to its last receipt, each once and in order.

    If hutchd has ended a turn before its executor did, a notice takes the place of the executor's end.
    """
    made: dict[str, list[tuple[int, str, Any]]] = {}
    for line in evidence.witness:
        if line[0] == "made" and line[3]:
            said = json.loads("{" + line[4])
            made.setdefault(line[1], []).append((line[2], said["kind"], said["data"]))
    executor_of = {row["id"]: row["executor"] for row in evidence.turns}
    stored: dict[str, list[Event]] = {}
    for event in evidence.histories["*"]:
        if (executor := executor_of.get(event.get("turn"))) is not None:
            stored.setdefault(executor, []).append(event)
    for row in evidence.executors:
        wanted = deque(one for one in made.get(row["id"], []) if one[0] <= row["acked_n"])
        for event in stored.get(row["id"], []):
            kind = event["kind"]
            if wanted and _is(event, *wanted[0][1:]):
                wanted.popleft()
            elif kind not in SAID_BY_HUTCHD:
                yield Violation("not_as_made", f"{row['id']} did not make {kind} #{event['seq']} there, or just once")
                break
        else:
            if wanted:
                yield Violation("not_as_made", f"{row['id']} made {wanted[0][:2]}, which is not in the record")


def _is(event: Event, kind: str, data: Any) -> bool:
    if kind == "turn_ended":
        return event["kind"] in ("turn_ended", "notice")
    return (event["kind"], event["data"]) == (kind, data)


def obedience(evidence: Evidence) -> Iterator[Violation]:
    """An executor never serves a hutchd older than one that it has served."""
    known: dict[str, int] = {}
    for name, executor, epoch in (line for line in evidence.witness if line[0] == "obeys"):
        if epoch < known.get(executor, 0):
            yield Violation("obeyed", f"{executor} {name} epoch {epoch} after {known[executor]}")
        known[executor] = epoch


CHECKS: tuple[Check, ...] = (
    _numbers,
    _all_together,
    _followers,
    _prompts,
    _runs,
    _turns,
    _decisions,
    _receipts,
    _as_made,
    obedience,
)

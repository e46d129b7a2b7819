"""`hutch compact` and `hutch clear`: a turn is queued, watched to its end, and shown with its cost."""

from __future__ import annotations

import json

import msgspec
import pytest

from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import TurnEnded, TurnKind, TurnStarted, UsageSeen
from tests.client.conftest import Hutch
from tests.client.fake_daemon import SESSION, TURN, FakeDaemon, event

USAGE = UsageSeen(12_053, 5, usd=0.0483, total=True)


@pytest.mark.parametrize(
    ("verb", "words", "params"),
    [
        ("compact", ["keep", "the sheep"], m.CompactSession(SESSION.id, "keep the sheep")),
        ("clear", [], m.ClearSession(SESSION.id)),
    ],
)
def test_the_turn_is_queued_and_watched_to_its_end(
    daemon: FakeDaemon, hutch: Hutch, verb: TurnKind, words: list[str], params: msgspec.Struct
) -> None:
    """The end says what happened to the conversation and what it cost. The call may be repeated."""
    ended = TurnEnded("completed", "completed", "It is another conversation.", usage=USAGE)
    daemon.answers[f"{verb}_session"] = TURN
    daemon.events += [event(1, "turn_started", TurnStarted("", 1, verb)), event(2, "turn_ended", ended)]

    code, out, err = hutch(verb, "fix", *words)

    (asked,) = daemon.asked(f"{verb}_session")
    assert (code, out) == (0, "")
    assert err == "✓ done in 1.0 s · 12,053 tokens in, 5 out, $0.0483\n  It is another conversation.\n"
    assert asked.idempotency_key
    assert msgspec.structs.replace(asked, idempotency_key=None) == params


def test_detach_prints_the_turn_and_json_is_the_turn(daemon: FakeDaemon, hutch: Hutch) -> None:
    """A script waits for the turn, or asks for its record."""
    daemon.answers |= {"clear_session": TURN, "get_turn": TURN}
    daemon.events.append(event(1, "turn_ended", TurnEnded("failed", "compact_failed", "No.")))

    assert hutch("clear", "fix", "-d")[:2] == (0, f"{TURN.id}\n")
    code, out, _ = hutch("clear", "fix", "-o", "json")
    assert (code, json.loads(out)["id"]) == (1, TURN.id)


def test_a_closed_session_and_an_agent_without_conversation_are_refused(daemon: FakeDaemon, hutch: Hutch) -> None:
    """One line says why."""

    def refuse(_: object) -> m.Turn:
        raise HutchError(Reason.INVALID_PARAMS, "fix has no conversation to compact: its agent, script, keeps none.")

    daemon.answers["compact_session"] = refuse
    code, _, err = hutch("compact", "fix")
    assert (code, err) == (2, "hutch: fix has no conversation to compact: its agent, script, keeps none.\n")

    daemon.answers["get_session"] = msgspec.structs.replace(SESSION, state="closed")
    code, _, err = hutch("clear", "fix")
    assert code != 0
    assert "fix is closed" in err


def test_a_prompt_that_is_only_a_command_is_sent_with_a_hint(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The user may have meant Hutch's own command."""
    daemon.answers["submit_prompt"] = TURN

    _, _, err = hutch("run", "--session", "fix", "-d", " /compact ")

    assert err == "! /compact goes to the model as words; `hutch compact SESSION` is the command.\n"
    assert daemon.asked("submit_prompt")[0].prompt == " /compact "


def test_inspect_and_attach_show_what_a_turn_does(daemon: FakeDaemon, hutch: Hutch) -> None:
    """Such a turn has no prompt; its kind stands in brackets before its words."""
    compacted = msgspec.structs.replace(TURN, state="completed", prompt="keep the sheep", kind="compact")
    daemon.answers["list_turns"] = m.Turns((compacted,))
    daemon.events.append(event(1, "turn_started", TurnStarted("keep the sheep", 1, "compact")))
    daemon.answers["read_events"] = m.EventsPage(
        tuple(msgspec.Raw(msgspec.json.encode(one)) for one in daemon.events), "j-1", 1, more=False
    )

    assert "[compact] keep the sheep" in hutch("inspect", "fix")[1]
    assert "❯ [compact] keep the sheep" in hutch("logs", "fix")[2]

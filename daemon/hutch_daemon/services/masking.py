"""Removes known secrets from agents' events before these are stored, and records that they contained a secret."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from msgspec import UNSET, Raw

from hutch_daemon.redaction import KnownSecrets, Splits
from hutch_daemon.store import audit, events, sessions, turns
from hutch_daemon.store.records import Tx
from hutch_shared import messages as m
from hutch_shared.events import Notice, ReportedEvent, Text, TurnEnded

__all__ = ["Masking", "SecretHit"]

_STREAMED: Final = frozenset({"text_delta", "thinking_delta", "stderr"})
"""The kinds of events whose text arrives in pieces."""
_SAID: Final = {
    "masked": "A stored key was masked in the agent's output",
    "withheld": "An event with a part of a stored key was not kept",
    "recorded": "A stored key appeared in pieces, over several events: replace it",
}
_text_of = msgspec.json.Decoder(Text).decode
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class SecretHit:
    """A secret that was found in an event of `kind`, the form in which it appeared, and the reaction."""

    turn: str | None
    kind: str
    key: str
    form: str
    outcome: Literal["masked", "withheld", "recorded"]


class Masking:
    """Masks the events of all sessions."""

    def __init__(self, known: KnownSecrets) -> None:
        """Look for the secrets in `known`."""
        self.known = known
        self._splits = Splits(known)

    def clean(self, session: str, batch: Sequence[ReportedEvent]) -> tuple[Sequence[ReportedEvent], list[SecretHit]]:
        """Return the events with secrets masked, and the hits, for `record`.

        An event in which a secret cannot be masked is replaced by a notice. A `turn_ended` event stays a `turn_ended`.
        """
        found: list[SecretHit] = []
        if not self.known:
            return batch, found
        if self.known.find(*(part for event in batch for part in _parts(event))) is not None:
            batch = [self._clean(event, found) for event in batch]
        streams: dict[tuple[str, str | None, str | None, str | None], list[str]] = {}
        for event in batch:
            if event.kind in _STREAMED:
                with suppress(msgspec.DecodeError):
                    text = _text_of(event.data)
                    streams.setdefault((event.kind, text.block, text.parent, event.turn), []).append(text.text)
        for (kind, block, parent, turn), texts in streams.items():
            key = self._splits.feed((session, kind, block, parent), "".join(texts))
            if key is not None:
                found.append(SecretHit(turn, kind, key, "split", "recorded"))
        return batch, found

    def _clean(self, event: ReportedEvent, found: list[SecretHit]) -> ReportedEvent:
        parts = _parts(event)
        for at, part in enumerate(parts):
            if (masked := self.known.mask(part)) is not None:
                well = masked.whole and _is_json(masked.text)
                found.append(
                    SecretHit(event.turn, event.kind, masked.key, masked.form, "masked" if well else "withheld")
                )
                if not well:
                    return _withheld(event)
                parts[at] = masked.text
        return msgspec.structs.replace(event, data=Raw(parts[0]), native=Raw(parts[1]) if parts[1] else UNSET)

    def in_call(self, params: m.RequestPermission) -> SecretHit | None:
        """Return the hit if a tool call contains a secret, or None. The call would be stored, shown and run."""
        masked = self.known.mask(_encode(params.call))
        return None if masked is None else SecretHit(params.turn, "call", masked.key, masked.form, "withheld")

    def record(self, tx: Tx, session: str, found: Sequence[SecretHit]) -> None:
        """Add a notice and an audit line for each hit, in the caller's transaction."""
        row = sessions.get(tx, session) if found else None
        if row is None:
            return
        for one in dict.fromkeys(found):
            turn = turns.get(tx, one.turn) if one.turn is not None else None
            details = {"kind": one.kind, "form": one.form}
            notice = Notice("secret_masked", f"{_SAID[one.outcome]} ({one.kind}).", {**details, "key": one.key})
            mine = turn is not None and turn.session == session
            events.append(tx, session, one.turn if mine else None, "notice", notice)
            audit.record(
                tx,
                actor="executor",
                owner=row.owner,
                action="secret_masked",
                outcome=one.outcome,
                session=session,
                subject=one.key,
                details=details,
            )


def _parts(event: ReportedEvent) -> list[bytes]:
    return [bytes(event.data), b"" if event.native is UNSET else bytes(event.native)]


def _withheld(event: ReportedEvent) -> ReportedEvent:
    if event.kind == "turn_ended":  # the turn must still end
        ended = TurnEnded("failed", "secret_withheld", "The end of the turn held a stored key and was withheld.")
        return msgspec.structs.replace(event, data=Raw(_encode(ended)), native=UNSET)
    notice = Notice("secret_withheld", f"A {event.kind} event held a stored key and was not kept.")
    return msgspec.structs.replace(event, kind="notice", data=Raw(_encode(notice)), native=UNSET)


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True

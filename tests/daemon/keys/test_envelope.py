"""Envelopes: those that open, and those that never do."""

from __future__ import annotations

import os

import pytest

from hutch_daemon.keys.envelope import SealError, open_envelope, rewrap, seal_envelope

MASTER = os.urandom(32)
PLAIN = b"sk-rehearsal-0123456789"


def test_a_sealed_secret_opens() -> None:
    """The same master key and purpose return the secret."""
    envelope = seal_envelope(MASTER, "1000/anthropic/k-1/1", PLAIN)

    assert open_envelope(MASTER, "1000/anthropic/k-1/1", envelope) == PLAIN
    assert PLAIN not in envelope


@pytest.mark.parametrize("purpose", ["1001/anthropic/k-1/1", "1000/openai/k-1/1", "1000/anthropic/k-2/1", ""])
def test_an_envelope_moved_to_another_place_does_not_open(purpose: str) -> None:
    """Owner, provider, id and version are bound into the envelope."""
    envelope = seal_envelope(MASTER, "1000/anthropic/k-1/1", PLAIN)

    with pytest.raises(SealError):
        open_envelope(MASTER, purpose, envelope)


def test_a_changed_envelope_does_not_open() -> None:
    """Every byte of an envelope is authenticated, its layout number too."""
    envelope = seal_envelope(MASTER, "p", PLAIN)

    for place in range(len(envelope)):
        changed = envelope[:place] + bytes([envelope[place] ^ 1]) + envelope[place + 1 :]
        with pytest.raises(SealError):
            open_envelope(MASTER, "p", changed)


@pytest.mark.parametrize("length", [0, 1, 12, 60, 88])
def test_a_cut_envelope_does_not_open(length: int) -> None:
    """A truncated envelope is refused like a changed one."""
    with pytest.raises(SealError):
        open_envelope(MASTER, "p", seal_envelope(MASTER, "p", PLAIN)[:length])


def test_rewrapping_moves_an_envelope_to_another_master_key() -> None:
    """After a rotation the new key opens it and the old one does not."""
    new = os.urandom(32)

    moved = rewrap(MASTER, new, "p", seal_envelope(MASTER, "p", PLAIN))

    assert open_envelope(new, "p", moved) == PLAIN
    with pytest.raises(SealError):
        open_envelope(MASTER, "p", moved)

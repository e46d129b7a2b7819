"""The isolation level of a session, which is never lower than the required one."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from hutch_daemon.environments.levels import ORDER, highest, level_of, require_level
from hutch_daemon.environments.port import IsolationOffer
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

SANDBOX = m.SandboxSpec("/usr/bin/bwrap")
HOW = "There is no sandbox around the agent: bubblewrap (bwrap) is not installed."


def offer(*, apart: bool, cgroup: bool) -> IsolationOffer:
    """Return the offer of an environment."""
    return IsolationOffer(apart, cgroup, "It is so.", "somehow", "" if apart and cgroup else "Install the launcher.")


EXPECTED: dict[tuple[bool, bool, bool], m.IsolationLevel] = {
    # the offer: other account, cgroup, sandbox
    (True, True, True): "strict",
    (True, True, False): "account",
    (True, False, True): "reduced",
    (True, False, False): "reduced",
    (False, True, True): "reduced",
    (False, True, False): "reduced",
    (False, False, True): "reduced",
    (False, False, False): "reduced",
}


@pytest.mark.parametrize(("given", "level"), EXPECTED.items())
@pytest.mark.parametrize("asked", ORDER)
def test_every_combination_has_its_level_and_is_refused_below_the_required_one(
    given: tuple[bool, bool, bool], level: m.IsolationLevel, asked: m.IsolationLevel
) -> None:
    """All eight combinations of the offer are tested with all three required levels."""
    apart, cgroup, walled = given
    having = level_of(offer(apart=apart, cgroup=cgroup), SANDBOX if walled else None, HOW, asked)
    assert (having.level, having.asked) == (level, asked)
    assert bool(having.missing) == (level != "strict")
    if ORDER.index(level) >= ORDER.index(asked):
        require_level(having)
        return
    with pytest.raises(HutchError, match=f"isolation {asked} and could have only {level}") as caught:
        require_level(having)
    assert caught.value.reason is Reason.ISOLATION_UNAVAILABLE
    assert having.missing in caught.value.message
    assert caught.value.details == {"level": level, "asked": asked}


def test_the_missing_part_is_the_one_that_the_next_level_needs() -> None:
    """With a separate account the sandbox is missing; without one, the launcher."""
    assert level_of(offer(apart=True, cgroup=True), None, HOW, "reduced").missing == HOW
    assert level_of(offer(apart=False, cgroup=True), None, HOW, "reduced").missing == "Install the launcher."


def test_a_session_without_a_required_level_is_accepted() -> None:
    """Sessions of earlier versions have none."""
    require_level(msgspec.structs.replace(level_of(offer(apart=False, cgroup=False), None, HOW, "strict"), asked=None))


@pytest.mark.parametrize("wishes", list(itertools.product((None, *ORDER), repeat=2)))
def test_the_stricter_of_two_required_levels_applies(
    wishes: tuple[m.IsolationLevel | None, m.IsolationLevel | None],
) -> None:
    """The settings require one level, and the client that opens the session the other."""
    found = highest(*wishes)
    assert all(ORDER.index(found) >= ORDER.index(one) for one in wishes if one is not None)
    assert found in (*wishes, "reduced")


@pytest.mark.parametrize(
    ("network", "says"), [("full", "the host's network"), ("allow-list", "allow"), ("broker-only", "only its model")]
)
def test_the_reason_names_the_reachable_network(network: str, says: str) -> None:
    """The text says which network an agent can reach."""
    walls = msgspec.structs.replace(SANDBOX, network=network)
    assert says in level_of(offer(apart=True, cgroup=True), walls, "", "strict").why

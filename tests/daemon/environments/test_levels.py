"""The isolation level of a session, which is never lower than the required one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest

from hutch_daemon.environments.levels import ORDER, highest, level_of, require_level
from hutch_daemon.environments.port import IsolationOffer
from hutch_daemon.environments.sandbox_probe import SandboxChoice
from hutch_shared import messages as m
from hutch_shared.attacks import open_attacks
from hutch_shared.errors import HutchError, Reason

HOW = "There is no sandbox around the agent: bubblewrap (bwrap) is not installed."
BUBBLEWRAP = SandboxChoice(m.SandboxSpec("/usr/bin/bwrap"), named="bubblewrap 0.8.0")
LANDLOCK = SandboxChoice(m.SandboxSpec("", kind="landlock"), named="Landlock, ABI 7", abi=7, more="bubblewrap adds.")
NONE = SandboxChoice(None, HOW)


def offer(*, apart: bool, cgroup: bool) -> IsolationOffer:
    """Return the offer of an environment."""
    return IsolationOffer(apart, cgroup, "It is so.", "somehow", "" if apart and cgroup else "Install the launcher.")


EXPECTED: dict[tuple[bool, bool, SandboxChoice], m.IsolationLevel] = {
    # the offer: other account, cgroup; the sandbox
    (True, True, BUBBLEWRAP): "strict",
    (True, True, LANDLOCK): "account",
    (True, True, NONE): "account",
    **{
        (apart, cgroup, choice): "reduced"
        for apart, cgroup in ((True, False), (False, True), (False, False))
        for choice in (BUBBLEWRAP, LANDLOCK, NONE)
    },
}


@pytest.mark.parametrize(("given", "level"), EXPECTED.items())
@pytest.mark.parametrize("asked", ORDER)
def test_every_combination_has_its_level_and_is_refused_below_the_required_one(
    given: tuple[bool, bool, SandboxChoice], level: m.IsolationLevel, asked: m.IsolationLevel
) -> None:
    """All twelve combinations of the offer and the sandbox are tested with all three required levels."""
    apart, cgroup, choice = given
    having = level_of(offer(apart=apart, cgroup=cgroup), choice, asked)
    assert (having.level, having.asked) == (level, asked)
    assert having.sandbox == (None if choice.spec is None else choice.spec.kind)
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
    """With a separate account the sandbox is missing; without one, the launcher. Landlock says what would add to it."""
    assert level_of(offer(apart=True, cgroup=True), NONE, "reduced").missing == HOW
    assert level_of(offer(apart=True, cgroup=True), LANDLOCK, "reduced").missing == "bubblewrap adds."
    assert level_of(offer(apart=False, cgroup=True), NONE, "reduced").missing == "Install the launcher."
    assert level_of(offer(apart=False, cgroup=True), LANDLOCK, "reduced").missing == (
        "Install the launcher. bubblewrap adds."
    )


@pytest.mark.parametrize(
    ("choice", "cgroup", "outlives"),
    [(BUBBLEWRAP, False, False), (LANDLOCK, False, True), (NONE, False, True), (LANDLOCK, True, False)],
)
def test_a_process_can_outlive_its_session_without_a_namespace_and_a_cgroup(
    choice: SandboxChoice, cgroup: bool, outlives: bool
) -> None:
    """The reason says so."""
    assert ("can outlive its session" in level_of(offer(apart=False, cgroup=cgroup), choice, "reduced").why) == outlives


@pytest.mark.parametrize(("abi", "signals"), [(1, True), (5, True), (6, False), (7, False)])
def test_the_reason_says_what_landlock_does_not_hold(abi: int, signals: bool) -> None:
    """Names of files and processes are seen with each ABI, signals are kept inside from ABI 6 on."""
    having = level_of(offer(apart=False, cgroup=True), replace(LANDLOCK, abi=abi), "reduced")

    assert "the names of the host's processes" in having.why
    assert ("can signal other processes" in having.why) == signals
    assert ("signal-processes" in having.open) == signals
    assert "no process but its own" not in having.why


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("choice", [BUBBLEWRAP, LANDLOCK, NONE], ids=["bubblewrap", "landlock", "none"])
def test_what_remains_open_is_the_row_of_the_table(choice: SandboxChoice, apart: bool) -> None:
    """With the session's kind, account and network."""
    having = level_of(offer(apart=apart, cgroup=True), choice, "reduced")
    kind = None if choice.spec is None else choice.spec.kind

    assert having.open == open_attacks(kind, own_account=not apart, network="full", abi=choice.abi)


def test_a_session_without_a_required_level_is_accepted() -> None:
    """Sessions of earlier versions have none."""
    require_level(msgspec.structs.replace(level_of(offer(apart=False, cgroup=False), NONE, "strict"), asked=None))


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
    for choice in (BUBBLEWRAP, LANDLOCK):
        assert choice.spec is not None
        limited = replace(choice, spec=msgspec.structs.replace(choice.spec, network=network))
        having = level_of(offer(apart=True, cgroup=True), limited, "strict")

        assert says in having.why
        assert ("loopback" in having.open) == (network == "full")

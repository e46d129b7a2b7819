"""The table of attacks: its form, and what it says of a session."""

from __future__ import annotations

import re
from typing import Final

import pytest

from hutch_shared.attacks import ATTACKS, open_attacks
from hutch_shared.messages import SandboxKind

KINDS: Final[tuple[SandboxKind | None, ...]] = ("bubblewrap", "landlock", None)
NEWEST: Final = 7
PROMISED: Final = {"read-keys", "take-lease", "use-lease", "read-sessions", "change-sessions", "read-secrets"}
PROMISED_SOCKETS: Final = {"give-orders", "control-broker", "session-bus", "ssh-agent"}


def test_each_attack_has_a_name_of_its_own_and_a_sentence() -> None:
    """Names are short words with hyphens, and a sentence says what a command would do."""
    names = [attack.name for attack in ATTACKS]

    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+){0,2}", name) for name in names)
    assert all(attack.does[0].isupper() and attack.does.endswith(".") for attack in ATTACKS)
    assert all(attack.why == "" or attack.why.endswith(".") for attack in ATTACKS)


@pytest.mark.parametrize("own_account", [True, False])
@pytest.mark.parametrize("network", ["full", "allow-list", "broker-only"])
@pytest.mark.parametrize("abi", [1, NEWEST])
def test_a_sandbox_closes_what_it_promises(network: str, abi: int, *, own_account: bool) -> None:
    """Keys, leases, other sessions, the home and the sockets are closed in both sandboxes, with every ABI."""
    for kind in ("bubblewrap", "landlock"):
        left = open_attacks(kind, own_account=own_account, network=network, abi=abi)

        assert not (PROMISED | PROMISED_SOCKETS) & {*left}


@pytest.mark.parametrize("own_account", [True, False])
def test_a_sandbox_opens_nothing(*, own_account: bool) -> None:
    """What is closed without a sandbox is closed in each; a newer Landlock and a limited network open nothing."""
    bare = {*open_attacks(None, own_account=own_account, network="full", abi=0)}
    for kind in ("bubblewrap", "landlock"):
        older = bare
        for abi in range(1, NEWEST + 1):
            left = {*open_attacks(kind, own_account=own_account, network="full", abi=abi)}
            limited = {*open_attacks(kind, own_account=own_account, network="broker-only", abi=abi)}

            assert limited < left < bare
            assert left <= older
            older = left


def test_another_account_opens_nothing() -> None:
    """What hutchd's own account cannot do, another account cannot do."""
    for kind in KINDS:
        own = open_attacks(kind, own_account=True, network="full", abi=1)
        another = open_attacks(kind, own_account=False, network="full", abi=1)

        assert {*another} <= {*own}


def test_signals_are_closed_from_abi_6_on() -> None:
    """Landlock limits signals since then; for the other columns the ABI does not count."""
    says = {
        abi: "signal-processes" in open_attacks("landlock", own_account=True, network="full", abi=abi)
        for abi in range(1, NEWEST + 1)
    }

    assert says == {1: True, 2: True, 3: True, 4: True, 5: True, 6: False, 7: False}
    assert "signal-processes" not in open_attacks("bubblewrap", own_account=True, network="full", abi=0)


def test_a_limited_network_closes_the_hosts_servers() -> None:
    """TCP, UDP and abstract sockets of the host are open with the network `full` only."""
    full = {*open_attacks("bubblewrap", own_account=True, network="full", abi=0)}
    limited = {*open_attacks("bubblewrap", own_account=True, network="broker-only", abi=0)}

    assert full - limited == {"loopback", "udp", "listen", "abstract-sockets"}

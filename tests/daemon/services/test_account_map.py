"""The account that a user's agents run as."""

from __future__ import annotations

import pytest

from hutch_daemon.services.account_map import account_for, mapped, may_run_as
from hutch_daemon.settings import AccountSettings
from hutch_shared.errors import HutchError, Reason

UIDS = {"alice": 1000, "bob": 1001, "carol": 1002, "agents": 2000, "lab": 2001, "root": 0, "toor": 0, "4711": 1005}
ACCOUNTS = AccountSettings(
    map={"bob": "agents", "mallory": "root", "ghost": "gone", "trudy": "toor"},
    run_as={"alice": ("lab", "gone", "root", "toor"), "bob": ("lab",)},
)


def answer(person: str, uid: int, wanted: str | None = None, *, admin: bool = False) -> str:
    """Return the account, or the refusal's reason."""
    try:
        return account_for(person, uid, wanted, ACCOUNTS, admin=admin, uid_of=UIDS.get)
    except HutchError as error:
        return f"refused: {error.reason.word}"


def words(person: str, uid: int, wanted: str | None = None, *, admin: bool = False) -> str:
    """Return the refusal's sentence."""
    with pytest.raises(HutchError) as refused:
        account_for(person, uid, wanted, ACCOUNTS, admin=admin, uid_of=UIDS.get)
    return refused.value.message


def test_users_agents_run_as_the_user_by_default() -> None:
    """Without a map, each user is their own account."""
    assert mapped("alice", AccountSettings()) == "alice"
    assert account_for("alice", 1000, None, AccountSettings(), admin=False, uid_of=UIDS.get) == "alice"


@pytest.mark.parametrize(
    ("person", "uid", "wanted", "person_gets", "admin_gets"),
    [
        ("alice", 1000, None, "alice", "alice"),
        ("alice", 1000, "alice", "alice", "alice"),
        ("alice", 1000, "lab", "lab", "lab"),  # allowed by run_as
        ("alice", 1000, "bob", "refused: not_allowed", "bob"),
        ("alice", 1000, "agents", "refused: not_allowed", "agents"),
        ("alice", 1000, "nobody-here", "refused: not_allowed", "refused: invalid_params"),
        ("alice", 1000, "gone", "refused: invalid_params", "refused: invalid_params"),  # allowed by run_as, but missing
        ("alice", 1000, "root", "refused: not_allowed", "refused: not_allowed"),  # never root, even with run_as
        ("alice", 1000, "toor", "refused: not_allowed", "refused: not_allowed"),
        ("alice", 1000, "", "refused: not_allowed", "refused: invalid_params"),
        ("bob", 1001, None, "agents", "agents"),  # by the map
        ("bob", 1001, "agents", "agents", "agents"),
        ("bob", 1001, "bob", "refused: not_allowed", "bob"),  # mapped to another account
        ("bob", 1001, "lab", "lab", "lab"),
        ("carol", 1002, "lab", "refused: not_allowed", "lab"),
        ("mallory", 1003, None, "refused: not_allowed", "refused: not_allowed"),  # mapped to root, so no account
        ("trudy", 1006, None, "refused: not_allowed", "refused: not_allowed"),  # root under another name
        ("ghost", 1004, None, "refused: isolation_unavailable", "refused: isolation_unavailable"),
        ("4712", 4712, None, "refused: isolation_unavailable", "refused: isolation_unavailable"),  # only a number
        ("4711", 4711, None, "refused: isolation_unavailable", "refused: isolation_unavailable"),  # not this uid's name
    ],
)
def test_each_requested_account(person: str, uid: int, wanted: str | None, person_gets: str, admin_gets: str) -> None:
    """The map and `run_as` decide for a user; administrators may name any existing account except root's."""
    assert answer(person, uid, wanted) == person_gets
    assert answer(person, uid, wanted, admin=True) == admin_gets


@pytest.mark.parametrize("name", ["root", "toor"])
def test_root_names_an_account_for_agents(name: str) -> None:
    """Agents of uid 0 never run as uid 0: the error asks for an account, and any other may be named."""
    assert "--account" in words(name, 0, admin=True)
    assert answer(name, 0, "alice", admin=True) == "alice"
    assert answer(name, 0, name, admin=True) == "refused: not_allowed"


def test_root_can_be_mapped() -> None:
    """A map gives root's agents an account, like any user's."""
    assert (
        account_for("root", 0, None, AccountSettings(map={"root": "agents"}), admin=True, uid_of=UIDS.get) == "agents"
    )


def test_a_refusal_hides_whether_an_account_exists() -> None:
    """A user who may not use an account gets the same error whether the account exists or not."""
    assert words("carol", 1002, "alice").replace("alice", "X") == words("carol", 1002, "nobody-here").replace(
        "nobody-here", "X"
    )


def test_a_refusal_says_what_to_do() -> None:
    """Each refusal names the user's choices, and the setting that an administrator would change."""
    assert words("bob", 1001, "alice") == (
        "You may not run agents as alice. Yours run as agents, or with --account as lab; an administrator can add an"
        " account for you in the settings, [accounts] run_as."
    )
    assert "[accounts] map" in words("ghost", 1004)
    assert "[accounts] map" in words("4712", 4712)
    assert "--account" in words("alice", 1000, "nobody-here", admin=True)


def test_may_run_as_needs_no_account_lookup() -> None:
    """It decides from the settings which user may name which account."""
    assert may_run_as("alice", "lab", ACCOUNTS, admin=False)
    assert not may_run_as("alice", "bob", ACCOUNTS, admin=False)
    assert may_run_as("alice", "bob", ACCOUNTS, admin=True)
    assert not may_run_as("alice", "root", ACCOUNTS, admin=True)


def test_accounts_are_looked_up_in_the_system() -> None:
    """By default the accounts are those of the host."""
    with pytest.raises(HutchError) as refused:
        account_for("root", 0, "no-such-account", AccountSettings(), admin=True)

    assert refused.value.reason is Reason.INVALID_PARAMS

"""An account and a launcher per test file, and a connection of hutchd's per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.accounts import Account, account
from tests.launcher.stage import Caller, Stage, stage


@pytest.fixture(scope="module")
def alice() -> Iterator[Account]:
    """The account that executors run as."""
    with account("alice", shell="/bin/bash") as made:
        yield made


@pytest.fixture(scope="module")
def shared(alice: Account) -> Iterator[Stage]:
    """A launcher that starts executors as alice."""
    with stage(users=[alice.name]) as made:
        yield made


@pytest.fixture
def hutchd(shared: Stage) -> Iterator[Caller]:
    """A connection to the launcher as the account that it serves."""
    caller = shared.connect()
    yield caller
    caller.close()

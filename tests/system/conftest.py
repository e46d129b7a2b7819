"""Hosts that the tests of a module share: one for the script runner, one for the double of Claude's CLI."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from hutch_client.client import HutchClient
from tests.rehearsal import Model, serve
from tests.rehearsal.scripts import echo
from tests.system import double
from tests.system.host import KEY, Host, host, settings_for


@pytest.fixture(scope="session", autouse=True)
def doubles() -> Iterator[None]:
    """Remove the doubles of the CLI with the last test, before the machine is compared."""
    yield
    double.remove()


@pytest.fixture(scope="module")
async def script_host() -> AsyncIterator[Host]:
    """A host without spare executors for Claude."""
    async with host("[executors]\nspares = 0\n") as made:
        yield made


@pytest.fixture(scope="module")
async def model() -> AsyncIterator[Model]:
    """The module's scripted model; each test sets its `script`."""
    async with serve(key=KEY, script=echo) as served:
        yield served


@pytest.fixture(scope="module")
async def claude_host(model: Model) -> AsyncIterator[Host]:
    """A host with a key, where the double of Claude's CLI uses `model`."""
    async with host(settings_for(model), double=True) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        yield made


@pytest.fixture
async def hutch(claude_host: Host) -> AsyncIterator[HutchClient]:
    """A client of `claude_host`."""
    async with claude_host.client() as client:
        yield client

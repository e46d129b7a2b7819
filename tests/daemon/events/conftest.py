"""A store in a directory of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hutch_daemon.store.store import Store
from tests.fakes.stores import new_database


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(new_database(tmp_path / "hutch.db")) as opened:
        yield opened

"""A stage for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.stage import Stage, new_stage


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """A hutchd that can be started."""
    async with new_stage(tmp_path) as made:
        yield made

"""What all tests share: one event loop, and property tests that tell how to repeat a failure."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "hutch",
    deadline=None,  # a slow machine is no failure
    print_blob=True,  # a failure is repeated by what it prints
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hutch")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Hutch runs on asyncio."""
    return "asyncio"

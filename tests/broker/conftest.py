"""Brokers read no certificate authorities of the system; a test that uses TLS brings its own."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def without_authorities(no_authorities: None) -> None:
    """Set the environment so that the system's authorities are not read."""

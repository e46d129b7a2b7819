"""A sample of the fuzz program's requests."""

from __future__ import annotations

import pytest

from tests.broker.fuzz import fuzz


async def test_a_few_malformed_requests_do_no_harm() -> None:
    """The broker lives, sends the key to the provider alone, and forwards nothing but a model API's requests."""
    sink = await fuzz(320, seed=3)

    assert sink.heads, "nothing reached the provider, so nothing was shown"


@pytest.mark.system
async def test_malformed_requests_do_no_harm() -> None:
    """More random requests have the same result."""
    sink = await fuzz(2_000, seed=7)

    assert sink.heads > 100


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_two_hundred_thousand_malformed_requests_do_no_harm() -> None:
    """The whole run has the same result."""
    sink = await fuzz(200_000, seed=1)

    assert sink.heads > 100

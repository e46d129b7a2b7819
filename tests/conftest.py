"""What all tests share: one event loop, and property tests that tell how to repeat a failure."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from tests import sampling

settings.register_profile(
    "hutch",
    deadline=None,  # a slow machine is no failure
    print_blob=True,  # a failure is repeated by what it prints
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hutch")


def pytest_configure() -> None:
    """Choose the seed of samples before workers start, so that all collect the same tests."""
    sampling.seed()


def pytest_report_header() -> str:
    """Print what repeats this run's samples."""
    return f"samples: {sampling.SEED}={sampling.seed()}"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Hutch runs on asyncio."""
    return "asyncio"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a test that is left out is a failure, but where no installation could help: its reason begins `kernel:`."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and "kernel:" not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"left out, which in CI is a failure: {report.longrepr}"
    return report

"""The parts that all tests share: one event loop, seeds that repeat a failure, and the rules of CI."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from tests import sampling
from tests.accounts import let_go
from tests.preloaded import PRELOADED

_MACHINE: Final = Path(__file__).parents[1] / "scripts" / "machine.py"
_SYSTEM: Final = "tests/system/"
"""`scripts/test fast` does not read it."""
_LEFT: Final = pytest.StashKey[str]()

settings.register_profile(
    "hutch",
    deadline=None,  # a slow machine must not fail a test
    print_blob=True,  # the printed blob repeats a failure
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hutch")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of samples before workers start, so that all collect the same tests.

    `full` runs more examples.
    """
    sampling.seed()
    if "not full" in config.getoption("markexpr", ""):
        settings.register_profile("sample", settings.get_profile("hutch"), max_examples=30)
        settings.load_profile("sample")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `full` the tests that this run's seed does not choose from a sample."""
    sampling.mark_unsampled(items)
    for item in items:
        if item.nodeid.startswith(_SYSTEM) and item.get_closest_marker("system") is None:
            raise pytest.UsageError(f"{item.nodeid} lacks the mark `system`, which all tests in {_SYSTEM} have")


def pytest_report_header() -> str:
    """Print the seed that repeats this run's samples."""
    return f"samples: {sampling.SEED}={sampling.seed()}"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run the tests on asyncio, as Hutch runs."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def preloaded() -> Iterator[None]:
    """End the server of forks with the tests, if one of them started it."""
    yield
    PRELOADED.close()


@pytest.fixture(scope="module")
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trust no certificate authority of the system: each client of providers takes long to read them."""
    folder = tmp_path_factory.mktemp("authorities")
    (folder / "none.pem").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(folder / "none.pem"))
        patch.setenv("SSL_CERT_DIR", str(folder))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skipped test is a failure, unless no installation could help: then its reason begins with `kernel:`."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and "kernel:" not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"skipped, which in CI is a failure: {report.longrepr}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI, fail the run if the machine differs from the state that `scripts/machine.py` saved."""
    saved = os.environ.get("HUTCH_MACHINE")
    if saved is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    let_go()
    _remove_empty_cgroups()
    done = subprocess.run(
        [sys.executable, str(_MACHINE), "compare", saved], capture_output=True, text=True, check=False
    )
    session.config.stash[_LEFT] = done.stdout + done.stderr
    if done.returncode and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _remove_empty_cgroups() -> None:
    """Remove the cgroups of executors whose hutchd a test killed, as the next hutchd would."""
    for place, _, _ in os.walk("/sys/fs/cgroup", topdown=False):
        if os.path.basename(place).startswith("hutch-x-"):
            with suppress(OSError):  # the cgroup has processes: the comparison reports them
                os.rmdir(place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the differences of the machine."""
    if left := config.stash.get(_LEFT, ""):
        terminalreporter.section("left on the machine")
        terminalreporter.write(left)

"""A hutchd whose executors are those of `leased_executor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hutch_daemon import __main__, wiring
from hutch_daemon.environments.same_user import SameUser


class Leased(SameUser):
    """Starts `leased_executor` as an executor."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings of `SameUser`."""
        super().__init__((sys.executable, "-P", str(Path(__file__).with_name("leased_executor.py"))), **settings)


if __name__ == "__main__":
    wiring.SameUser = Leased  # type: ignore[assignment,attr-defined]
    __main__.main()

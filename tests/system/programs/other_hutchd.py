"""A hutchd whose executors are those of `bad_executor`, of the kind that BAD_EXECUTOR names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hutch_daemon import __main__, wiring
from hutch_daemon.environments.same_user import SameUser


class Bad(SameUser):
    """Starts `bad_executor` as an executor."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings of `SameUser`."""
        program = str(Path(__file__).with_name("bad_executor.py"))
        super().__init__((sys.executable, "-P", program, *os.environ["BAD_EXECUTOR"].split(" ")), **settings)


if __name__ == "__main__":
    wiring.SameUser = Bad  # type: ignore[assignment,attr-defined]
    __main__.main()

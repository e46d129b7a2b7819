"""A hutchd whose executors are those of `evil_executor`, which leave their boot line in EVIL_DIR."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hutch_daemon import __main__, wiring
from hutch_daemon.environments.same_user import SameUser


class Evil(SameUser):
    """Starts `evil_executor` as an executor."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings of `SameUser`."""
        program = str(Path(__file__).with_name("evil_executor.py"))
        super().__init__((sys.executable, "-P", program, os.environ["EVIL_DIR"]), **settings)


if __name__ == "__main__":
    wiring.SameUser = Evil  # type: ignore[assignment,attr-defined]
    __main__.main()

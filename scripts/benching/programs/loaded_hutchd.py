"""hutchd, with the executors of `load`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hutch_daemon import __main__, wiring
from hutch_daemon.environments.same_user import SameUser


class Loaded(SameUser):
    """Starts `load` as an executor."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings of `SameUser`."""
        super().__init__((sys.executable, "-P", str(Path(__file__).with_name("load.py"))), **settings)


if __name__ == "__main__":
    setattr(wiring, "SameUser", Loaded)  # noqa: B010 `wiring` does not export this name
    __main__.main()

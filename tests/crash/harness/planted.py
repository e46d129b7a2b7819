"""`python -P planted.py FAULT PROGRAM [ARG...]`: run a program of Hutch (`hutch_daemon`) with a fault of `faults.py`.

hutchd starts its executors the same way. Nothing else differs from `python -m PROGRAM`.
"""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

TOP: Final = Path(__file__).parents[3]
if str(TOP) not in sys.path:
    sys.path.insert(0, str(TOP))

from tests.crash.harness.faults import FAULTS, Function, Target  # noqa: E402

ENVIRONMENT: Final = Target("hutch_daemon.environments.same_user", "SameUser.__init__")
"""The function that decides the command of an executor; its parameter `argv` is the command."""


def command(fault: str, program: str) -> tuple[str, ...]:
    """Return the command line that runs a program with a fault."""
    return (sys.executable, "-P", str(Path(__file__).resolve()), fault, program)


def plant(fault: str, program: str) -> None:
    """Plant the fault in this process: its replacement for `program`, and the command of executors."""
    for target, make in FAULTS[fault].replaces.items():
        if target.module.startswith(f"{program}."):
            _replace(target, make)
    if ENVIRONMENT.module.startswith(f"{program}."):
        _replace(ENVIRONMENT, lambda original: _starting(original, command(fault, "hutch_executor")))


def _replace(target: Target, make: Callable[[Function], Function]) -> None:
    """Replace the function in its module, and in loaded modules that imported it by name."""
    holder, name, original = target.find()
    replacement = make(original)
    setattr(holder, name, replacement)
    for module in [one for key, one in sys.modules.items() if key.startswith("hutch_")]:
        for key, value in list(vars(module).items()):
            if value is original:
                setattr(module, key, replacement)


def _starting(original: Function, argv: tuple[str, ...]) -> Function:
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind_partial(self, *args, **kwargs)
        given.arguments["argv"] = argv
        original(*given.args, **given.kwargs)

    return init


if __name__ == "__main__":
    _, chosen, program, *rest = sys.argv
    sys.argv = [program, *rest]
    plant(chosen, program)
    runpy.run_module(program, run_name="__main__", alter_sys=True)

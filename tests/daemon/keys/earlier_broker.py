"""A broker of an earlier version: leases always work there, and its welcome names no abilities."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from hutch_broker import __main__, broker
from hutch_broker.control import Control
from hutch_shared import broker_link as link


class EarlierControl(Control):
    """The control link as it was."""

    def _hello(self, *call: Any) -> link.BrokerWelcome:
        return replace(super()._hello(*call), abilities=())

    def _methods(self) -> dict[str, Callable[[Any], Any]]:
        return {name: method for name, method in super()._methods().items() if name != "set_active"} | {
            "put_lease": lambda state: self._leases.put(replace(state, active=True))
        }


if __name__ == "__main__":
    vars(broker)["Control"] = EarlierControl
    sys.exit(__main__.main())

"""A broker of an earlier version: its welcome names the abilities that are given as arguments, and it has no others.

Without `set_active` its leases always work; without `network` it forwards requests for the provider's own tools.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from hutch_broker import __main__, broker
from hutch_broker.control import Control
from hutch_shared import broker_link as link

ABILITIES = tuple(sys.argv[1:])


class EarlierControl(Control):
    """The control link as it was."""

    def _hello(self, *call: Any) -> link.BrokerWelcome:
        welcome = super()._hello(*call)
        leases = tuple(replace(state, lease=replace(state.lease, network=None)) for state in welcome.leases)
        return replace(welcome, abilities=ABILITIES, leases=leases)

    def _methods(self) -> dict[str, Callable[[Any], Any]]:
        methods = super()._methods()
        if "set_active" not in ABILITIES:
            del methods["set_active"]
        return methods | {"put_lease": self._put}

    def _put(self, state: link.LeaseState) -> None:
        """Keep a lease as if the fields that came later were not there."""
        active = state.active or "set_active" not in ABILITIES
        self._leases.put(replace(state, active=active, lease=replace(state.lease, network="full")))


if __name__ == "__main__":
    vars(broker)["Control"] = EarlierControl
    sys.exit(__main__.main())

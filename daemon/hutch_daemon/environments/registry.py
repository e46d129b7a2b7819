"""The environments of this hutchd, and the choice of the environment for an account.

To add an environment, write its module and add a line in `wiring`. No other module names a concrete environment.
"""

from __future__ import annotations

from hutch_daemon.environments.port import Account, Environment
from hutch_shared.errors import HutchError, Reason

__all__ = ["Environments"]


class Environments:
    """Environments by name, in order of preference."""

    def __init__(self, default: Environment, *others: Environment) -> None:
        """`default` comes first in the order of preference."""
        self.default = default
        self._by_name = {one.name: one for one in (default, *others)}

    def get(self, name: str) -> Environment | None:
        """Return the environment of that name, or None."""
        return self._by_name.get(name)

    def choose(self, name: str | None, account: Account) -> Environment:
        """Return the environment of that name; without a name, the first that serves the account, or the default.

        The chosen environment may still reject the account in `check_account`. `isolation_unavailable` if no
        environment has that name.
        """
        if name is None:
            return next((one for one in self._by_name.values() if one.serves(account)), self.default)
        chosen = self.get(name)
        if chosen is None:
            known = ", ".join(self._by_name)
            raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"There is no environment {name} here; known: {known}.")
        return chosen

    async def probe(self) -> str:
        """Probe the default environment. Return a sentence if something is wrong, otherwise "". Never raises."""
        return await self.default.probe()

    def __repr__(self) -> str:
        return f"<Environments {' '.join(self._by_name)}>"

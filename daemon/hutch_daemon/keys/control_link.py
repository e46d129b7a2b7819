"""Keeps hutchd linked with a broker: starts the broker on request, and reconnects when the link is lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from hutch_daemon.keys.broker_boot import BrokerPaths, boot_line
from hutch_daemon.keys.supervisor import BrokerProcess, Link, link_token
from hutch_daemon.settings import SettingsInForce
from hutch_shared import broker_link as link
from hutch_shared import messages as m
from hutch_shared.backoff import Backoff
from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError, Reason
from hutch_shared.rpc.dispatch import Handler

__all__ = ["CALL_TIMEOUT", "ControlLink"]

_log: Final = logging.getLogger(__name__)
CALL_TIMEOUT: Final = 30.0
"""Seconds within which the broker must answer a call."""
_PAUSES: Final = (0.1, 5.0)
"""The shortest and the longest pause before the broker is linked again, in seconds."""
_LINK: Final = 1.0
"""Seconds that a broker gets to be linked when hutchd ends."""

Agree = Callable[[Link, link.BrokerWelcome], Awaitable[None]]
"""Brings a newly linked broker to the current state. Other calls can use the link after it returns."""


class ControlLink:
    """hutchd's end of the control link. There is at most one link at a time."""

    def __init__(
        self,
        settings: SettingsInForce,
        paths: BrokerPaths,
        handlers: Mapping[str, Handler[None]],
        agree: Agree,
        *,
        everyone: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`handlers` answer the broker's calls. `everyone`: agents of other accounts may dial the broker's socket."""
        self._settings = settings
        self._paths = paths
        self._handlers = handlers
        self._agree = agree
        self._everyone = everyone
        self._environ = environ
        self._conditions = Conditions(_log)
        self.pid = 0
        """The linked broker's process; 0 without a link."""
        self.reporting: Link | None = None
        """The current link, on which records can arrive even before `agree` has returned."""
        self._agreed: Link | None = None
        """The current link, once `agree` has returned."""
        self._up = anyio.Event()
        self._start_requested = anyio.Event()
        self.abilities: frozenset[str] = frozenset()
        """What the linked broker does beyond the first version of the protocol."""
        self.port: int | None = None
        """The broker's TCP port on the loopback interface; None if it has none."""
        self.trouble = "it is starting"
        """The reason why there is no link, as part of a sentence."""

    @property
    def up(self) -> bool:
        """True while the broker can be called."""
        return self._agreed is not None

    @property
    def start_requested(self) -> bool:
        """True if a broker should run."""
        return self._start_requested.is_set()

    def request_start(self) -> None:
        """Let `run` start a broker if none runs."""
        self._start_requested.set()

    async def wait_up(self) -> bool:
        """Wait up to half a minute for the link; return whether it is up."""
        with anyio.move_on_after(CALL_TIMEOUT):
            await self._up.wait()
        return self.up

    async def call(self, name: str, params: m.Wire, timeout: float = CALL_TIMEOUT) -> m.Wire:
        """Call the broker. Raises the broker's error, or `connection_lost` without a link."""
        if self._agreed is None:
            raise HutchError(Reason.CONNECTION_LOST, f"There is no broker: {self.trouble}.")
        result: m.Wire = await self._agreed.call(name, params, timeout)
        return result

    async def send(self, name: str, params: m.Wire, timeout: float = CALL_TIMEOUT) -> None:
        """Call the broker if it is linked. Errors are only logged: `agree` brings the next broker up to date."""
        if self._agreed is not None:
            try:
                await self._agreed.call(name, params, timeout)
            except HutchError as error:
                _log.warning("the broker did not take %s: %s", name, error)

    def replace(self, tasks: TaskGroup) -> None:
        """Let `tasks` end the linked broker. It is not called any more, and `wait_up` waits for its successor."""
        peer, self._agreed = self._agreed, None
        if peer is not None:
            self._up = anyio.Event()
            self.trouble = "it is replaced"
            tasks.start_soon(self._shut_down, peer)

    async def _shut_down(self, peer: Link) -> None:
        """End a broker. It closes the link when it has ended; a new link before that would meet it again."""
        with anyio.move_on_after(CALL_TIMEOUT):
            try:
                await peer.call("shutdown", m.Nothing())
                await peer.wait_closed()
            except HutchError as error:
                _log.warning("the broker did not take shutdown: %s", error)
        peer.close()

    async def end(self, *, leave: bool) -> None:
        """End the broker, or with `leave` notify it that hutchd ends. Call it once, before `run` is cancelled.

        A broker that is not linked yet gets a moment to be linked. After that `run`, when it is cancelled, ends the one
        that it is starting: no lease is in it.
        """
        if self._agreed is None and self._paths.control.exists():
            with anyio.move_on_after(_LINK):
                await self._up.wait()
        if self._agreed is None:
            return
        if not leave:
            await self.send("shutdown", m.Nothing())
        elif "leave" in self.abilities:
            with suppress(HutchError):  # it ended
                await self._agreed.notify("leave", m.Nothing())

    async def run(self) -> None:
        """Keep a broker linked until cancelled."""
        self._paths.socket.parent.mkdir(parents=True, exist_ok=True)
        self._paths.socket.parent.chmod(0o755 if self._everyone else 0o700)
        if not self._paths.control.exists():  # if it exists, an earlier hutchd left a broker: link with it at once
            await self._start_requested.wait()
        token = await to_thread.run_sync(link_token, self._paths.token)

        def boot() -> link.BrokerBoot:
            return boot_line(self._settings.current, self._paths, token, self._environ, everyone=self._everyone)

        process = BrokerProcess(boot, self._handlers, log_path=self._paths.log, environ=self._environ)
        backoff = Backoff(*_PAUSES)
        try:
            while True:
                await self._link_once(process)
                await anyio.sleep(backoff.next())
        finally:
            process.leave_running()

    async def _link_once(self, process: BrokerProcess) -> None:
        """Link with a broker; return when the link is lost or could not be made."""
        try:
            async with process.linked() as (peer, welcome):
                self.reporting, self.abilities = peer, frozenset(welcome.abilities)
                self.pid = welcome.pid
                await self._agree(peer, welcome)
                self.port = welcome.port
                self._agreed = peer
                self.trouble = ""
                self._up.set()
                self._conditions.end("down", "the broker is up")
                await peer.wait_closed()
                self.trouble = "it ended and is started again"
                self._conditions.begin("down", f"the broker is gone ({peer.why})")
        except HutchError as error:
            self.trouble = error.message
            self._conditions.begin("down", f"no broker: {error}")
        finally:
            self._agreed = None
            if self._up.is_set():  # replace only a set event: others may wait on an unset one
                self._up = anyio.Event()
            process.reap()
            self.pid = 0

    def __repr__(self) -> str:
        return f"<ControlLink {'up' if self.up else self.trouble}>"

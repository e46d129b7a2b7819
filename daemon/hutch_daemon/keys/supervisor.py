"""The broker's process: hutchd links with a running broker, or starts one.

The broker outlives hutchd: it runs in its own process session, and the next hutchd finds it by its control socket. It
gets its boot line on standard input, and only the few environment variables listed here. A running broker that speaks
another protocol version or has another token is ended and replaced; its leases end with it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import SocketAttribute

from hutch_daemon.keys import durable
from hutch_shared import broker_link as link
from hutch_shared.backoff import Backoff
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_token
from hutch_shared.processes import Credentials, peer_credentials
from hutch_shared.rpc.dispatch import Dispatcher, Handler
from hutch_shared.rpc.heartbeat import Timeouts
from hutch_shared.rpc.peer import Peer, PeerLimits
from hutch_shared.rpc.stream import SocketStream, dial

__all__ = ["BrokerProcess", "Link", "link_token"]

_log: Final = logging.getLogger(__name__)
_START: Final = 30.0
_HELLO: Final = 10.0
_LOOKS: Final = (0.005, 0.25)
"""The shortest and the longest pause between two looks whether a new broker listens, in seconds."""
_MAX_LOG_BYTES: Final = 1 << 20
_ENVIRONMENT: Final = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "HUTCH_LOG_LEVEL",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)

Link = Peer[None]


def link_token(path: Path) -> str:
    """Return the token that hutchd shows the broker. Its file, beside the master key, is made at first use. Blocks."""
    durable.write_new(path, new_token().encode())
    content = durable.read(path)
    assert content is not None
    return content.decode().strip()


class BrokerProcess:
    """Links with a broker; starts one if none runs."""

    def __init__(
        self,
        boot: Callable[[], link.BrokerBoot],
        handlers: Mapping[str, Handler[None]],
        *,
        log_path: Path,
        command: tuple[str, ...] = (sys.executable, "-m", "hutch_broker"),
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Start brokers with `command`; their output goes to `log_path`.

        `boot` returns the boot line by the settings of now. Its token and control socket stay the same.
        """
        self._boot = boot
        self._serves = Dispatcher(link.FROM_BROKER, handlers)
        self._log_path = log_path
        self._command = command
        self._environ = environ
        self._children: list[subprocess.Popen[bytes]] = []
        self.starts = 0

    @asynccontextmanager
    async def linked(self) -> AsyncIterator[tuple[Link, link.BrokerWelcome]]:
        """Link with the running broker, or with a new one. HutchError if neither can be reached."""
        boot = self._boot()
        stream = await self._dial(boot) or await self._start(boot)
        peer: Link = Peer(
            stream,
            serves=self._serves,
            sends=link.TO_BROKER,
            context=None,
            limits=PeerLimits(frame=64 << 20),
            timeouts=Timeouts(quiet=30.0),
        )
        async with peer.serving():
            hello = link.BrokerHello(token=boot.token)
            try:
                welcome: link.BrokerWelcome = await peer.call("hello", hello, _HELLO)
            except HutchError as error:
                if error.reason in (Reason.TOKEN_UNKNOWN, Reason.PROTOCOL_MISMATCH):
                    _log.warning("the running broker is not ours (%s): it is replaced", error)
                    self._end(stream)
                raise
            yield peer, welcome

    async def _dial(self, boot: link.BrokerBoot) -> SocketStream | None:
        try:
            stream = await dial(Path(boot.control), _HELLO)
        except OSError:
            return None
        if _other_end(stream).uid not in (0, os.geteuid()):
            await stream.aclose()
            raise HutchError(Reason.NOT_ALLOWED, f"Another account listens on {boot.control}.")
        return stream

    async def _start(self, boot: link.BrokerBoot) -> SocketStream:
        """Start a broker and wait until it accepts the link. Cancelled: the new broker is ended."""
        self.starts += 1
        environ = {name: self._environ[name] for name in _ENVIRONMENT if name in self._environ}
        child = await to_thread.run_sync(self._spawn, boot, environ)
        self._children.append(child)
        looks = Backoff(*_LOOKS, jitter=0.0)
        try:
            with anyio.move_on_after(_START):
                while child.poll() is None:
                    if (stream := await self._dial(boot)) is not None:
                        return stream
                    await anyio.sleep(looks.next())
        except anyio.get_cancelled_exc_class():
            child.terminate()
            raise
        if child.poll() is None:
            child.kill()
        raise HutchError(
            Reason.AGENT_UNAVAILABLE, f"hutch-broker does not start (code {child.poll()}); see {self._log_path}."
        )

    def _spawn(self, boot: link.BrokerBoot, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(log).st_size > _MAX_LOG_BYTES:
            os.ftruncate(log, 0)
        try:
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=dict(environ),
                cwd="/",
                start_new_session=True,
                close_fds=True,
            )
        except OSError as error:
            raise HutchError(Reason.AGENT_UNAVAILABLE, f"hutch-broker cannot be started: {error.strerror}.") from None
        finally:
            os.close(log)
        assert child.stdin is not None
        with suppress(BrokenPipeError), child.stdin:
            child.stdin.write(msgspec.json.encode(boot) + b"\n")
        return child

    def reap(self) -> None:
        """Reap the children that ended."""
        self._children = [child for child in self._children if child.poll() is None]

    def leave_running(self) -> None:
        """Leave the broker running without us; the next hutchd finds it."""
        self.reap()
        for child in self._children:
            child.returncode = 0  # otherwise Popen warns that the child still runs

    @staticmethod
    def _end(stream: SocketStream) -> None:
        """Terminate the process that listens at the other end."""
        with suppress(ProcessLookupError, PermissionError, HutchError):
            os.kill(_other_end(stream).pid, signal.SIGTERM)

    def __repr__(self) -> str:
        return f"<BrokerProcess {self._command[-1]}, started {self.starts} times>"


def _other_end(stream: SocketStream) -> Credentials:
    """Return the process that listens at the other end; HutchError if the kernel does not report it."""
    return peer_credentials(stream.extra(SocketAttribute.raw_socket))  # noqa: S610  # anyio, not Django

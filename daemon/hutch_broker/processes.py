"""Whether the process at the other end is one that the lease was made for.

The kernel tells who dialled. A process belongs to an executor when it is in the group that was made for it, or when
its line of parents leads to the executor: executors adopt what their descendants leave behind. What cannot be looked
up does not belong.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hutch_shared.broker_link import Lease
from hutch_shared.errors import HutchError
from hutch_shared.unix import ancestors, peer_credentials, start_time

__all__ = ["BrokerPeer", "admit", "belongs", "peer_of"]


@dataclass(slots=True)
class BrokerPeer:
    """Who dialled. `pid` None: over TCP, where the kernel tells the uid alone; both None: nobody knows."""

    uid: int | None
    pid: int | None
    tcp: bool = False
    admitted: str = ""
    """The lease that it was found to belong to. A connection stays its process's, so that is looked up once."""


def peer_of(sock: socket.socket) -> BrokerPeer:
    """Return who dialled; a look-up that fails gives nobody, who is refused."""
    if sock.family != socket.AF_UNIX:
        return BrokerPeer(_uid_over_tcp(sock), None, tcp=True)
    try:
        found = peer_credentials(sock)
    except HutchError:
        return BrokerPeer(None, None)
    return BrokerPeer(found.uid, found.pid)


def admit(peer: BrokerPeer, lease: Lease) -> bool:
    """Tell whether the peer belongs to the lease, and remember that it does."""
    if peer.admitted != lease.id and belongs(peer, lease):
        peer.admitted = lease.id
    return peer.admitted == lease.id


def belongs(peer: BrokerPeer, lease: Lease, groups: Callable[[int], frozenset[str]] | None = None) -> bool:
    """Tell whether the peer is of the lease's account and family. `groups` gives the parts of a process's cgroups."""
    if peer.uid != lease.uid:
        return False
    if peer.tcp:
        return lease.tcp
    if peer.pid is None:
        return False
    if lease.cgroup and lease.cgroup in (groups or _cgroup_parts)(peer.pid):
        return True
    return lease.pid in ancestors(peer.pid) and start_time(lease.pid) == lease.start_time


def _cgroup_parts(pid: int) -> set[str]:
    try:
        text = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return set()
    return {part for line in text.splitlines() for part in line.split(":", 2)[-1].split("/")}


def _uid_over_tcp(sock: socket.socket) -> int | None:
    """Return the uid of the socket at the other end of a connection within this machine."""
    try:
        there, here = sock.getpeername()[1], sock.getsockname()[1]
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return None
    wanted = (f":{there:04X}", f":{here:04X}")
    for line in lines:
        fields = line.split()
        if fields[1].endswith(wanted[0]) and fields[2].endswith(wanted[1]) and fields[3] == "01":
            return int(fields[7])
    return None

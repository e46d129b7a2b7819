"""Checks whether the process at the other end of a connection may use a lease.

The kernel reports the pid of the connecting process. The process belongs to an executor if it is in the executor's
cgroup, or if the executor is among its ancestors (executors are subreapers, so orphans keep them as ancestor). A
process that cannot be looked up belongs to no executor.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from hutch_shared.broker_link import Lease
from hutch_shared.errors import HutchError
from hutch_shared.processes import ancestors, cgroup_parts, peer_credentials, start_time

__all__ = ["BrokerPeer", "admit", "belongs", "peer_of"]


@dataclass(slots=True)
class BrokerPeer:
    """The process at the other end of a connection."""

    uid: int | None
    """None if the look-up failed."""
    pid: int | None
    """None if the look-up failed, and over TCP, where the kernel reports only the uid."""
    tcp: bool = False
    admitted: str = ""
    """The id of the lease that the process was found to belong to. It is checked once per connection."""


def peer_of(sock: socket.socket) -> BrokerPeer:
    """Return the process at the other end of a connection. If the look-up fails, its uid and pid are None."""
    if sock.family != socket.AF_UNIX:
        return BrokerPeer(_uid_over_tcp(sock), None, tcp=True)
    try:
        found = peer_credentials(sock)
    except HutchError:
        return BrokerPeer(None, None)
    return BrokerPeer(found.uid, found.pid)


def admit(peer: BrokerPeer, lease: Lease) -> bool:
    """Return whether the peer may use the lease, and remember the result in the peer."""
    if peer.admitted != lease.id and belongs(peer, lease):
        peer.admitted = lease.id
    return peer.admitted == lease.id


def belongs(peer: BrokerPeer, lease: Lease, groups: Callable[[int], Collection[str]] = cgroup_parts) -> bool:
    """Return whether the peer has the lease's uid and is a process of the lease's executor.

    `groups` takes a pid and returns the path components of its cgroups.
    """
    if peer.uid != lease.uid:
        return False
    if peer.tcp:
        return lease.tcp
    if peer.pid is None:
        return False
    if lease.cgroup and lease.cgroup in groups(peer.pid):
        return True
    return lease.pid in ancestors(peer.pid) and start_time(lease.pid) == lease.start_time


def _uid_over_tcp(sock: socket.socket) -> int | None:
    """Return the uid of the socket at the other end of a loopback connection."""
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

"""The two packets of the launcher's socket, a request and a reply. The README has their layout.

`Refused` rejects a request; its text is the sentence in the reply.
"""

from __future__ import annotations

import re
import socket
import struct
from dataclasses import dataclass
from typing import Final

from hutch_launcher.groups import KillRound

__all__ = ["DONE", "FAILED", "KILL", "NOT_YET", "NO_UID", "PROBE", "REFUSED", "START", "SWEEP", "TEXT_SIZE"]
__all__ += ["LaunchReply", "LaunchRequest", "Refused", "read_request", "receive", "send"]

PROBE, START, KILL, SWEEP = 1, 2, 3, 4
DONE, NOT_YET, REFUSED, FAILED = 0, 1, 2, 3
NO_UID: Final = 0xFFFF_FFFF
TEXT_SIZE: Final = 476

_MAGIC: Final = b"hutchL01"
_REQUEST: Final = struct.Struct(">8sBxxxI32sQIIII56x")
_REPLY: Final = struct.Struct(f">8sBxxxIIIIQ{TEXT_SIZE}s")
_WITH_REAPER: Final = 1
_LARGEST_U32: Final = 0xFFFF_FFFF
_EXECUTOR_ID: Final = re.compile(rb"x-[0-9a-hjkmnp-tv-z]{16}")
_LARGEST: Final = {"memory": 1 << 62, "pids": 1 << 22, "cpu_weight": 10_000, "open_files": 1 << 20}
_NOTHING_LEFT: Final = KillRound(0)


class Refused(Exception):  # noqa: N818 - it is an answer, not a fault
    """The launcher will not do this; the text says why."""


@dataclass(frozen=True)
class LaunchRequest:
    """A request. A limit of 0 means none."""

    op: int
    uid: int
    executor: str
    memory: int
    pids: int
    cpu_weight: int
    open_files: int
    reaper: bool = False
    """Whether the executor gets a reaper."""


@dataclass(frozen=True)
class LaunchReply:
    """A reply. `start_time` is in clock ticks since boot. For an executor with a reaper, `pid` is the reaper's."""

    status: int
    text: str = ""
    pid: int = 0
    killed: KillRound = _NOTHING_LEFT
    start_time: int = 0

    def packed(self) -> bytes:
        """Return the packet. A text that is too long is cut between characters."""
        text = self.text.encode()[:TEXT_SIZE].decode(errors="ignore").encode()
        counts = (self.killed.left, self.killed.oom_kills, self.killed.pids_refused)
        counts_u32 = (min(count, _LARGEST_U32) for count in counts)
        return _REPLY.pack(_MAGIC, self.status, self.pid, *counts_u32, self.start_time, text)


def read_request(packet: bytes, descriptors: int) -> LaunchRequest:
    """Parse a packet that came with this number of descriptors. Refused unless the packet is valid."""
    if len(packet) != _REQUEST.size:
        raise Refused(f"A request has {_REQUEST.size} bytes.")
    values = _REQUEST.unpack(packet)
    magic, op, uid, name, memory, pids, cpu_weight, open_files, flags = values
    known_flags = _WITH_REAPER if op == START else 0
    if (
        magic != _MAGIC
        or op not in (PROBE, START, KILL, SWEEP)
        or flags & ~known_flags
        or _REQUEST.pack(*values) != packet
    ):
        raise Refused("This is not a request of this protocol.")
    if descriptors != (1 if op == START else 0):
        raise Refused("A start brings exactly one descriptor, for the output; other requests bring none.")
    executor = name.rstrip(b"\0")
    if not (_EXECUTOR_ID.fullmatch(executor) if op in (START, KILL) else executor == b""):
        raise Refused("The name is not an executor's.")
    request = LaunchRequest(op, uid, executor.decode(), memory, pids, cpu_weight, open_files, bool(flags))
    for limit, largest in _LARGEST.items():
        if getattr(request, limit) > (largest if op == START else 0):
            raise Refused(f"The limit of {limit} is out of range.")
    return request


def receive(sock: socket.socket) -> tuple[bytes, list[int], bool]:
    """Return one packet, the descriptors that came with it, and whether the kernel dropped some of them.

    The caller closes the descriptors. No packet and no descriptors: the peer has closed.
    """
    packet, ancillary, flags, _ = sock.recvmsg(_REQUEST.size + 1, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
    return packet, descriptors, bool(flags & socket.MSG_CTRUNC)


def send(sock: socket.socket, reply: LaunchReply, descriptors: tuple[int, ...] = ()) -> None:
    """Send a reply. OSError when the peer is gone or does not read its replies."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
    sock.sendmsg([reply.packed()], rights if descriptors else [])

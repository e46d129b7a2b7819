"""A user's program with something to steal, to reach and to disturb in each place. Standard library only.

    VICTIM=CANARY victim.py HOME FOLDER CANARY

It writes its places to FOLDER/places.json. For each line on standard input it prints, as a line of JSON, what reached
it so far. It removes what it made, and ends, when its standard input is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pty
import signal
import socket
import sys
import threading
import tty
from collections.abc import Callable
from pathlib import Path
from typing import Any

PULSE = 0.03
"""Seconds between two writes to the file that changes all the time."""
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
ended = threading.Event()
reached: dict[str, list[str]] = {"signals": [], "datagrams": [], "typed": []}


def main() -> None:
    """Make the places, and answer until standard input ends."""
    home, folder, canary = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    said = canary.encode()
    signal.signal(signal.SIGUSR1, lambda number, _: reached["signals"].append(str(number)))
    memory = ctypes.create_string_buffer(said)
    shared = [Path(place, f"{canary}.shared") for place in ("/tmp", "/var/tmp", "/dev/shm")]
    for path in shared:
        path.write_bytes(said)
        path.chmod(0o644)
    shm = libc.shmget(0, 4096, 0o600)
    ctypes.memmove(libc.shmat(shm, None, 0), said + b"\0", len(said) + 1)
    agent = Path(f"/tmp/ssh-{canary}")
    agent.mkdir(mode=0o700)
    master, slave = pty.openpty()
    tty.setraw(slave)
    streams = {"bus": str(folder / "bus"), "agent": str(agent / "agent.1"), "abstract": f"\0{canary}"}
    for address in streams.values():
        _run(_answer_streams, _listening(socket.AF_UNIX, address), said)
    tcp, to_call = _listening(socket.AF_INET, ("127.0.0.1", 0)), _free_port()
    udp, log = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    log.bind(str(folder / "log"))
    _run(_answer_streams, tcp, said)
    _run(_answer_datagrams, udp, said)
    _run(_collect, lambda: log.recv(500), reached["datagrams"])
    _run(_collect, lambda: os.read(master, 500), reached["typed"])
    _run(_call, to_call, said)
    _run(_pulse, home / f"{canary}.pulse")
    places: dict[str, Any] = {
        "pid": os.getpid(),
        "memory": ctypes.addressof(memory),
        "length": len(said),
        "bus": streams["bus"],
        "agent": streams["agent"],
        "abstract": canary,
        "log": str(folder / "log"),
        "shm": shm,
        "shared": [str(path) for path in shared],
        "terminal": os.ttyname(slave),
        "tcp": tcp.getsockname()[1],
        "udp": udp.getsockname()[1],
        "calls": to_call,
    }
    (folder / "places.part").write_text(json.dumps(places))
    (folder / "places.part").rename(folder / "places.json")
    for _ in sys.stdin:
        print(json.dumps(reached), flush=True)
    ended.set()
    libc.shmctl(shm, 0, None)
    for path in (*shared, Path(streams["agent"]), home / f"{canary}.pulse"):
        path.unlink(missing_ok=True)
    agent.rmdir()


def _run(act: Callable[..., None], *given: Any) -> None:
    threading.Thread(target=act, args=given, daemon=True).start()


def _listening(family: int, address: Any) -> socket.socket:
    made = socket.socket(family)
    made.bind(address)
    made.listen()
    return made


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def _answer_streams(listening: socket.socket, said: bytes) -> None:
    while True:
        with contextlib.suppress(OSError), listening.accept()[0] as one:
            one.settimeout(2)
            if one.recv(16):
                one.sendall(said)


def _answer_datagrams(bound: socket.socket, said: bytes) -> None:
    while True:
        with contextlib.suppress(OSError):
            bound.sendto(said, bound.recvfrom(16)[1])


def _collect(receive: Callable[[], bytes], into: list[str]) -> None:
    while True:
        with contextlib.suppress(OSError):
            into.append(receive().decode(errors="replace"))


def _call(port: int, said: bytes) -> None:
    """Connect again and again to a port on which nobody listens yet; say the canary to the listener."""
    while not ended.wait(PULSE):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as one:
            one.sendall(said)


def _pulse(path: Path) -> None:
    while not ended.wait(PULSE):
        path.write_text("changed")


if __name__ == "__main__":
    main()

"""Searches everywhere for a key, as an agent could. Standard library only: it runs where the agent's commands run.

    search.py OUT NEEDLE SOCKET... -- DIRECTORY...

NEEDLE is the key with each byte XOR 90, in hexadecimal, so that the search does not find itself. It searches the
environment, command line and memory of every other process, and all files below each DIRECTORY. It dials each SOCKET,
and uses a lease that it finds at the last one. It writes its findings to OUT as JSON.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import resource
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

CHUNK = 4 << 20
PAGE = resource.getpagesize()
LEASE = re.compile(rb"hutch-l-[a-z0-9]+-[A-Za-z0-9_-]{20,}")


def forms(key: bytes) -> list[bytes]:
    """Return the usual encodings of the key."""
    text = key.decode()
    found = [key, key[::-1], key.hex().encode(), key.hex().upper().encode(), quote(text, safe="").encode()]
    for offset in range(3):
        padded = bytes(offset) + key
        found += [base64.b64encode(padded)[4:-4], base64.urlsafe_b64encode(padded)[4:-4]]
    return [*found, key.decode().encode("utf-16-le"), json.dumps(text)[1:-1].encode()]


class Search:
    """The findings so far."""

    def __init__(self, key: bytes) -> None:
        self.forms = forms(key)
        self.hits: list[str] = []
        self.leases: set[bytes] = set()
        self.read: dict[str, int] = {}
        self.commands: list[str] = []

    def look(self, where: str, kind: str, parts: Iterator[bytes]) -> None:
        """Search the parts of one place; they may overlap."""
        for part in parts:
            self.read[kind] = self.read.get(kind, 0) + len(part)
            self.leases |= set(LEASE.findall(part))
            if any(form in part for form in self.forms):
                self.hits.append(where)

    def processes(self) -> None:
        """Search each process: environ, cmdline and memory."""
        for pid in (name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
            self.commands += [part.replace(b"\0", b" ").decode() for part in of_file(f"/proc/{pid}/cmdline")]
            for name in ("environ", "cmdline"):
                self.look(f"/proc/{pid}/{name}", name, of_file(f"/proc/{pid}/{name}"))
            self.look(f"/proc/{pid}/mem", "mem", of_memory(pid))

    def files(self, directory: str) -> None:
        """Search all files below a directory."""
        for above, _, names in os.walk(directory):
            for name in names:
                path = os.path.join(above, name)
                if os.path.isfile(path) and not os.path.islink(path):
                    self.look(path, "files", of_file(path))


def of_file(path: str) -> Iterator[bytes]:
    """Yield the content in chunks that overlap."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        tail = b""
        while chunk := file.read(CHUNK):
            yield tail + chunk
            tail = chunk[-1024:]


def of_memory(pid: str) -> Iterator[bytes]:
    """Yield the pages of a process that are in memory, except those of program files."""
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/maps") as maps,
        open(f"/proc/{pid}/mem", "rb", 0) as memory,
        open(f"/proc/{pid}/pagemap", "rb", 0) as pages,
    ):
        for line in maps:
            span, mode, _, _, _, *name = line.split(None, 5)
            of_program = bool(name) and mode[1] != "w" and name[0].startswith("/")
            if mode[0] == "r" and not of_program and not (name and name[0].startswith("[v")):
                start, end = (int(side, 16) for side in span.split("-"))
                yield from present(memory, pages, start, end)


def present(memory: Any, pages: Any, start: int, end: int) -> Iterator[bytes]:
    """Yield the runs of pages between two addresses that are in memory."""
    for at in range(start, end, PAGE << 16):
        upto = min(end, at + (PAGE << 16))
        pages.seek(at // PAGE * 8)
        entries = pages.read((upto - at) // PAGE * 8)
        if not any(entries):
            continue
        flags = [entry >> 62 for (entry,) in struct.iter_unpack("<Q", entries)]
        first = 0
        while first < len(flags):
            last = first
            while last < len(flags) and bool(flags[last]) == bool(flags[first]):
                last += 1
            if flags[first]:
                with contextlib.suppress(OSError):
                    memory.seek(at + first * PAGE)
                    yield memory.read((last - first) * PAGE)
            first = last


def dial(path: str) -> str:
    """Return the result of dialling a socket."""
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
    except OSError as error:
        return type(error).__name__
    return "reached"


class Broker(http.client.HTTPConnection):
    """An HTTP connection through the broker's socket."""

    def __init__(self, path: str) -> None:
        super().__init__("broker.invalid", timeout=30)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(self.path)


def use(path: str, lease: str) -> tuple[int, bytes]:
    """Make one request with the lease; return the status, the headers and the body."""
    broker = Broker(path)
    broker.request("POST", "/v1/messages", b"{}", {"x-api-key": lease, "content-type": "application/json"})
    answer = broker.getresponse()
    return answer.status, str(answer.getheaders()).encode() + answer.read()


def seen(directories: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each directory that can be listed, and the names in it."""
    for path in directories:
        with contextlib.suppress(OSError):
            yield path, sorted(os.listdir(path))


def main() -> None:
    out, needle, *rest = sys.argv[1:]
    at = rest.index("--")
    sockets, directories = rest[:at], rest[at + 1 :]
    search = Search(bytes(byte ^ 90 for byte in bytes.fromhex(needle)))
    search.look("environment", "environ", iter([repr(dict(os.environ)).encode()]))
    search.processes()
    for directory in directories:
        search.files(directory)
    used = []
    for lease in sorted(search.leases):
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, answer = use(sockets[-1], lease.decode())
            used.append(status)
            search.look("what the broker answered", "broker", iter([answer]))
    found = {
        "hits": sorted(set(search.hits)),
        "read": search.read,
        "commands": search.commands,
        "leases": len(search.leases),
        "used": used,
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "sockets": {os.path.basename(path): dial(path) for path in sockets},
        "seen": dict(seen(directories)),
    }
    with open(f"{out}.new", "w") as file:
        json.dump(found, file)
    os.replace(f"{out}.new", out)


if __name__ == "__main__":
    main()

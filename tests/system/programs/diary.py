"""A victim's agent, with a secret in each place where a process can have one. Standard library only.

    DIARY=… diary.py FOLDER

Writes the place of each secret to FOLDER/diary.json. Then waits for FOLDER/end, and prints as JSON which of its things
were changed, and which signals arrived.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
IPC_PRIVATE, IPC_RMID, IPC_NOWAIT, GETVAL, SETVAL = 0, 0, 0o4000, 12, 16
DEADLINE = 100.0
came: list[int] = []


class MqAttr(ctypes.Structure):
    """struct mq_attr of mq_open(3)."""

    _fields_ = (("flags", ctypes.c_long), ("most", ctypes.c_long), ("size", ctypes.c_long), ("rest", ctypes.c_long * 5))


def main() -> None:
    """Create the secrets, wait, and print the changes."""
    folder = Path(sys.argv[1])
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, lambda number, _: came.append(number))
    words = {name: f"secret-of-{name}-{secrets.token_hex(8)}" for name in ("file", "memory", "shm", "dev_shm", "mq")}
    words["environ"] = os.environ["DIARY"]
    kept = folder / "secret.txt"
    kept.write_text(words["file"])
    kept.chmod(0o600)
    handle = os.open(kept, os.O_RDWR)
    memory = ctypes.create_string_buffer(words["memory"].encode())
    libc.shmat.restype = ctypes.c_void_p
    shm = libc.shmget(IPC_PRIVATE, 4096, 0o600)
    address = libc.shmat(shm, None, 0)
    ctypes.memmove(address, words["shm"].encode(), len(words["shm"]))
    sem, msg = libc.semget(IPC_PRIVATE, 1, 0o600), libc.msgget(IPC_PRIVATE, 0o600)
    libc.semctl(sem, 0, SETVAL, 7)
    libc.msgsnd(msg, (1).to_bytes(8, sys.byteorder) + b"dear diary", 10, IPC_NOWAIT)
    dev_shm = Path(f"/dev/shm/{folder.parent.name}-{os.getpid()}")
    dev_shm.write_text(words["dev_shm"])
    dev_shm.chmod(0o600)
    mq = f"/{folder.parent.name}-{os.getpid()}"
    queue = libc.mq_open(mq.encode(), os.O_CREAT | os.O_RDWR, 0o600, ctypes.byref(MqAttr(0, 4, 64)))
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "diary.sock"))
    listening.listen()
    listening.setblocking(False)
    told: dict[str, Any] = {
        "uid": os.getuid(),
        "gid": os.getgid(),
        "files": [str(kept)],
        "folders": [str(folder), str(folder.parent)],
        "pids": {"agent": os.getpid()},
        "memory": {"agent": ctypes.addressof(memory)},
        "fd": handle,
        "ipc": {"shm": shm, "sem": sem, "msg": msg, "mq": mq if queue >= 0 else "", "dev_shm": str(dev_shm)},
        "sockets": [str(folder / "diary.sock")],
        "secrets": words,
    }
    part = folder / "diary.part"
    part.write_text(json.dumps(told))
    part.rename(folder / "diary.json")
    deadline = time.monotonic() + DEADLINE
    while not (folder / "end").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    room = ctypes.create_string_buffer(64)
    found = {
        "file": kept.read_text() == words["file"] and os.fstat(handle).st_mode & 0o777 == 0o600,
        "memory": memory.value.decode() == words["memory"],
        "shm": ctypes.string_at(address, len(words["shm"])).decode() == words["shm"],
        "sem": libc.semctl(sem, 0, GETVAL) == 7,
        "msg": libc.msgrcv(msg, room, 48, 0, IPC_NOWAIT) == 10 and libc.msgrcv(msg, room, 48, 0, IPC_NOWAIT) == -1,
        "dev_shm": dev_shm.read_text() == words["dev_shm"],
        "socket": not _dialled(listening),
        "environ": os.environ["DIARY"] == words["environ"],
        "limits": os.getpriority(os.PRIO_PROCESS, 0) == 0,
    }
    for removed in (libc.shmctl(shm, IPC_RMID, None), libc.semctl(sem, 0, IPC_RMID), libc.msgctl(msg, IPC_RMID, None)):
        found["removed"] = found.get("removed", True) and removed == 0
    dev_shm.unlink()
    if queue >= 0:
        libc.mq_unlink(mq.encode())
    print(json.dumps({"touched": [name for name, intact in found.items() if not intact], "signals": came}))


def _dialled(listening: socket.socket) -> bool:
    try:
        listening.accept()
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    main()

"""Runs a command as an account, on what is a host without user namespaces for it. Standard library only.

    closed_namespaces.py UID GID COMMAND…

As root it makes a user namespace in which every account is itself, and allows no further one inside
(`user.max_user_namespaces`, which each namespace has for itself). The rest of the machine does not change.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import NoReturn

NEW_USER = 0x10000000
ALL = f"0 0 {2**32 - 1}"


def main() -> NoReturn:
    """Make the namespace, become the account, and exec."""
    uid, gid, *command = sys.argv[1:]
    entered, mapped = os.pipe(), os.pipe()
    maps = os.fork()
    if not maps:  # only a process of the outer namespace may map every account
        os.close(entered[1])
        os.read(entered[0], 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{os.getppid()}/{name}").write_text(ALL)
        os.write(mapped[1], b".")
        os._exit(0)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(NEW_USER) == 0, os.strerror(ctypes.get_errno())
    os.write(entered[1], b".")
    os.read(mapped[0], 1)
    os.waitpid(maps, 0)
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    os.setgroups([])
    os.setresgid(int(gid), int(gid), int(gid))
    os.setresuid(int(uid), int(uid), int(uid))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

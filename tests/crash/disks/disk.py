"""File systems that a test may fill and break, and the calls to hutchd that all tests of bad disks make."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Event
from tests.programs import required_program
from tests.system.log import DEADLINE

PROMPTLY = 5.0
"""Seconds within which a refusal must come; on an idle machine it takes milliseconds."""

TOO_MUCH = "cannot be stored " * 100_000
"""A prompt larger than the space that the log of a small full disk has allocated and not used."""


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[None]:
    """Mount a small file system in memory on `folder`."""
    with _mounted(folder, "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs"):
        yield


@contextmanager
def ext4(folder: Path, image: Path, size: str) -> Iterator[None]:
    """Mount the ext4 file system in `image`, created if missing, on `folder`. It becomes read-only after an error."""
    mkfs = required_program("mkfs.ext4")
    if not image.exists():
        subprocess.run(["truncate", "-s", size, str(image)], check=True)
        subprocess.run([mkfs, "-q", str(image)], check=True)
    for _ in range(50):
        with _mounted(folder, "-o", "loop,errors=remount-ro", str(image)):
            if not os.statvfs(folder).f_flag & os.ST_RDONLY and _is_made_private(folder):
                yield
                return
        time.sleep(0.1)  # the kernel still has the image as the last mount left it
    raise AssertionError(f"{image} stays read-only")


def _is_made_private(folder: Path) -> bool:
    """Close the folder to others; return False if its file system has become read-only again meanwhile."""
    try:
        folder.chmod(0o700)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return False
    return True


@contextmanager
def _mounted(folder: Path, *words: str) -> Iterator[None]:
    """Mount with these arguments; unmount at the end, after 5 s even if a process still has a file open.

    A lazy unmount leaves the file system alive. A second mount of the same image would then find it as it was left:
    read-only after an error.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    done = subprocess.run([required_program("mount"), *words, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"kernel: no mount is possible here: {done.stderr.strip()}")
    try:
        yield
    finally:
        for _ in range(50):
            if not subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode:
                break
            time.sleep(0.1)
        else:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Callable[[], None]:
    """Use all space of a file system; return a function that frees it. A second call uses the space left then."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler.unlink


def give_back(folder: Path, size: int) -> None:
    """Free `size` bytes of the space that `fill` used."""
    filler = folder / "filler"
    os.truncate(filler, max(0, filler.stat().st_size - size))


async def refused(hutch: HutchClient, session: m.Session) -> HutchError:
    """Submit a prompt that cannot be stored; return the refusal, which must come promptly with the reason."""
    with anyio.fail_after(PROMPTLY), pytest.raises(HutchError) as caught:
        await hutch.submit_prompt(session.id, TOO_MUCH)
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    return caught.value


async def healed(hutch: HutchClient) -> m.Status:
    """Wait until hutchd can store again; return its status."""
    with anyio.fail_after(DEADLINE):
        while not (status := await hutch.get_status()).store.ok:
            await anyio.sleep(0.05)
    return status


async def record(hutch: HutchClient, session: m.Session) -> list[tuple[int, str]]:
    """Return the number and kind of each event that a new client reads of a session."""
    found: list[tuple[int, str]] = []
    async with hutch.follow(m.FollowEvents(session.id)) as follow:
        while len(found) < follow.head:
            found.append(named(await anext(follow)))
    return found


def named(event: Event) -> tuple[int, str]:
    """Return the number and kind of an event."""
    return event.seq, event.kind

"""Files and folders that an agent exchanges for links, again and again, while something reads them."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.sampling import seed

__all__ = ["swapping", "write"]

_SAME_NAME: Final = 0.7
"""How often a link leads to a foreign file or folder of its own name, if there is one."""


def write(root: Path, files: dict[str, str]) -> None:
    """Write files below `root`."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@contextmanager
def swapping(root: Path, names: Iterable[str], foreign: Sequence[Path], pause: float) -> Iterator[None]:
    """While the block runs, exchange one of the files, or a folder between it and `root`, for a link for a moment.

    The link leads to one of `foreign`, and stays for up to `pause` seconds. At the end everything is as it was.
    """
    below = {place for name in names for place in ((root / name), *(root / name).parents) if root in place.parents}
    places, away, ended = sorted(below), root / "away", threading.Event()

    def swap(dice: random.Random) -> None:
        while not ended.is_set():
            path = dice.choice(places)
            same_name = [one for one in foreign if one.name == path.name]
            with suppress(OSError):
                os.rename(path, away)
                with suppress(OSError):
                    os.symlink(dice.choice(same_name if same_name and dice.random() < _SAME_NAME else foreign), path)
                ended.wait(dice.random() * pause)
                os.unlink(path)
                os.rename(away, path)

    thread = threading.Thread(target=swap, args=(random.Random(seed()),))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

"""The rehearsal model for benches, in a process of its own: `model KEY`. Its first line is its URL.

It answers "say N words" with a text of N deltas, and anything else with a short one.
"""

from __future__ import annotations

import re
import sys

import anyio

from tests.rehearsal import Reply, Request, Say, serve

_ORDER = re.compile(r"say (\d+) words")


def script(request: Request) -> Reply:
    """Answer with as many words as the last order asks for."""
    orders = _ORDER.findall(request.prompt)
    count = int(orders[-1]) if orders else 3
    return Say(" ".join(["word"] * count), chunks=count)


async def main(key: str) -> None:
    """Serve until killed."""
    async with serve(key=key, script=script) as model:
        sys.stdout.write(model.url + "\n")
        sys.stdout.flush()
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])

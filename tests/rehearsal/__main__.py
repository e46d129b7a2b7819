"""The rehearsal model as a program: `python -m tests.rehearsal --key-file FILE --script demo`.

Its first line on standard output is its URL. It runs until SIGTERM or SIGINT, and then exits with 0.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import anyio

from tests.rehearsal.parts import Script
from tests.rehearsal.scripts import SCRIPTS
from tests.rehearsal.server import serve


async def run(key: str, script: Script, port: int) -> None:
    """Serve until a signal arrives."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with serve(key=key, script=script, port=port) as model:
            print(model.url, flush=True)
            async for _ in signals:
                return


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal", description="A scripted model on loopback.")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free one")
    parser.add_argument("--key-file", type=Path, required=True, help="the key to require, on one line")
    parser.add_argument("--script", choices=sorted(SCRIPTS), default="echo")
    chosen = parser.parse_args()
    anyio.run(run, chosen.key_file.read_text(encoding="utf-8").strip(), SCRIPTS[chosen.script], chosen.port)


if __name__ == "__main__":
    main()

"""Gives a sandboxed command the proxy, in a network namespace of its own; then becomes the command.

`python -I -S netns_bridge.py DESCRIPTOR PORT COMMAND…`. A listening socket belongs to the network namespace in which it
was made, whichever process holds it. So this program makes one on loopback inside, and passes it through the inherited
descriptor to the executor, which accepts connections outside. Nothing of Hutch's keeps running inside, and no socket of
Hutch's is visible there.

It imports no other module of Hutch: it runs as a program of its own, in a sandbox that shows few files.
"""

from __future__ import annotations

import os
import signal
import socket
import sys


def main() -> None:
    """Pass the listening socket on and execute the command, found on PATH. Exits with a sentence if either fails."""
    descriptor, port, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    try:
        with socket.socket(fileno=descriptor) as executor, socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            listener.listen(128)
            socket.send_fds(executor, [b"\n"], [listener.fileno()])
    except OSError as error:
        sys.exit(f"hutch: the sandbox's network bridge could not be made: {error}")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these signals; the command must not inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 -- the command may well be a shell
    except OSError as error:
        sys.exit(f"hutch: {command[0]} could not be started in the sandbox: {error.strerror}")


if __name__ == "__main__":
    main()

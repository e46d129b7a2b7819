"""The last step into walls that have a network of their own: opens the door to the proxy, then becomes the command.

`python -I -S doorway.py DESCRIPTOR PORT COMMAND…`. A listening socket belongs to the network in which it was made,
whoever holds it: this makes one on loopback inside, hands it through the inherited descriptor to the executor, which
accepts from it outside, and is gone. So nothing of ours runs inside, and no socket of ours is seen there.
It is a program by itself and imports nothing of ours: where it runs little is seen.
"""

from __future__ import annotations

import os
import signal
import socket
import sys


def main() -> None:
    """Open the door and execute the command, found on PATH; OSError when one of them cannot be done."""
    descriptor, port, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    with socket.socket(fileno=descriptor) as executor, socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        socket.send_fds(executor, [b"\n"], [listener.fileno()])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what it becomes would too
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)  # noqa: S606 -- a shell is what it may well become


if __name__ == "__main__":
    main()

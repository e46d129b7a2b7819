"""A useless executor: `exit` ends at once, `hang` never says hello, `spin` says hello and then only computes.

The second argument is a file to which each start adds a line with its pid.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import msgspec

from hutch_executor.process.hardening import announce, harden
from hutch_shared import messages as m

manner, starts = sys.argv[1:]
harden()
announce(0)
boot = msgspec.json.decode(sys.stdin.buffer.readline(), type=m.Boot)
with open(starts, "a") as file:
    file.write(f"{os.getpid()}\n")
if manner == "exit":
    sys.exit(3)
if manner == "hang":
    time.sleep(600)
line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
line.connect(boot.socket)
params = m.Hello(boot.executor, boot.token, m.PROTOCOL, "0", epoch_seen=boot.daemon_epoch)
hello = {"jsonrpc": "2.0", "id": 1, "method": "hello", "params": params}
line.sendall(msgspec.json.encode(hello) + b"\n")
line.recv(1 << 16)
while True:
    pass

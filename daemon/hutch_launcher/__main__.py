"""`hutch-launcher`: starts executors as the accounts that root's configuration names, and ends them. See the README."""

from __future__ import annotations

import argparse
import fcntl
import os
import pwd
import socket
import sys
from contextlib import suppress

from hutch_launcher.groups import find_groups
from hutch_launcher.packets import FAILED, LaunchReply, Refused, send
from hutch_launcher.rules import CONFIG, ConfigFile, check_account
from hutch_launcher.server import CONNECTIONS, LaunchServer, log

__all__ = ["main"]


def main() -> int:
    """Serve hutchd; return the exit code: 0 after a signal or the connection's end, 2 if the launcher cannot serve."""
    os.umask(0o077)
    while os.open(os.devnull, os.O_RDWR) <= 2:
        pass  # 0, 1 and 2 stay open, so that no other file gets these numbers
    connection = None if sys.argv[1:] else _given_connection()
    parser = argparse.ArgumentParser("hutch-launcher", description=__doc__)
    parser.add_argument("--config", default=CONFIG, help="the configuration; only root may write it (%(default)s)")
    parser.add_argument("--listen", metavar="PATH", help="listen at PATH (default: the socket that systemd passes)")
    parser.add_argument("--check", action="store_true", help="print what the launcher would do, and exit")
    options = parser.parse_args()
    try:
        config = ConfigFile(options.config)
        if options.check:
            sys.stdout.write(_check(config, options.config))
            return 0
        server = LaunchServer(config)
        listener = None
        if connection is None:
            listener = _listen(options.listen, config.current.served_uid) if options.listen else _passed_listener()
            if listener is None:
                raise Refused("It is started by systemd, by sudo, or with --listen PATH; see --help.")
            _notify_ready()
        server.serve(listener, connection)
        if options.listen:
            os.unlink(options.listen)
    except (Refused, OSError) as error:
        log(str(error))
        if connection is not None:
            with suppress(OSError):
                connection.setblocking(False)
                send(connection, LaunchReply(FAILED, str(error)))
        return 2
    return 0


def _check(config: ConfigFile, path: str) -> str:
    """Return what the launcher would do, as text for the administrator."""
    now, groups = config.current, find_groups()
    lines = [f"configuration  {path}: only {now.serve} (uid {now.served_uid}) may ask"]
    lines += [f"starts         {now.interpreter} -P -s -m hutch_executor"]
    for name in dict.fromkeys((*now.users, *now.dedicated)):
        try:
            check_account(pwd.getpwnam(name).pw_uid, now)
            lines += [f"account        {name}: yes"]
        except (KeyError, Refused) as error:
            lines += [f"account        {name}: no. {error if isinstance(error, Refused) else 'It does not exist.'}"]
    lines += [f"groups         {', '.join(now.groups) or 'none'}"]
    lines += [f"cgroups        {groups.version or 'none'} {groups.tree or ''} {groups.why}"]
    lines += [f"limits         {', '.join(groups.limits) or 'none'}"]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- sockets


def _given_connection() -> socket.socket | None:
    """Return standard input if it is a connection, which means that sudo started the launcher."""
    try:
        sock = socket.socket(fileno=os.dup(0))
    except OSError:
        return None
    if sock.family == socket.AF_UNIX and sock.type == socket.SOCK_SEQPACKET:
        with suppress(OSError):
            sock.getpeername()
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            return sock
    sock.close()
    return None


def _passed_listener() -> socket.socket | None:
    """Return the socket that systemd passed, if any. (sd_listen_fds(3))"""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    sock = socket.socket(fileno=3)
    sock.set_inheritable(False)
    if sock.type != socket.SOCK_SEQPACKET or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise Refused("The socket that was passed does not listen for packets (ListenSequentialPacket=).")
    sock.listen(CONNECTIONS)
    return sock


def _listen(path: str, uid: int) -> socket.socket:
    """Listen at a path that only this account may connect to. Refused if another launcher holds the lock beside it."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until the process ends
    except BlockingIOError:
        raise Refused(f"Another launcher listens on {path}.") from None
    with suppress(FileNotFoundError):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(path)
    os.chown(path, uid, -1)
    sock.listen(CONNECTIONS)
    return sock


def _notify_ready() -> None:
    """Notify systemd that the launcher is ready, if systemd asks for that. (sd_notify(3))"""
    if name := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, suppress(OSError):
            sock.connect(f"\0{name[1:]}" if name.startswith("@") else name)
            sock.send(b"READY=1")


if __name__ == "__main__":
    sys.exit(main())

"""Starts `hutch` and `hutchd` as forks of a process that has already imported them.

A fork takes a twentieth of the time of a start of Python with its imports. Everything else is as without the fork:
arguments, environment, directory, standard streams and exit code. A test of how the process starts, such as what it
imports, starts Python instead.

The process of the tests uses `PRELOADED`. This file is also two programs. `serve` imports and forks; it ends with the
process of the tests. `relay` runs where a test needs a program that it can name: it passes its arguments, environment
and streams to the server, and ends as the fork ends.
"""

from __future__ import annotations

import array
import marshal
import os
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # a relay imports little
    import subprocess
    from collections.abc import Iterable, Mapping
    from typing import Any, Final, NoReturn

__all__ = ["PRELOADED", "Started"]

_MODULES: Final = {"hutch": "hutch_client.__main__", "hutchd": "hutch_daemon.__main__"}
"""The module of each program; its `main` is the program."""
_RELAYED: Final = (0, 1, 2, 8, 9)
"""The descriptors that a relay passes on: standard streams, and those of argcomplete."""
_PYTHON: Final = (sys.executable, "-I", "-S")
_FILE: Final = os.path.abspath(__file__)


class Started:
    """A fork. No other process gets its pid before `wait` returns."""

    def __init__(
        self,
        path: str,
        argv: Iterable[str],
        files: Mapping[int, int],
        environment: Mapping[str, str],
        *,
        new_session: bool,
    ) -> None:
        """`files` maps the fork's descriptors to those of this process."""
        request = marshal.dumps([[*argv], {**environment}, os.getcwd(), [*files], new_session])
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files.values()))
        self._socket.sendmsg([len(request).to_bytes(4, "big")], [rights])
        self._socket.sendall(request)
        self._replies = self._socket.makefile("rb")
        self._pid = int(self._replies.readline())
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code, or the negative number of the signal that ended it."""
        if self._code is None:
            self._socket.settimeout(timeout)
            self._code = int(self._replies.readline())
            self._replies.close()
            self._socket.close()
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._code is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        """End the process, unless it has ended."""
        self.send_signal(9)


class Preloaded:
    """The server, which the first use starts."""

    def __init__(self) -> None:
        self._path = ""
        self._server: subprocess.Popen[bytes] | None = None

    def start(self, *argv: str, files: Mapping[int, int], environment: Mapping[str, str]) -> Started:
        """Start a program in a session of its own."""
        return Started(self._serving(), argv, files, environment, new_session=True)

    def argv(self, program: str) -> list[str]:
        """Return the command of a relay to `program`; arguments may follow."""
        return [*_PYTHON, _FILE, "relay", self._serving(), program]

    def folder(self) -> str:
        """Return a directory for `PATH`: it holds a relay to each program."""
        return os.path.dirname(self._serving())

    def close(self) -> None:
        """End the server, if it was started."""
        if self._server is not None:
            self._server.communicate()  # the server ends with its standard input
            self._server = None

    def _serving(self) -> str:
        import subprocess
        import tempfile

        if self._server is None:
            self._path = f"{tempfile.mkdtemp(prefix='hutch-preloaded-')}/socket"
            argv = [sys.executable, _FILE, "serve", self._path]
            self._server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            assert self._server.stdout is not None
            assert self._server.stdout.readline() == b"serving\n"
        return self._path


PRELOADED: Final = Preloaded()


def _relay(path: str, *argv: str) -> NoReturn:
    files = {descriptor: descriptor for descriptor in _RELAYED if _is_open(descriptor)}
    code = Started(path, argv, files, os.environ, new_session=False).wait()
    os._exit(code if code >= 0 else 128 - code)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _serve(path: str) -> None:
    """Fork a process for each connection until standard input ends."""
    import gc
    import select
    import shutil

    folder = os.path.dirname(path)
    try:
        for program in _MODULES:
            with open(os.open(f"{folder}/{program}", os.O_WRONLY | os.O_CREAT, 0o700), "w", encoding="utf-8") as script:
                words = " ".join(f"'{word}'" for word in (*_PYTHON, _FILE, "relay", path, program))
                script.write(f'#!/bin/sh\nexec {words} "$@"\n')
        _import_client()
        gc.collect()
        gc.freeze()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(16)
            os.write(1, b"serving\n")
            while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
                with listener.accept()[0] as connection:
                    _fork(connection)
                _reap()
    finally:
        shutil.rmtree(folder)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _import_client() -> None:
    """Import the modules of the client's commands, also those that most commands import late."""
    import importlib
    import pkgutil

    import hutch_client

    for name in ("anyio._backends._asyncio", "argcomplete", "platformdirs", "tomlkit"):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(hutch_client.__path__, "hutch_client."):
        importlib.import_module(module.name)


def _fork(connection: socket.socket) -> None:
    import importlib

    header, passed, *_ = socket.recv_fds(connection, 4, 16)
    request = b""
    while len(request) < int.from_bytes(header, "big"):
        request += connection.recv(1 << 20)
    argv, environment, folder, numbers, new_session = marshal.loads(request)
    main = importlib.import_module(_MODULES[argv[0]]).main  # imported once for all forks
    if os.fork() == 0:  # keeps the fork's pid from being used again
        if (pid := os.fork()) == 0:
            _take_over(dict(zip(numbers, passed, strict=True)), argv, environment, folder, new_session=new_session)
            _run(main)
        for descriptor in (0, 1, *passed):
            os.close(descriptor)
        connection.sendall(b"%d\n" % pid)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        try:
            connection.sendall(b"%d\n" % code)
            connection.recv(1)
        finally:
            os.waitpid(pid, 0)
            os._exit(0)
    for descriptor in passed:
        os.close(descriptor)


def _take_over(
    files: Mapping[int, int], argv: list[str], environment: Mapping[str, str], folder: str, *, new_session: bool
) -> None:
    """Become the process that Python would start."""
    import fcntl
    import signal

    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    if new_session:
        os.setsid()
    moved = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for number, descriptor in files.items()}
    os.closerange(0, 64)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
    os.closerange(64, 128)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        kind: dict[str, Any] = {"errors": "backslashreplace" if name == "stderr" else errors, "encoding": encoding}
        stream = open(number, "w" if number else "r", closefd=False, **kind) if number in files else None  # noqa: SIM115
        if stream is not None and name == "stderr":
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv


def _run(main: Any) -> NoReturn:
    """Run the program and end as Python ends."""
    import atexit
    import threading
    import traceback

    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    os._exit(code or 0)


if __name__ == "__main__":
    {"relay": _relay, "serve": _serve}[sys.argv[1]](*sys.argv[2:])

"""Code of a forked child only: it becomes the account, and executes the executor's program."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from hutch_launcher.groups import Groups, enter, processes
from hutch_launcher.packets import TEXT_SIZE, LaunchRequest
from hutch_launcher.rules import Config, LaunchAccount

__all__ = ["LIBC", "become", "become_executor", "reset_signals"]

LIBC: Final = ctypes.CDLL(None, use_errno=True)


def become_executor(
    request: LaunchRequest,
    account: LaunchAccount,
    config: Config,
    groups: Groups,
    to_enter: list[Path],
    streams: tuple[int, int, int],
    failure: int,
) -> NoReturn:
    """Execute the executor with `streams` as its descriptors 0, 1 and 2, after entering the cgroups `to_enter`.

    On an error, write its text to `failure` and exit. Executing the program closes `failure`.
    """
    try:
        os.setsid()
        for directory in to_enter:
            enter(directory)
        reset_signals()
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        os.closerange(3, failure)
        os.closerange(failure + 1, 1 << 20)
        become(account, request, groups)
        _execute(config, account, request)
    except BaseException as error:  # noqa: BLE001 - this process must exit, whatever happened
        os.write(failure, str(error).encode()[:TEXT_SIZE] or b"?")
    finally:
        os._exit(127)


def reset_signals() -> None:
    """Give every signal its default action, and block none."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def become(account: LaunchAccount, request: LaunchRequest, groups: Groups) -> None:
    """Change to the account, and set the limits that cgroups do not set. OSError if any privilege would remain."""
    os.umask(0o077)
    with suppress(OSError):  # if memory runs out, sessions die before hutchd; an executor cannot change this itself
        Path("/proc/self/oom_score_adj").write_text("500")
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_NOFILE, request.open_files)
    if request.memory and "memory" not in groups.limits:
        _set_limit(resource.RLIMIT_DATA, request.memory)
    if request.pids and "pids" not in groups.limits:  # the kernel counts all processes of the account
        _set_limit(resource.RLIMIT_NPROC, request.pids + sum(request.uid in one.uids for one in processes()))
    _drop_bounding_set()
    os.setgroups(account.groups)
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    _drop_capabilities()
    if os.getresuid() != (account.uid,) * 3 or os.getresgid() != (account.gid,) * 3 or account.uid == 0:
        raise PermissionError("it did not become the account")


def _set_limit(what: int, value: int) -> None:
    """Set the soft and the hard limit, at most to the present hard limit. 0 means the default, except for cores."""
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    if value or what == resource.RLIMIT_CORE:
        resource.setrlimit(what, (value, value))
    elif what == resource.RLIMIT_NOFILE:
        resource.setrlimit(what, (min(1024, hard) if hard > 0 else 1024, hard))


def _drop_bounding_set() -> None:
    """Empty the bounding set. Without CAP_SETPCAP it stays; no_new_privs then makes the set ineffective."""
    for capability in range(64):
        LIBC.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def _drop_capabilities() -> None:
    LIBC.prctl(47, 4, 0, 0, 0)  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL
    header, none = struct.pack("=Ii", 0x2008_0522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3
    if LIBC.capset(header, none) or LIBC.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "its capabilities could not be dropped")


def _execute(config: Config, account: LaunchAccount, request: LaunchRequest) -> NoReturn:
    env = {"PATH": config.path, "HOME": account.home, "USER": account.name, "LOGNAME": account.name}
    env |= {"SHELL": account.shell or "/bin/sh", "LANG": "C.UTF-8", "HUTCH_EXECUTOR_ID": request.executor}
    try:
        os.chdir(account.home)
    except OSError:
        os.chdir("/")
    # -P and -s: no imports from the working directory, nor from packages that an agent installed in the home
    argv = [config.interpreter, "-P", "-s", "-m", "hutch_executor", *(["--reaper"] if request.reaper else [])]
    os.execve(config.interpreter, argv, env)  # noqa: S606

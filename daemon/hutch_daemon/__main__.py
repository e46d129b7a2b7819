"""`hutchd`: the command. Reads its arguments and settings, makes its directories, and runs in the foreground.

Logs go to standard error. On SIGTERM and SIGINT hutchd drains: it waits up to `executors.drain_timeout` for running
turns; executors whose turn has not ended by then keep running, and the next hutchd adopts them. SIGHUP reads the
settings again. A service manager may pass the sockets, and is notified of hutchd's state (`service`).
Exit codes: 0 stopped, 1 hutchd could not run, 2 wrong arguments or settings.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
from pathlib import Path
from typing import Final, NoReturn

import anyio
import msgspec
import structlog

from hutch_daemon.keys.master import MasterKeyError
from hutch_daemon.service import take
from hutch_daemon.settings import SettingsError, load
from hutch_daemon.store import backups
from hutch_daemon.wiring import run
from hutch_daemon.wiring.sockets import make_runtime
from hutch_shared import __version__
from hutch_shared.encoding import encoding_fault, require_utf8
from hutch_shared.errors import HutchError
from hutch_shared.hardening import forbid_dumps
from hutch_shared.host_mark import STATE_MODE, is_marked
from hutch_shared.hutchd_lock import inherited_start
from hutch_shared.logs import set_up_logs
from hutch_shared.paths import Paths, find_paths, make_private

_log: Final = structlog.get_logger("hutchd")
_GARBAGE: Final = (50_000, 20, 20)
"""Thresholds of the garbage collector. Reference counting frees nearly everything, except some objects of closed
connections. With the default thresholds, a thousand connections closed together would cause many long collections,
during which hutchd answers nobody."""


def main() -> NoReturn:
    """Run the command."""
    if (fault := encoding_fault(sys.argv[1:], os.environ)) is not None:
        _fail(fault, 2)
    options = _arguments()
    try:
        service = take()
        paths = find_paths(system=options.system)
        if options.config is not None:
            config = require_utf8(os.path.abspath(options.config))
            paths = Paths(Path(config), paths.state, paths.runtime, paths.host, paths.system)
        if options.doctor:
            _examine(paths, options.account)
        if options.show_config:
            _show_config(paths)
        if options.sudo_rule:
            _print_sudo_rule(paths)
        settings = load(paths.config)
    except (SettingsError, HutchError) as error:
        _fail(str(error), 2)
    if options.check:
        print(f"{paths.config}: {'the settings can be used' if paths.config.exists() else 'missing: defaults apply'}")  # noqa: T201
        raise SystemExit(0)
    _harden()
    _spare_the_collector()
    set_up_logs(settings.logs.level)
    try:
        make_private(paths.state, STATE_MODE if paths.system and is_marked(paths.state) else 0o700)
        if options.restore is not None:
            _restore(Path(options.restore), paths)
        start = inherited_start(paths.state)
        make_runtime(paths)
        anyio.run(run, paths, settings, service, start.release if start is not None else _no_start)
    except (HutchError, MasterKeyError, OSError, BaseExceptionGroup) as error:
        expected = _innermost(error)
        if not isinstance(expected, (HutchError, MasterKeyError, OSError)):
            raise
        _fail(_sentence(expected), 1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0)


def _no_start() -> None:
    """Release no lock: another hutchd is starting, and this one will find the database in use."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hutchd",
        description="Runs coding agents for the users of this host, in the foreground; logs go to standard error.",
        epilog="HUTCH_CONFIG, HUTCH_STATE_DIR and HUTCH_RUNTIME_DIR set the paths of settings, data and sockets.",
    )
    parser.add_argument(
        "--system", action="store_true", help="serve the whole host: /etc/hutch /var/lib/hutch /run/hutch"
    )
    parser.add_argument("--config", metavar="FILE", help="the settings file")
    parser.add_argument("--check", action="store_true", help="read the settings, say whether they can be used, and end")
    parser.add_argument("--doctor", action="store_true", help="look for problems, print them as JSON, and end")
    parser.add_argument(
        "--account", metavar="ACCOUNT", help="with --doctor --system: also examine whether agents may run as ACCOUNT"
    )
    parser.add_argument(
        "--show-config", action="store_true", help="print all settings with their origins as JSON, and end"
    )
    parser.add_argument(
        "--sudo-rule",
        action="store_true",
        help="print the sudo rule for hutch-launcher on a host without its unit, and end",
    )
    parser.add_argument("--restore", metavar="FILE", help="replace the database with a backup, and end")
    parser.add_argument("--version", action="version", version=f"hutchd {__version__}")
    return parser.parse_args()


def _examine(paths: Paths, account: str | None) -> NoReturn:
    from hutch_daemon.doctor import examine

    print(msgspec.json.encode(list(examine(paths, account))).decode())  # noqa: T201
    raise SystemExit(0)


def _show_config(paths: Paths) -> NoReturn:
    from hutch_daemon.origins import show

    shown = msgspec.to_builtins(show(paths.config, system=paths.system))
    print(json.dumps(shown))  # noqa: T201 - a limit may be `inf`, which msgspec writes as null
    raise SystemExit(0)


def _print_sudo_rule(paths: Paths) -> NoReturn:
    from hutch_daemon.doctor.sudo import sudo_rule

    print(sudo_rule(paths), end="")  # noqa: T201
    raise SystemExit(0)


def _restore(backup: Path, paths: Paths) -> NoReturn:
    kept = backups.restore(Path(os.path.abspath(backup)), paths.state / "hutch.db")
    print(  # noqa: T201
        f"{backup} is restored, as a new journal: followers start again, earlier executors are not admitted, and keys"
        f" that were replaced since the backup are refused.{f' The former database was kept: {kept}.' if kept else ''}",
        file=sys.stderr,
    )
    raise SystemExit(0)


def _harden() -> None:
    """Keep other accounts from reading hutchd's memory and files, and raise the limit of open files."""
    os.umask(0o077)
    forbid_dumps()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _spare_the_collector() -> None:
    """Exclude the objects that exist now from garbage collection, and collect the others rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GARBAGE)


def _innermost(error: BaseException) -> BaseException:
    """Return the exception inside nested groups of one; a group with several exceptions is returned itself."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _sentence(error: BaseException) -> str:
    if isinstance(error, HutchError) and error.details.get("detail"):
        return f"{error.message} ({error.details['detail']})"
    if isinstance(error, OSError):
        return f"{error.filename or 'the system'}: {error.strerror or error}"
    return str(error)


def _fail(message: str, code: int) -> NoReturn:
    print(f"hutchd: {message}", file=sys.stderr)  # noqa: T201
    raise SystemExit(code)


if __name__ == "__main__":
    main()

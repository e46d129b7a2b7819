"""Looks up Unix accounts. Nothing is cached, so a new group membership takes effect with the next executor."""

from __future__ import annotations

import grp
import os
import pwd

from hutch_daemon.environments.port import Account
from hutch_shared.errors import HutchError, Reason

__all__ = ["account_name", "account_named", "account_of", "groups_of", "uid_of"]


def account_of(uid: int, *, home: str | None = None) -> Account:
    """Return the account with this uid; `isolation_unavailable` if it does not exist. `home` overrides its home."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        if uid != os.getuid() or home is None:
            raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"There is no account with the uid {uid}.") from None
        return Account(uid, os.getgid(), f"uid-{uid}", home)  # in a container the uid often has no entry
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return Account(uid, entry.pw_gid, entry.pw_name, home or entry.pw_dir, entry.pw_shell or "/bin/sh", groups)


def account_named(name: str) -> Account:
    """Return the account of that name; `isolation_unavailable` if it does not exist."""
    uid = uid_of(name)
    if uid is None:
        raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"There is no account {name} on this host.")
    return account_of(uid)


def account_name(uid: int) -> str:
    """Return the account's name, or its uid if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def uid_of(name: str) -> int | None:
    """Return the uid of the account of that name, or None."""
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):  # ValueError: no account can have this name, for example because of a NUL in it
        return None


def groups_of(uid: int) -> frozenset[str]:
    """Return the names of an account's groups."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return frozenset()
    names: set[str] = set()
    for gid in os.getgrouplist(entry.pw_name, entry.pw_gid):
        try:
            names.add(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return frozenset(names)

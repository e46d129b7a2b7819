"""The attacks that an agent's command can try, and which of them each sandbox leaves open.

One table, of which docs/security.md shows all and `inspect` a session's part. tests/system/test_attacks.py attempts
each attack in each column, and fails if the table says less or more than what happened.

A column is what encloses the command (bubblewrap, Landlock, or nothing) and the account that it runs as: hutchd's own,
or another one. Attacks are those of an ordinary account, not of uid 0. "The account" is the one that the command runs
as, and the home, processes and programs of the account are those outside the session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hutch_shared.messages import SandboxKind

__all__ = ["ATTACKS", "Attack", "Cell", "open_attacks"]

Openness = Literal["closed", "full network", "open"]
"""`full network`: open if the sandbox has the host's network, closed if its network is limited."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Whether an attack is possible in one column of the table."""

    openness: Openness
    closed_from: int | None = None
    """The Landlock ABI from which on the attack is closed; None if the ABI changes nothing."""

    def is_open(self, network: str, abi: int) -> bool:
        """Return whether the attack is possible with this network and this Landlock ABI."""
        if self.closed_from is not None and abi >= self.closed_from:
            return False
        return self.openness == "open" or (self.openness == "full network" and network == "full")

    def __str__(self) -> str:
        if self.closed_from is not None:
            return f"{self.openness} below ABI {self.closed_from}"
        return "open with `full`" if self.openness == "full network" else self.openness


Accounts = tuple[Cell, Cell]
"""A command under hutchd's own account, and under another account."""

_CLOSED: Final = Cell("closed")
_OPEN: Final = Cell("open")
_WITH_FULL: Final = Cell("full network")
_NEVER: Final = (_CLOSED, _CLOSED)
_ALWAYS: Final = (_OPEN, _OPEN)
_FULL: Final = (_WITH_FULL, _WITH_FULL)
_OWN: Final = (_OPEN, _CLOSED)
"""The account of hutchd can do it, another account cannot."""


def _below(abi: int) -> Accounts:
    return (Cell("open", abi), Cell("open", abi))


@dataclass(frozen=True, slots=True)
class Attack:
    """One row of the table."""

    name: str
    """Short and stable: records and `inspect` show it."""
    does: str
    """What an agent's command would do, a sentence."""
    bubblewrap: Accounts
    landlock: Accounts
    none: Accounts
    why: str = ""
    """Why a sandbox leaves it open, or why it is closed without one; empty if this is obvious."""

    def cell(self, kind: SandboxKind | None, *, own_account: bool) -> Cell:
        """Return the cell of a column. `kind` None is the column without a sandbox."""
        own, another = {"bubblewrap": self.bubblewrap, "landlock": self.landlock, None: self.none}[kind]
        return own if own_account else another


_HUTCH: Final = (
    Attack("read-keys", "Read Hutch's master key, database and logs.", _NEVER, _NEVER, _OWN),
    Attack("change-hutch", "Write, replace or remove files in Hutch's folders.", _NEVER, _NEVER, _OWN),
    Attack(
        "change-programs",
        "Change the programs of Hutch or the agent's CLI, which the next session runs.",
        _NEVER,
        _NEVER,
        _OWN,
        "Without a sandbox: if the account has installed them, as in a virtual environment of its own.",
    ),
    Attack(
        "read-hutch-memory",
        "Read the memory, environment or descriptors of hutchd, of the broker or of its own executor.",
        _NEVER,
        _NEVER,
        _NEVER,
        "These processes are not dumpable: only uid 0 may look into them.",
    ),
    Attack("read-records", "Read the owner's sessions and events at `client.sock`.", _NEVER, _NEVER, _ALWAYS),
    Attack(
        "give-orders",
        "Decide a permission request or change a session at `client.sock`, as the owner.",
        _NEVER,
        _NEVER,
        _OWN,
        "hutchd recognises processes of a session; they may look, but change nothing. Without a sandbox and a cgroup a "
        "process can hide: it ends its executor and the reaper.",
    ),
    Attack(
        "pose-as-executor",
        "Speak for another session at `executor.sock`.",
        _NEVER,
        _NEVER,
        _NEVER,
        "It needs an executor's token, which is valid only in that executor.",
    ),
    Attack(
        "ask-launcher",
        "Start a process as another account at `launcher.sock`.",
        _NEVER,
        _NEVER,
        _OWN,
        "hutch-launcher serves the account of hutchd, if the host has it.",
    ),
    Attack("control-broker", "Give the broker orders at its control socket.", _NEVER, _NEVER, _NEVER),
    Attack("use-broker", "Use the broker without a lease.", _NEVER, _NEVER, _NEVER),
)
_LEASES: Final = (
    Attack(
        "own-lease",
        "Use the session's own lease, from the CLI's memory, to ask the model.",
        _ALWAYS,
        _NEVER,
        _ALWAYS,
        "A lease is for all processes of the session; its budget limits it. Landlock's commands have no Unix socket.",
    ),
    Attack(
        "control-cli",
        "Change the memory of the session's own CLI, and act as it.",
        _ALWAYS,
        _NEVER,
        _ALWAYS,
        "In bubblewrap the CLI and its commands are one account in one process namespace. The CLI has no more rights.",
    ),
    Attack("take-lease", "Read the lease of another session of the same owner.", _NEVER, _NEVER, _ALWAYS),
    Attack(
        "use-lease",
        "Use a lease of another session.",
        _NEVER,
        _NEVER,
        _NEVER,
        "The broker accepts a lease only from the processes of its executor.",
    ),
)
_SESSIONS: Final = (
    Attack("read-sessions", "Read the folders of another session of the same owner.", _NEVER, _NEVER, _ALWAYS),
    Attack("change-sessions", "Change files in these folders.", _NEVER, _NEVER, _ALWAYS),
    Attack("foreign-sessions", "Read or change what a session of another owner has.", _NEVER, _NEVER, _OWN),
)
_HOME: Final = (
    Attack("read-secrets", "Read secrets in the home, such as `~/.ssh/id_ed25519`.", _NEVER, _NEVER, _ALWAYS),
    Attack("list-home", "List the home.", _NEVER, _NEVER, _ALWAYS),
    Attack(
        "learn-names",
        "Learn that a name exists in the home, its size and times, and where a link leads.",
        _NEVER,
        _ALWAYS,
        _ALWAYS,
        "Landlock does not cover `stat`, `readlink` and reading extended attributes.",
    ),
    Attack("write-home", "Write into the home, such as into `~/.bashrc`.", _NEVER, _NEVER, _ALWAYS),
    Attack("truncate-files", "Truncate files there.", _NEVER, _NEVER, _ALWAYS),
    Attack("move-files", "Move or link files out of the home into its working directory.", _NEVER, _NEVER, _ALWAYS),
    Attack("change-modes", "Change the mode or the group of files there.", _NEVER, _NEVER, _ALWAYS),
    Attack("change-attributes", "Change extended attributes of files there.", _NEVER, _NEVER, _ALWAYS),
    Attack(
        "change-times",
        "Change the timestamps of files there.",
        _NEVER,
        _ALWAYS,
        _ALWAYS,
        "Landlock does not cover `utimensat`.",
    ),
    Attack(
        "watch-files",
        "Watch with inotify which files are opened and changed in the home.",
        _NEVER,
        _ALWAYS,
        _ALWAYS,
        "Landlock does not cover inotify.",
    ),
)
_PROCESSES: Final = (
    Attack(
        "see-processes",
        "See the processes of the host and their command lines.",
        _NEVER,
        _ALWAYS,
        _ALWAYS,
        "Landlock has no process namespace of its own.",
    ),
    Attack("read-processes", "Read the environment or memory of the account's processes.", _NEVER, _NEVER, _ALWAYS),
    Attack("trace-processes", "Attach to them with ptrace, or take their descriptors.", _NEVER, _NEVER, _ALWAYS),
    Attack(
        "signal-processes",
        "Signal them: stop or kill the user's programs, another session or its own executor.",
        _NEVER,
        _below(6),
        _ALWAYS,
        "Landlock limits signals from ABI 6 on.",
    ),
    Attack(
        "steer-processes",
        "Change their priority or processors.",
        _NEVER,
        _ALWAYS,
        _ALWAYS,
        "Landlock does not cover these calls.",
    ),
    Attack("limit-processes", "Set their resource limits, of which one kills.", _NEVER, _NEVER, _ALWAYS),
    Attack(
        "outlive",
        "Leave a process behind that outlives the session.",
        _NEVER,
        _OWN,
        _OWN,
        "Without bubblewrap a cgroup ends it. Where hutchd has no cgroup, a reaper ends all but a process that forks "
        "without end.",
    ),
)
_BETWEEN: Final = (
    Attack("session-bus", "Have the user's session bus or service manager run something.", _NEVER, _NEVER, _ALWAYS),
    Attack("ssh-agent", "Have the user's ssh-agent sign something.", _NEVER, _NEVER, _ALWAYS),
    Attack(
        "abstract-sockets",
        "Connect to abstract Unix sockets, such as an X server's.",
        _FULL,
        _NEVER,
        _ALWAYS,
        "bubblewrap hides them only with a network of its own; Landlock's commands have no Unix socket.",
    ),
    Attack(
        "datagram-sockets",
        "Send to named datagram sockets, such as `/dev/log`, also through a socket pair.",
        _NEVER,
        _NEVER,
        _ALWAYS,
    ),
    Attack(
        "shared-memory",
        "Read and change System V shared memory, semaphores and queues of the account.",
        _NEVER,
        _NEVER,
        _ALWAYS,
    ),
    Attack("read-shared-folders", "Read others' files in `/tmp`, `/var/tmp` and `/dev/shm`.", _NEVER, _NEVER, _ALWAYS),
    Attack("leave-files", "Leave files for others in `/tmp`, `/var/tmp` and `/dev/shm`.", _NEVER, _NEVER, _ALWAYS),
    Attack("devices", "Open a device of the host that the account may open.", _NEVER, _NEVER, _ALWAYS),
    Attack("write-terminal", "Write to a terminal of the user.", _NEVER, _NEVER, _ALWAYS),
    Attack("type-terminal", "Type into a terminal (TIOCSTI).", _NEVER, _NEVER, _ALWAYS),
)
_NETWORK: Final = (
    Attack("loopback", "Connect to servers on the host's loopback.", _FULL, _FULL, _ALWAYS),
    Attack("udp", "Send UDP.", _FULL, _FULL, _ALWAYS),
    Attack("listen", "Serve others on a port of the host.", _FULL, _FULL, _ALWAYS),
    Attack("vsock", "Make a socket of the hypervisor's (AF_VSOCK), which needs no network.", _NEVER, _NEVER, _ALWAYS),
)
_KERNEL: Final = (
    Attack("socket-families", "Make sockets of other families, such as AF_ALG.", _NEVER, _NEVER, _ALWAYS),
    Attack("io-uring", "Make system calls through io_uring.", _NEVER, _NEVER, _ALWAYS),
    Attack("userfaultfd", "Handle page faults of the kernel (userfaultfd).", _NEVER, _NEVER, _ALWAYS),
    Attack("keyrings", "Read keys in the kernel's key rings.", _NEVER, _NEVER, _ALWAYS),
    Attack("foreign-abi", "Make system calls of another ABI, such as 32-bit ones.", _NEVER, _NEVER, _ALWAYS),
    Attack(
        "user-namespaces",
        "Make a user namespace, in which it is root and reaches more of the kernel.",
        _ALWAYS,
        _ALWAYS,
        _ALWAYS,
        "With bubblewrap, the sandbox that an agent's CLI makes for its own commands needs them.",
    ),
    Attack("mounts", "Look behind the sandbox with mounts in a namespace of its own.", _NEVER, _NEVER, _ALWAYS),
    Attack(
        "set-uid",
        "Gain rights through set-uid programs, such as `sudo`.",
        _NEVER,
        _NEVER,
        _OWN,
        "hutch-launcher starts executors without new privileges.",
    ),
    Attack("kernel-settings", "Change settings of the kernel in `/proc/sys`.", _NEVER, _NEVER, _NEVER),
)
ATTACKS: Final = (*_HUTCH, *_LEASES, *_SESSIONS, *_HOME, *_PROCESSES, *_BETWEEN, *_NETWORK, *_KERNEL)
"""All attacks, in the order of the page."""


def open_attacks(kind: SandboxKind | None, *, own_account: bool, network: str, abi: int) -> tuple[str, ...]:
    """Return the names of the attacks that a session's commands can make.

    `kind` is the session's sandbox, `own_account` whether its agents run as hutchd's account, `network` the network of
    its sandbox, and `abi` the kernel's Landlock ABI, which counts with Landlock only.
    """
    return tuple(attack.name for attack in ATTACKS if attack.cell(kind, own_account=own_account).is_open(network, abi))

"""The private link between hutchd and hutch-broker: what crosses `broker-control.sock`, and the broker's boot line.

hutchd dials and says `hello` with the link's token first; nothing else is answered before. After it either side asks.
Secrets cross this link only, broker-ward only. Usage and refusals are numbered by the broker, kept until hutchd has
acknowledged them, and told again after a reconnect: a number tells what came before.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from hutch_shared.messages import CredentialKind, Nothing, Pong, Wire
from hutch_shared.methods import Method, Table

__all__ = [
    "FROM_BROKER",
    "PROTOCOL",
    "TO_BROKER",
    "AckRecords",
    "BrokerBoot",
    "BrokerHello",
    "BrokerStatus",
    "BrokerWelcome",
    "DropKeys",
    "Ended",
    "Key",
    "Lease",
    "LeaseIds",
    "LeaseState",
    "NeedKey",
    "Price",
    "Record",
    "Records",
    "Refill",
]

PROTOCOL: Final = 1

DialectName = Literal["anthropic", "openai", "gemini", "bedrock", "vertex"]


class Price(Wire, frozen=True, omit_defaults=True):
    """US dollars for a million tokens; the cache's prices are the input's where they are not given."""

    input: float
    output: float
    cache_read: float | None = None
    cache_write: float | None = None


class BrokerBoot(Wire, frozen=True, omit_defaults=True):
    """One JSON line on the starting broker's standard input."""

    token: str
    """What hutchd will say at the link."""
    control: str
    socket: str
    """Where agents dial; its directory holds nothing else and is made by hutchd."""
    protocol: int = PROTOCOL
    everyone: bool = False
    """Other accounts dial it too."""
    tcp: bool = False
    """Listen on a port of the loopback interface as well."""
    ca_file: str | None = None
    """Certificates that are trusted beside the system's."""
    proxies: dict[str, str] = msgspec.field(default_factory=dict)
    """By scheme (`http`, `https`); `no` holds the exceptions as in NO_PROXY."""
    prices: dict[str, Price] = msgspec.field(default_factory=dict)
    """By model, ahead of the table that comes along."""
    header_timeout: float = 10.0
    idle_timeout: float = 75.0
    connect_timeout: float = 10.0
    first_byte_timeout: float = 600.0
    chunk_timeout: float = 300.0
    key_timeout: float = 60.0
    body: int = 32 * 1024 * 1024
    records: int = 100_000
    """So many records are kept for hutchd; beyond it no request is taken, since it could not be accounted for."""
    linger: float = 60.0
    """Without leases and without hutchd for so many seconds it ends."""

    def __repr__(self) -> str:
        return f"<BrokerBoot {self.socket}>"


class Lease(Wire, frozen=True, omit_defaults=True):
    """A lease as hutchd makes it. The family is the processes that may use it: the executor and what it started."""

    id: str
    token_hash: str
    """SHA-256 (hex) of the whole token."""
    session: str
    executor: str
    owner: int
    account: str
    provider: str
    dialect: DialectName
    credential: str
    uid: int
    pid: int
    start_time: int
    cgroup: str | None = None
    """Name of a path component that its processes have in /proc/PID/cgroup, where the environment makes such groups."""
    tcp: bool = False
    """The agent cannot dial Unix sockets: the peer is told by its uid alone."""


class Refill(Wire, frozen=True, omit_defaults=True):
    """Adds to a lease's allowance and moves its end. `usd` None leaves the dollars as they are (or unlimited)."""

    lease: str
    requests: int
    usd: float | None = None
    expires_in: float | None = None


class LeaseState(Wire, frozen=True, omit_defaults=True):
    lease: Lease
    expires_in: float
    requests: int
    usd: float | None = None
    """None: not limited."""
    streams: int = 0


class LeaseIds(Wire, frozen=True, omit_defaults=True):
    leases: tuple[str, ...]


class DropKeys(Wire, frozen=True, omit_defaults=True):
    credential: str


class Ended(Wire, frozen=True, omit_defaults=True):
    leases: int
    streams: int


class BrokerHello(Wire, frozen=True, omit_defaults=True):
    token: str
    protocol: int = PROTOCOL

    def __repr__(self) -> str:
        return "<BrokerHello>"


class BrokerWelcome(Wire, frozen=True, omit_defaults=True):
    run: str
    """Names this run of the broker; records are numbered in it."""
    version: str
    pid: int
    leases: tuple[LeaseState, ...] = ()
    told: int = 0
    """The newest record's number."""
    port: int | None = None


class BrokerStatus(Wire, frozen=True, omit_defaults=True):
    leases: tuple[LeaseState, ...]
    requests: int
    refused: int
    unacknowledged: int


class NeedKey(Wire, frozen=True, omit_defaults=True):
    lease: str
    rejected: bool = False
    """The provider answered 401 to the key given last."""


class Key(Wire, frozen=True, omit_defaults=True):
    """The secret, for one lease. `base_url` is where it may go; None is the provider itself."""

    secret: str
    kind: CredentialKind
    base_url: str | None = None
    expires_in: float | None = None

    def __repr__(self) -> str:
        return f"<Key {self.kind}>"


class Record(Wire, frozen=True, omit_defaults=True):
    """One request: forwarded (`status` is the provider's; 0 when it broke off before), or refused with a reason.

    `n` counts both. `lease` is empty for who showed none that is known. Tokens of the cache are not in `input`.
    `usd` None: the price, or the usage itself, is not known.
    """

    n: int
    at: int
    """Milliseconds since 1970."""
    lease: str
    session: str
    path: str
    status: int = 0
    refused: str | None = None
    model: str = ""
    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    usd: float | None = None
    seconds: float = 0.0
    uid: int | None = None
    pid: int | None = None
    times: int = 1
    """Refusals of one kind within a second are one record."""


class Records(Wire, frozen=True, omit_defaults=True):
    run: str
    records: tuple[Record, ...]


class AckRecords(Wire, frozen=True, omit_defaults=True):
    n: int


def _ask(name: str, params: type[msgspec.Struct], result: type[msgspec.Struct], doc: str) -> Method:
    return Method(name, "request", params, result, doc)


def _table(*rows: Method) -> Table:
    return {row.name: row for row in rows}


_PING: Final = _ask("ping", Nothing, Pong, "Answers at once; says that the other side is alive and reads.")

TO_BROKER: Final[Table] = _table(
    _PING,
    _ask("hello", BrokerHello, BrokerWelcome, "First: proves hutchd, tells what the broker holds."),
    _ask(
        "keep_leases",
        LeaseIds,
        Ended,
        "Ends all but these, which it has; then it answers agents and tells records.",
    ),
    _ask("put_lease", LeaseState, Nothing, "Gives a lease, or what it is now."),
    _ask("refill", Refill, Nothing, "Adds to an allowance, moves the end."),
    _ask("end_leases", LeaseIds, Ended, "Ends leases; their open streams are cut before the reply."),
    _ask("drop_keys", DropKeys, Nothing, "Forgets a credential's secret: it is asked for anew when it is needed."),
    _ask("get_status", Nothing, BrokerStatus, "What it holds and did."),
    _ask("shutdown", Nothing, Nothing, "Ends the broker and every stream."),
    Method("ack_records", "notification", AckRecords, None, "All records up to n are durable."),
)

FROM_BROKER: Final[Table] = _table(
    _PING,
    _ask("need_key", NeedKey, Key, "The secret that a lease stands for."),
    Method("report_records", "notification", Records, None, "Records in order; the receipt is `ack_records`."),
)

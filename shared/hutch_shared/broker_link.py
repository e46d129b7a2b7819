"""The private link between hutchd and hutch-broker: the messages on `broker-control.sock`, and the broker's boot line.

hutchd dials and sends `hello` with the link's token; before that the broker answers no other call. Then both sides may
call. Secrets cross only this link, and only towards the broker. The broker numbers its records, keeps them until hutchd
acknowledges them, and reports them again after a reconnect: the number shows which ones hutchd already has.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from hutch_shared.messages import CredentialKind, Network, Nothing, Pong, Wire
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
    "FindPrice",
    "Key",
    "Lease",
    "LeaseActive",
    "LeaseIds",
    "LeaseState",
    "NeedKey",
    "Price",
    "PriceFound",
    "Prices",
    "Record",
    "Records",
    "Refill",
]

PROTOCOL: Final = 1

DialectName = Literal["anthropic", "openai", "gemini", "bedrock", "vertex"]


class Price(Wire, frozen=True, omit_defaults=True):
    """US dollars per million tokens. Reading the cache costs as much as input by default."""

    input: float
    output: float
    cache_read: float | None = None
    cache_write: float | None = None
    """For entries that are kept for five minutes. Default: 1.25 times `input`."""
    cache_write_1h: float | None = None
    """For entries that are kept for an hour. Default: 2 times `input`."""
    search: float | None = None
    """US dollars per web search. Default: 0.01."""


class Prices(Wire, frozen=True, omit_defaults=True):
    """The prices from the settings, by model."""

    prices: dict[str, Price]


class FindPrice(Wire, frozen=True, omit_defaults=True):
    provider: str
    dialect: DialectName
    model: str


class PriceFound(Wire, frozen=True, omit_defaults=True):
    trouble: str = ""
    """Why the model has no price, and how to give it one; empty if it has one."""


class BrokerBoot(Wire, frozen=True, omit_defaults=True):
    """One JSON line on the starting broker's standard input."""

    token: str
    """The token that hutchd sends in `hello`."""
    control: str
    socket: str
    """The socket that agents dial, alone in a directory that hutchd made."""
    protocol: int = PROTOCOL
    everyone: bool = False
    """Whether agents of other accounts may dial the socket."""
    tcp: bool = False
    """Whether to listen on a port of the loopback interface too."""
    ca_file: str | None = None
    """Certificates to trust besides the system's."""
    proxies: dict[str, str] = msgspec.field(default_factory=dict)
    """Proxies by scheme (`http`, `https`); `no` has the exceptions, as in NO_PROXY."""
    prices: dict[str, Price] = msgspec.field(default_factory=dict)
    """Prices by model, which override the built-in table."""
    header_timeout: float = 10.0
    idle_timeout: float = 75.0
    connect_timeout: float = 10.0
    first_byte_timeout: float = 600.0
    chunk_timeout: float = 300.0
    key_timeout: float = 60.0
    body: int = 32 * 1024 * 1024
    records: int = 100_000
    """The number of records kept for hutchd. At this limit requests are refused: they cannot be recorded."""
    linger: float = 60.0
    """Seconds without leases and without hutchd after which the broker ends."""
    budget_wait: float = 60.0
    """Seconds that a request waits while others of its session's budget run and the rest does not cover it."""

    def __repr__(self) -> str:
        return f"<BrokerBoot {self.socket}>"


class Lease(Wire, frozen=True, omit_defaults=True):
    """A lease as hutchd grants it. Its holder is the executor (uid, pid, start time) with its descendants."""

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
    """A path component of the holder's processes in /proc/PID/cgroup, if the environment makes cgroups."""
    tcp: bool = False
    """The agent cannot dial Unix sockets: only the peer's uid is checked."""
    network: Network | None = None
    """The network of the session's agent. Unless it is `full`, the broker refuses the provider's own tools.

    None if an earlier hutchd granted the lease: not known, and so not `full`.
    """


class Refill(Wire, frozen=True, omit_defaults=True):
    """Adds to a lease's allowance and moves its end."""

    lease: str
    requests: int
    expires_in: float | None = None


class LeaseState(Wire, frozen=True, omit_defaults=True):
    lease: Lease
    expires_in: float
    requests: int
    usd: float | None = None
    """The dollars that the lease's session may still use; None means unlimited.

    A broker that already has the session's budget keeps its own figure.
    """
    streams: int = 0
    active: bool = True
    """Whether requests may use the lease: a turn of its session runs, or something that Hutch itself asked for."""


class LeaseIds(Wire, frozen=True, omit_defaults=True):
    leases: tuple[str, ...]


class LeaseActive(Wire, frozen=True, omit_defaults=True):
    """Says whether requests may use a lease. The lease itself lives on."""

    lease: str
    active: bool


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
    """The id of this run of the broker; records are numbered per run."""
    version: str
    pid: int
    leases: tuple[LeaseState, ...] = ()
    told: int = 0
    """The number of the newest record."""
    port: int | None = None
    abilities: tuple[str, ...] = ()
    """What this broker does beyond the first version: `set_active`, `set_prices`, `find_price`, `leave`, `network`."""


class BrokerStatus(Wire, frozen=True, omit_defaults=True):
    leases: tuple[LeaseState, ...]
    requests: int
    refused: int
    unacknowledged: int


class NeedKey(Wire, frozen=True, omit_defaults=True):
    lease: str
    rejected: bool = False
    """The provider answered 401 to the last key."""


class Key(Wire, frozen=True, omit_defaults=True):
    """The secret of a lease. The broker may send it to `base_url`, or to the provider if that is None."""

    secret: str
    kind: CredentialKind
    base_url: str | None = None
    expires_in: float | None = None

    def __repr__(self) -> str:
        return f"<Key {self.kind}>"


class Record(Wire, frozen=True, omit_defaults=True):
    """One request, forwarded (`status` is the provider's, 0 without an answer) or refused with a reason.

    `n` numbers both. `lease` is empty if the request had no known lease. Cached tokens are not in `input`. `usd` None:
    the price or the usage is unknown, and `why_unknown` says why.
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
    """Tokens written to the cache, for five minutes and for an hour together."""
    cache_write_1h: int = 0
    """The part of `cache_write` that is kept for an hour."""
    searches: int = 0
    """Web searches that the provider made."""
    usd: float | None = None
    why_unknown: str = ""
    """Why `usd` is None, as a sentence."""
    seconds: float = 0.0
    uid: int | None = None
    pid: int | None = None
    times: int = 1
    """Equal refusals within a second share one record."""


class Records(Wire, frozen=True, omit_defaults=True):
    run: str
    records: tuple[Record, ...]


class AckRecords(Wire, frozen=True, omit_defaults=True):
    n: int


def _ask(name: str, params: type[msgspec.Struct], result: type[msgspec.Struct], doc: str) -> Method:
    return Method(name, "request", params, result, doc)


def _table(*rows: Method) -> Table:
    return {row.name: row for row in rows}


_PING: Final = _ask("ping", Nothing, Pong, "Answers at once, to show that the other side is alive and reads.")

TO_BROKER: Final[Table] = _table(
    _PING,
    _ask(
        "hello",
        BrokerHello,
        BrokerWelcome,
        "Comes first: proves that the caller is hutchd; returns the leases.",
    ),
    _ask(
        "keep_leases",
        LeaseIds,
        Ended,
        "Ends all leases except these; then the broker answers agents and reports records.",
    ),
    _ask("put_lease", LeaseState, Nothing, "Adds a lease, or sets its allowance and end."),
    _ask("refill", Refill, Nothing, "Adds to an allowance and moves the end."),
    _ask("end_leases", LeaseIds, Ended, "Ends leases; their open streams are cut before the reply."),
    _ask("drop_keys", DropKeys, Nothing, "Drops a credential's secret; the next use asks for it again."),
    _ask(
        "set_active",
        LeaseActive,
        Ended,
        "Lets requests use a lease, or stops that; its open streams are cut before the reply.",
    ),
    _ask("find_price", FindPrice, PriceFound, "Returns whether a model has a price."),
    _ask("set_prices", Prices, Nothing, "Replaces the prices from the settings for requests that begin later."),
    _ask("get_status", Nothing, BrokerStatus, "Returns leases and counts."),
    _ask("shutdown", Nothing, Nothing, "Ends the broker and every stream."),
    Method("ack_records", "notification", AckRecords, None, "All records up to n are durable."),
    Method("leave", "notification", Nothing, None, "hutchd ends on purpose: without leases, the broker ends soon."),
)

FROM_BROKER: Final[Table] = _table(
    _PING,
    _ask("need_key", NeedKey, Key, "Returns the secret of a lease."),
    Method("report_records", "notification", Records, None, "Records in order; the receipt is `ack_records`."),
)

"""Packets: an invalid packet starts nothing and leaks nothing, and the launcher still serves."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests.accounts import Account, processes_of
from tests.launcher.stage import (
    DONE,
    KILL,
    MAGIC,
    NOBODY,
    PROBE,
    REFUSED,
    REQUEST,
    START,
    SWEEP,
    Caller,
    Stage,
    packet,
    wait_until,
)

pytestmark = pytest.mark.system

ID = "x-0123456789abcdef"
KNOCK = """
import os, socket, sys
path, uid = sys.argv[1], int(sys.argv[2])
import struct
_, log = os.pipe()
start = struct.pack(">8sBxxxI32sQIIII56x", b"hutchL01", 2, uid, b"x-0123456789abcdef", 0, 0, 0, 0, 0)
for _ in range(20):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(20)
    sock.connect(path)
    try:
        socket.send_fds(sock, [start], [log])
    except OSError:
        pass  # refused and closed already
    try:
        print(sock.recv(512)[36:].rstrip(b"\\0").decode())
    except ConnectionResetError:
        print("closed")
"""


@pytest.fixture
def log(shared: Stage) -> Iterator[int]:
    fd = os.open(shared.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    yield fd
    os.close(fd)


@pytest.fixture(autouse=True)
def nothing_started(shared: Stage, alice: Account, request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test: the account has no process; the launcher has leaked no descriptor, and serves."""
    before = shared.descriptors()
    yield
    caller = shared.connect()
    assert caller.probe()["v"] == 1
    caller.close()
    wait_until(lambda: shared.descriptors() == before)
    assert processes_of(alice.uid) == []
    assert shared.children() == []


def test_every_byte_of_padding_must_be_zero(hutchd: Caller, alice: Account, log: int) -> None:
    """A request with any other value in the padding is refused."""
    good = packet(START, alice.uid, ID)
    for place in (*range(9, 12), *range(72, 128)):
        bad = good[:place] + b"\1" + good[place + 1 :]
        answer = hutchd.raw(bad, [log])
        assert answer.status == REFUSED, place


def test_a_field_out_of_range_is_refused(hutchd: Caller, alice: Account, log: int) -> None:
    """Nothing is started, and no descriptor is returned."""
    uid = alice.uid
    bad = [
        packet(0, uid, ID),
        packet(5, uid, ID),
        packet(255, uid, ID),
        packet(START, uid, ID, flags=2),
        packet(PROBE, flags=1),
        packet(START, uid, ID, ((1 << 62) + 1, 0, 0, 0)),
        packet(START, uid, ID, ((1 << 64) - 1, 0, 0, 0)),
        packet(START, uid, ID, (0, (1 << 22) + 1, 0, 0)),
        packet(START, uid, ID, (0, 0, 10_001, 0)),
        packet(START, uid, ID, (0, 0, 0, (1 << 20) + 1)),
        packet(START, 0, ID),
        packet(START, NOBODY, ID),
        packet(START, uid + 1, ID),
        *(b"hutchL02" + packet(START, uid, ID)[8:], b"\0" * 128, b"\xff" * 128),
        *(packet(START, uid, name) for name in INVALID_IDS),
    ]
    for one in bad:
        answer = hutchd.raw(one, [log])
        assert answer.status == REFUSED, one
        assert answer.descriptors == ()


INVALID_IDS = (
    "",
    "x-",
    "x-0123456789abcde",
    "x-0123456789abcdef0",
    "x-0123456789abcdei",
    "x-0123456789ABCDEF",
    "X-0123456789abcdef",
    "x-../../../../../x",
    "x-0123456789abcd\0f",
    "x-0123456789abcde\n",
    "\0x-0123456789abcdef",
    "s-0123456789abcdef",
    "x-0123456789abcdef\n",
)


def test_a_field_that_the_request_does_not_use_must_be_zero(hutchd: Caller, alice: Account) -> None:
    """Only a start has limits; only a start and a kill have an executor."""
    for one in (
        packet(KILL, alice.uid, ID, (1, 0, 0, 0)),
        packet(PROBE, alice.uid, ID),
        packet(PROBE, NOBODY, "", (0, 1, 0, 0)),
        packet(SWEEP, alice.uid, ID),
        packet(SWEEP, alice.uid, "", (0, 0, 0, 1)),
        packet(KILL, alice.uid, ""),
    ):
        assert hutchd.raw(one).status == REFUSED


@pytest.mark.parametrize("size", [1, 8, 64, 127, 129, 256, 4096, 65536])
def test_a_packet_of_another_size_is_refused(hutchd: Caller, alice: Account, log: int, size: int) -> None:
    """It is refused even if it begins with a valid request."""
    raw = packet(START, alice.uid, ID).ljust(size, b"\0")[:size]
    assert hutchd.raw(raw, [log]).status == REFUSED


@pytest.mark.parametrize("count", [0, 2, 3, 4, 5, 16, 253])
def test_a_start_without_exactly_one_descriptor_is_refused(
    hutchd: Caller, alice: Account, log: int, count: int
) -> None:
    """The kernel drops descriptors that do not fit; such a request is refused too."""
    assert hutchd.raw(packet(START, alice.uid, ID), [log] * count).status == REFUSED


@pytest.mark.parametrize("op", [PROBE, KILL, SWEEP])
@pytest.mark.parametrize("count", [1, 4, 100])
def test_another_request_with_descriptors_is_refused(
    hutchd: Caller, alice: Account, log: int, op: int, count: int
) -> None:
    """The launcher closes them."""
    one = packet(op, alice.uid, ID if op == KILL else "")
    assert hutchd.raw(one, [log] * count).status == REFUSED


def test_an_output_that_allows_more_than_appending_is_refused(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """Examples: a file not opened for appending, a device, a directory, a socket."""
    ours, theirs = socket.socketpair()
    ways = {
        "read": os.open(shared.output, os.O_RDONLY | os.O_CREAT),
        "write": os.open(shared.output, os.O_WRONLY),
        "path": os.open(shared.output, os.O_PATH),
        "append, but reading": os.open(shared.output, os.O_RDONLY | os.O_APPEND),
        "device": os.open("/dev/null", os.O_WRONLY | os.O_APPEND),
        "directory": os.open("/", os.O_RDONLY),
        "socket": ours.detach(),
        "other socket": theirs.detach(),
        "nothing": os.pidfd_open(os.getpid()),
    }
    answers = {name: hutchd.raw(packet(START, alice.uid, ID), [fd]).status for name, fd in ways.items()}
    for fd in ways.values():
        os.close(fd)

    assert answers == dict.fromkeys(ways, REFUSED)


def test_an_empty_packet_closes_the_connection(shared: Stage) -> None:
    """recvmsg(2) returns the same for an empty packet and for a closed peer."""
    caller = shared.connect()
    caller.probe()
    caller.send(b"")
    with pytest.raises(EOFError):
        caller.receive()
    caller.close()


def test_a_peer_that_never_reads_is_dropped(shared: Stage, hutchd: Caller) -> None:
    """Its replies fill its socket; the launcher never waits for that peer."""
    silent = shared.connect()
    silent.sock.settimeout(20)

    def go_on() -> None:
        for _ in range(100_000):
            silent.send(packet(PROBE))
            hutchd.probe()

    with pytest.raises(OSError, match=r"Broken pipe|Connection reset"):
        go_on()
    silent.close()


def test_a_flood_on_some_connections_does_not_block_another(shared: Stage, hutchd: Caller) -> None:
    """The launcher reads one packet of each connection in turn."""
    noisy = [shared.connect() for _ in range(3)]
    for caller in noisy:
        caller.sock.setblocking(False)
    for _ in range(50):
        for caller in noisy:
            try:
                while True:
                    caller.send(os.urandom(128))
            except OSError:
                pass
        assert hutchd.probe()["v"] == 1
    for caller in noisy:
        caller.close()


def test_fuzz(shared: Stage, alice: Account, log: int) -> None:
    """Of 3,000 random packets only valid starts start an executor."""
    fuzz(shared, alice, log, 3_000)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_fuzz_full(shared: Stage, alice: Account, log: int) -> None:
    """Of 100,000 random packets only valid starts start an executor."""
    fuzz(shared, alice, log, 100_000)


def fuzz(on: Stage, alice: Account, log: int, count: int) -> None:
    """Send packets that are valid or nearly valid. Each valid start must start an executor, and no other packet may."""
    seed = int(os.environ.get("HUTCH_FUZZ_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"HUTCH_FUZZ_SEED={seed}")
    dice = random.Random(seed)
    caller = on.connect()
    started = valid = 0
    for number in range(count):
        raw, descriptors = mutated(dice, alice.uid)
        if is_start(raw, len(descriptors), alice.uid):
            valid += 1
        if not raw and not descriptors:
            continue
        try:
            answer = caller.raw(raw, [log] * len(descriptors))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            assert not raw, f"message {number}: {raw!r} broke the connection"
            caller.close()
            caller = on.connect()
            continue
        if answer.status == DONE and answer.pid:
            started += 1
            assert is_start(raw, len(descriptors), alice.uid), f"message {number}: {raw!r} started something"
            for fd in answer.descriptors:
                os.close(fd)
            name = REQUEST.unpack(raw)[3].rstrip(b"\0").decode()
            on.known.add(name)
            assert caller.end(name).status == DONE
            on.known.remove(name)
    caller.close()
    print(f"{count} packets, {started} of {valid} valid starts started an executor")

    assert started == valid


def is_start(raw: bytes, descriptors: int, uid: int) -> bool:
    """Return whether this is a valid start, decided independently of the launcher's code."""
    return (
        len(raw) == 128
        and descriptors == 1
        and raw[:12] == MAGIC + b"\2\0\0\0"
        and raw[12:16] == uid.to_bytes(4, "big")
        and raw[16:18] == b"x-"
        and all(byte in b"0123456789abcdefghjkmnpqrstvwxyz" for byte in raw[18:34])
        and not any(raw[34:48])
        and int.from_bytes(raw[48:56], "big") <= 1 << 62
        and int.from_bytes(raw[56:60], "big") <= 1 << 22
        and int.from_bytes(raw[60:64], "big") <= 10_000
        and int.from_bytes(raw[64:68], "big") <= 1 << 20
        and int.from_bytes(raw[68:72], "big") <= 1
        and not any(raw[72:])
    )


def mutated(dice: random.Random, uid: int) -> tuple[bytes, list[None]]:
    """Return a packet, and one item for each descriptor that goes with it."""
    name = "x-" + "".join(dice.choices("0123456789abcdefghjkmnpqrstvwxyz", k=16))
    op = dice.choice((PROBE, START, START, START, KILL, SWEEP, dice.randrange(256)))
    account = dice.choice((uid, uid, uid, 0, NOBODY, dice.randrange(1 << 32)))
    limits = (0, 0, 0, 0) if dice.random() < 0.7 else tuple(dice.choice((0, 1 << dice.randrange(30))) for _ in range(4))
    raw = bytearray(packet(op, account, dice.choice((name, name, name, "")), limits))
    for _ in range(dice.choice((0, 0, 1, 1, 2, 8))):
        raw[dice.randrange(128)] = dice.choice((0, 1, 255, dice.randrange(256)))
    kind = dice.random()
    if kind < 0.05:
        raw = bytearray(dice.randbytes(dice.choice((128, 128, dice.randrange(300)))))
    elif kind < 0.1:
        raw = raw[: dice.randrange(129)] + dice.randbytes(dice.choice((0, 1, 100)))
    count = dice.choice((1, 1, 1, 1, 0, 0, 2, dice.randrange(40)))
    return bytes(raw), [None] * count


def test_another_account_that_can_connect_is_refused(shared: Stage, alice: Account) -> None:
    """It requests a start twenty times, on a socket to which every account may connect."""
    shared.socket.chmod(0o666)
    try:
        done = subprocess.run(
            ["/usr/bin/env", "python3", "-c", KNOCK, str(shared.socket), str(alice.uid)],
            capture_output=True,
            text=True,
            user="nobody",
            group=65534,
            extra_groups=[],
            check=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
        )
    finally:
        shared.socket.chmod(0o600)

    answers = done.stdout.splitlines()
    refusal = f"Only {shared.served.name} may ask."
    assert len(answers) == 20
    assert set(answers) <= {refusal, "closed"}

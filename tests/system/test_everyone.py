"""A shared hutchd: real accounts connect to its sockets, and each can read and change only its own records."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest

from hutch_client.client import HutchClient
from hutch_daemon.api.gate import CLIENT_GATE, CallerClass, Ownership, Role, Subject, callers_of, expected
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_id
from hutch_shared.methods import CLIENT, EXECUTOR
from hutch_shared.secret import Secret
from tests.accounts import Account, group, join
from tests.broker.stage import request
from tests.daemon.api.test_gate_executors import CALLS as EXECUTOR_CALLS
from tests.daemon.api.test_gate_walk import CALLS, NAMED
from tests.fakes.stage import until
from tests.system.log import wait_for
from tests.system.shared_host import SharedHost, shared_host

pytestmark = pytest.mark.system

STRANGER: Final = Path(__file__).with_name("programs") / "stranger.py"
ASKS: Final = [{"tool": "Bash", "input": {"command": "make"}}]
ROOT: Final = Account("root", 0, 0, Path("/root"))
SECRET: Final = Secret("sk-ant-api03-alices-own-key-that-nobody-else-has")


@dataclass(frozen=True)
class Things:
    """A user's records: a session with a permission request, a queued turn, a key."""

    session: str
    turn: str
    question: str
    key: str

    @property
    def ids(self) -> tuple[str, ...]:
        return self.session, self.turn, self.question, self.key


def nothing() -> Things:
    """Return well-formed ids of records that do not exist."""
    return Things(new_id("session"), new_id("turn"), new_id("permission"), "nobodys")


@dataclass(frozen=True)
class Town:
    """A host with several users, and the records of Alice and Bob."""

    host: SharedHost
    things: Mapping[str, Things]

    def __getattr__(self, name: str) -> Account:
        return self.host.people[name]

    async def says(self, who: Account, what: Sequence[tuple[Path, str, bool]]) -> list[str | None]:
        """Send raw texts to sockets as an account; return the replies."""
        told = json.dumps([(str(path), text, one_line) for path, text, one_line in what])
        words = (self.host.code.python, "-I", "-c", STRANGER.read_text())
        done = await anyio.to_thread.run_sync(lambda: who.run(*words, input=told, timeout=110))
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))

    @property
    def client_socket(self) -> Path:
        return self.host.runtime / "client.sock"


async def have(host: SharedHost, who: Account, name: str) -> Things:
    """Give a user a session with a permission request, a queued turn behind it, and a key."""
    async with host.client(who) as hutch:
        options = m.AgentOptions(script=str(host.script(who, ASKS)))
        cwd = str(host.folder(who, "work"))
        opened = await hutch.open_session(m.OpenSession("script", cwd, name=name, options=options))
        await hutch.submit_prompt(opened.id, "go")

        async def asked() -> bool:
            return bool(await hutch.list_permissions(m.ListPermissions(opened.id)))

        await until(asked)
        question = (await hutch.list_permissions(m.ListPermissions(opened.id)))[0]
        later = await hutch.submit_prompt(opened.id, "later")
        key = await hutch.put_api_key("anthropic", SECRET, f"{name}-key")
    return Things(opened.id, later.id, question.id, key.name)


@pytest.fixture(scope="module")
async def town() -> AsyncIterator[Town]:
    """Alice and Bob have records; Carol is an administrator by her group; Mallory is an attacker."""
    with group("admins") as admins:
        settings = f'[executors]\nspares = 0\n[admins]\ngroups = ["{admins}"]\n'
        async with shared_host("alice", "bob", "carol", "mallory", settings=settings, start=False) as host:
            join(host.people["carol"], admins)
            await host.start_launcher()
            await host.start()
            things = {name: await have(host, host.people[name], name) for name in ("alice", "bob")}
            yield Town(host, things)
            async with host.client(ROOT) as root:
                for one in await root.list_sessions(m.ListSessions("open", all_owners=True)):
                    await root.close_session(one.id, force=True)


async def names(hutch: HutchClient, *, everybodys: bool = True) -> set[str]:
    """Return the names of the sessions that a user sees."""
    return {one.name for one in await hutch.list_sessions(m.ListSessions(all_owners=everybodys))}


async def reason(hutch: HutchClient, method: str, params: msgspec.Struct) -> Reason | None:
    """Call; return the refusal's reason."""
    try:
        await hutch.call(method, params)
    except HutchError as error:
        return error.reason
    return None


async def test_each_user_sees_their_own_records(town: Town) -> None:
    """Lists, requests, events, keys and the audit show no record of another user."""
    for name, other in (("alice", "bob"), ("bob", "alice")):
        async with town.host.client(town.host.people[name]) as hutch:
            seen = [
                await hutch.list_sessions(m.ListSessions(all_owners=True)),
                await hutch.list_permissions(m.ListPermissions(state=None)),
                await hutch.call("read_events", m.ReadEvents("*")),
                await hutch.call("list_api_keys", m.Nothing()),
                await hutch.call("read_audit", m.ReadAudit()),
                await hutch.call("get_usage", m.GetUsage()),
                await hutch.get_status(),
            ]
        shown = msgspec.json.encode(seen).decode()

        own = town.things[name]
        assert all(one in shown for one in (own.session, own.question, own.key))
        assert not [one for one in town.things[other].ids if one in shown]


async def test_each_user_controls_their_own_sessions(town: Town) -> None:
    """The owner decides, interrupts, closes and removes; to another user the session looks missing."""
    it = await have(town.host, town.alice, "to-be-steered")
    ways: tuple[tuple[str, msgspec.Struct], ...] = (
        ("cancel_turn", m.TurnRef(it.turn)),
        ("set_permission_mode", m.SetPermissionMode(it.session, "plan")),
        ("answer_permission", m.AnswerPermission(it.question, "deny")),
        ("close_session", m.CloseSession(it.session, force=True)),
        ("delete_session", m.SessionRef(it.session)),
    )
    async with town.host.client(town.bob) as bob, town.host.client(town.alice) as alice:
        for method, params in ways:
            assert await reason(bob, method, params) is Reason.NOT_FOUND, method
            assert await reason(alice, method, params) is None, method


@pytest.mark.parametrize("who", ["carol", "root"])
async def test_administrators_control_everything_but_keys(town: Town, who: str) -> None:
    """A group in the settings, or uid 0, makes an administrator: all sessions on request, but no foreign key."""
    it = await have(town.host, town.bob, f"steered-by-{who}")
    async with town.host.client(ROOT if who == "root" else town.carol) as admin:
        everybodys, own = await names(admin), await names(admin, everybodys=False)
        answered = await reason(admin, "answer_permission", m.AnswerPermission(it.question, "deny"))
        closed = await reason(admin, "close_session", m.CloseSession(it.session, force=True))
        keys = await admin.call("list_api_keys", m.Nothing())
        deleted = await reason(admin, "delete_api_key", m.DeleteApiKey("anthropic", it.key))

    assert {"alice", "bob"} <= everybodys
    assert own == set()
    assert (answered, closed) == (None, None)
    assert (keys.keys, deleted) == ((), Reason.NO_KEY)


async def test_hutchds_account_operates_hutchd_and_sees_no_records(town: Town) -> None:
    """This account may call the methods about hutchd itself; users' records look missing to it."""
    async with town.host.client(town.host.hutch_account) as hutch:
        copied = await reason(hutch, "backup_store", m.BackupStore(str(town.host.state / "copy.db")))
        looked = await reason(hutch, "get_session", m.SessionRef(town.things["alice"].session))

        assert (copied, looked) == (None, Reason.NOT_FOUND)
        assert await names(hutch) == set()


async def test_users_cannot_operate_hutchd(town: Town) -> None:
    """Methods about hutchd itself are refused to users."""
    async with town.host.client(town.mallory) as mallory:
        for method in CLIENT_GATE:
            if callers_of(method) is CallerClass.OPERATORS:
                params = m.BackupStore("/tmp/copy.db") if method == "backup_store" else CLIENT[method].params()
                assert await reason(mallory, method, params) is Reason.NOT_ALLOWED


def asked(method: str, it: Things, about: Subject) -> str:
    """Return an encoded request about these records."""
    params: Any = CALLS[method](it, False)  # type: ignore[arg-type]
    if (method, about) == ("list_permissions", Subject.QUESTION):
        params = m.ListPermissions(state=None, after=it.question)
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": msgspec.to_builtins(params)}) + "\n"


async def test_foreign_ids_get_the_same_reply_as_missing_ones(town: Town) -> None:
    """For Alice's ids every method sends an attacker the same bytes as for ids that do not exist."""
    alices, none = town.things["alice"], nothing()
    ways = [(method, about) for method, row in CLIENT_GATE.items() for about in row.about if about in NAMED]
    calls = [(town.client_socket, asked(method, it, about), True) for method, about in ways for it in (alices, none)]

    heard = await town.says(town.mallory, calls)

    for (method, about), theirs, nobodys in zip(ways, heard[::2], heard[1::2], strict=True):
        assert theirs is not None
        assert nobodys is not None
        for one, other in zip(alices.ids, none.ids, strict=True):
            theirs, nobodys = theirs.replace(one, "THAT"), nobodys.replace(other, "THAT")
        assert theirs == nobodys, (method, about)
        want = expected(method, Role.PERSON, about=about, whose=Ownership.FOREIGN)
        said = json.loads(theirs).get("error", {}).get("data", {}).get("reason")
        assert said == (want.word if want is not None else None), (method, about)
    async with town.host.client(town.alice) as alice:
        assert (await alice.get_session(alices.session)).pending == 1
        assert (await alice.get_turn(alices.turn)).state == "queued"


async def test_a_stranger_at_the_executor_socket_is_refused(town: Town) -> None:
    """Every method without a token, with an invented one, or with garbage is refused, and the connection closed."""
    it = town.things["alice"]
    async with town.host.client(town.alice) as alice:
        executor = (await alice.get_session(it.session)).executor
    assert executor is not None
    hellos = [
        m.Hello(name, token, m.PROTOCOL, "0", 0, session)
        for name in (executor, new_id("executor"))
        for token in ("", "A" * 43, "\0'\"; --", "x" * 100_000)
        for session in (None, it.session)
    ]
    others = [
        EXECUTOR_CALLS[method](it.session, None)  # type: ignore[arg-type]
        for method in EXECUTOR
        if method not in ("ping", "hello")
    ]
    names_of = {row.params: row.name for row in EXECUTOR.values()}
    lines = [
        json.dumps(
            {
                "jsonrpc": "2.0",
                "method": names_of[type(one)],
                "params": json.loads(msgspec.json.encode(one)),
                **({"id": 1} if EXECUTOR[names_of[type(one)]].kind == "request" else {}),
            }
        )
        + "\n"
        for one in (*hellos, *others)
    ]
    path = town.host.runtime / "executor.sock"

    heard = await town.says(
        town.mallory, [(path, text, False) for text in (*lines, "GET / HTTP/1.1\r\n\r\n", "\0" * 99)]
    )

    assert {"token_unknown", "hello_first", "parse_error", None} == {said(one) for one in heard}
    for text, one in zip(lines, heard, strict=False):
        assert one is not None
        assert not [name for name in it.ids if name in one]
        assert said(one) == ("token_unknown" if '"hello"' in text else "hello_first" if '"id"' in text else None)
    async with town.host.client(town.alice) as alice:
        assert (await alice.get_session(it.session)).executor == executor


def said(heard: str | None) -> str | None:
    """Return the reason in the first line of a reply, if it has one."""
    if not heard:
        return None
    first = json.loads(heard.splitlines()[0])
    return str(first["error"]["data"]["reason"]) if "error" in first else None


async def test_the_broker_forwards_nothing_for_a_stranger(town: Town) -> None:
    """The broker refuses requests without a lease, and with an invented one."""
    path = town.host.runtime / "broker" / "broker.sock"
    await wait_for(path.is_socket)
    made_up = f"hutch-l-{'0' * 16}-{'A' * 43}"
    asks = [
        request(token, method=method, path=where, header=header)
        for token in ("", made_up, SECRET.reveal(), "x" * 5_000)
        for header in ("x-api-key", "authorization")
        for method, where in (("POST", "/v1/messages"), ("GET", "/v1/models"), ("GET", "/"))
    ]

    heard = await town.says(town.mallory, [(path, one.decode("latin-1"), False) for one in (*asks, b"\0\1\2\r\n\r\n")])

    for one in heard:
        assert one is not None
        status = one.split(" ")[1] if one.startswith("HTTP/") else "cut"
        assert status in ("400", "401", "403", "404", "431", "cut"), one[:200]


async def test_only_hutchd_can_connect_to_the_brokers_control_socket(town: Town) -> None:
    """Every other account is refused."""
    path = town.host.runtime / "broker-control.sock"

    assert await town.says(town.mallory, [(path, "{}\n", False)]) == [None]

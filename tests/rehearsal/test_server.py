"""The rehearsal model as a plain HTTP client sees it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

from tests.rehearsal import (
    Cut,
    Drop,
    Model,
    Odd,
    Pause,
    Refuse,
    Reply,
    Request,
    Say,
    Script,
    Stall,
    Step,
    Steps,
    Think,
    Usage,
    Use,
    anything,
    serve,
)
from tests.rehearsal.connection import BODY_LIMIT, HEAD_LIMIT
from tests.rehearsal.odd import ODD_LINES
from tests.rehearsal.scripts import BUG, FIX, RUN_TEST, demo, echo, write_demo_repository

KEY = "sk-rehearsal"
WIDTHS = "aé€😀" * 3


def always(reply: Reply) -> Script:
    return lambda _: reply


def asking(prompt: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 64, "stream": True, "messages": [{"role": "user", "content": prompt}], **more}


def fetch(model: Model, body: Any, key: str = KEY, path: str = "/v1/messages?beta=true") -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection(urlsplit(model.url).netloc, timeout=30)
    try:
        connection.request("POST" if body is not None else "GET", path, json.dumps(body), {"x-api-key": key})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


async def ask(model: Model, body: Any, **more: Any) -> tuple[int, Any, bytes]:
    return await anyio.to_thread.run_sync(lambda: fetch(model, body, **more))


def events_of(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in raw.decode().split("\n") if line.startswith("data: ")]


def text_of(raw: bytes) -> str:
    return "".join(e["delta"].get("text", "") for e in events_of(raw) if e["type"] == "content_block_delta")


async def dial(model: Model, data: bytes) -> anyio.abc.SocketStream:
    port = urlsplit(model.url).port
    assert port
    stream = await anyio.connect_tcp("127.0.0.1", port)
    await stream.send(data)
    return stream


def posting(body: Any) -> bytes:
    raw = json.dumps(body).encode()
    return b"POST /v1/messages HTTP/1.1\r\nx-api-key: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        KEY.encode(),
        len(raw),
        raw,
    )


async def drain(stream: anyio.abc.SocketStream) -> bytes:
    """Return all bytes until the peer's end. A reset raises BrokenResourceError."""
    data = b""
    async with stream:
        try:
            while True:
                data += await stream.receive()
        except anyio.EndOfStream:
            return data


@pytest.mark.parametrize("name", ODD_LINES)
async def test_an_odd_line_is_sent_as_it_is_between_two_events(name: str) -> None:
    """The text before and after it is one block."""
    async with serve(key=KEY, script=always([Odd(name), Say("one "), Odd(name), Say("two")])) as model:
        _, _, raw = await ask(model, asking())

    assert raw.count(ODD_LINES[name]) == 2
    assert text_of(raw) == "one two"


async def test_a_reply_streams_as_the_api_does() -> None:
    """Blocks start, grow by deltas and stop in order; the message ends with its reason and its usage."""
    reply: Reply = [
        Think("hm"),
        Say("Hello there", chunks=2),
        Use("Bash", {"command": "ls"}, chunks=3),
        Usage(7, 5, 3, 2),
    ]
    async with serve(key=KEY, script=always(reply)) as model:
        status, headers, raw = await ask(model, asking())

    kinds = " ".join(e["type"].removeprefix("content_block_") for e in events_of(raw))
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    assert kinds == (
        "message_start ping start delta delta stop start delta delta stop "
        "start delta delta delta stop message_delta message_stop"
    )
    assert events_of(raw)[-2]["delta"]["stop_reason"] == "tool_use"
    assert events_of(raw)[-2]["usage"] == {
        "input_tokens": 7,
        "output_tokens": 5,
        "cache_creation_input_tokens": 2,
        "cache_read_input_tokens": 3,
    }


async def test_a_client_that_does_not_stream_gets_one_message() -> None:
    """Without `stream` the same reply is one JSON document."""
    async with serve(key=KEY, script=always([Say("Hi"), Use("Read", {"file_path": "a"})])) as model:
        _, _, raw = await ask(model, asking(stream=False))

    message = json.loads(raw)
    assert [b["type"] for b in message["content"]] == ["text", "tool_use"]
    assert message["stop_reason"] == "tool_use"


async def test_five_thousand_deltas_are_five_thousand_events() -> None:
    """The server merges writes, but not deltas."""
    text = "".join(chr(ord("a") + i % 26) for i in range(20_000))
    async with serve(key=KEY, script=always(Say(text, chunks=5000))) as model:
        _, _, raw = await ask(model, asking())

    assert text_of(raw) == text
    assert sum(e["type"] == "content_block_delta" for e in events_of(raw)) == 5000


@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_writes_may_split_a_character_anywhere(size: int) -> None:
    """A client that joins the bytes gets the whole text."""
    async with serve(key=KEY, script=always([Cut(size), Say(WIDTHS, chunks=4)])) as model:
        _, _, raw = await ask(model, asking())

    assert text_of(raw) == WIDTHS


@pytest.mark.parametrize("headers", [{"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}])
async def test_either_header_may_carry_the_key(headers: dict[str, str]) -> None:
    """The model accepts `x-api-key` and a bearer token, and records which one it got."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    async with serve(key=KEY, script=echo) as model:
        raw = await drain(await dial(model, f"GET /v1/models HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode()))

        assert raw.startswith(b"HTTP/1.1 200 ")
        assert model.requests[0].key == KEY
        assert headers.items() <= model.requests[0].headers.items()


async def test_a_wrong_key_is_refused_and_recorded() -> None:
    """The reply is 401 in the API's form; the script gets no request."""
    async with serve(key=KEY, script=Steps((anything, Say("for the right key")))) as model:
        status, _, raw = await ask(model, asking(), key="sk-other")
        _, _, later = await ask(model, asking())

        assert (status, json.loads(raw)["error"]["type"]) == (401, "authentication_error")
        assert [r.key for r in model.requests] == ["sk-other", KEY]
        assert text_of(later) == "for the right key"


async def test_a_refusal_has_the_apis_form() -> None:
    """The script sets status, error type and retry-after."""
    async with serve(key=KEY, script=always(Refuse(429, retry_after=2))) as model:
        status, headers, raw = await ask(model, asking())

    assert (status, headers["retry-after"], json.loads(raw)["error"]["type"]) == (429, "2", "rate_limit_error")


async def test_a_refusal_after_content_is_an_event_of_the_stream() -> None:
    """After the head an error can only be an `error` event, and nothing follows it."""
    async with serve(key=KEY, script=always([Say("so far"), Refuse(529)])) as model:
        status, _, raw = await ask(model, asking())

    assert (status, text_of(raw)) == (200, "so far")
    assert events_of(raw)[-1]["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("count", [1, 300, 700])
async def test_a_drop_comes_after_the_exact_number_of_bytes(count: int) -> None:
    """The client gets `after_bytes` bytes and then a reset."""
    async with serve(key=KEY, script=always([Say(WIDTHS * 50), Drop(after_bytes=count)])) as model:
        got = 0
        async with await dial(model, posting(asking())) as stream:
            with suppress(anyio.BrokenResourceError):
                while got <= count:
                    got += len(await stream.receive())

    assert got == count


async def test_a_drop_before_all_content_sends_nothing() -> None:
    """Parts at the start of a reply take effect before the head."""
    async with serve(key=KEY, script=always(Drop())) as model, await dial(model, posting(asking())) as stream:
        with pytest.raises(anyio.BrokenResourceError):
            await stream.receive()


async def test_a_pause_is_reached_with_all_before_it_sent() -> None:
    """A test can step through a reply; the text before and after the pause is one block."""
    pause = Pause()
    async with (
        serve(key=KEY, script=always([Say("one "), pause, Say("two")])) as model,
        anyio.create_task_group() as group,
    ):
        replies: list[bytes] = []

        async def collect() -> None:
            replies.append((await ask(model, asking()))[2])

        group.start_soon(collect)
        await pause.reached.wait()
        early = list(replies)
        pause.release.set()

    assert early == []
    assert text_of(replies[0]) == "one two"
    assert sum(e["type"] == "content_block_start" for e in events_of(replies[0])) == 1


async def test_a_hang_up_during_a_stream_is_recorded() -> None:
    """A client that leaves while the model is silent is in `hangups`."""
    async with serve(key=KEY, script=always([Say("wait"), Stall()])) as model:
        stream = await dial(model, posting(asking()))
        await model.until(lambda m: len(m.requests) == 1)
        await stream.aclose()
        await model.until(lambda m: len(m.hangups) == 1)

        assert model.hangups == model.requests


async def test_a_connection_carries_many_requests() -> None:
    """Early requests wait for their turn; the peer's port shows that there is one connection."""
    async with serve(key=KEY, script=echo) as model:
        last = posting(asking("second", stream=False)).replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nConnection: close\r\n")
        raw = await drain(await dial(model, posting(asking("first", stream=False)) + last))

        assert (raw.count(b"HTTP/1.1 200 OK"), raw.find(b"first") < raw.find(b"second")) == (2, True)
        assert model.requests[0].peer_port == model.requests[1].peer_port


async def test_a_chunked_body_is_read() -> None:
    """A request may come in chunks."""
    raw = json.dumps(asking("in pieces", stream=False)).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(raw[i : i + 7]), raw[i : i + 7]) for i in range(0, len(raw), 7))
    head = f"POST /v1/messages HTTP/1.1\r\nx-api-key: {KEY}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    async with serve(key=KEY, script=echo) as model:
        answer = await drain(await dial(model, head.encode() + chunks + b"0\r\n\r\n"))

        assert b"in pieces" in answer
        assert model.requests[0].raw == raw


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbroken header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BODY_LIMIT + 1), 413),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * (HEAD_LIMIT + 1), 431),
    ],
)
async def test_an_ambiguous_or_oversized_request_is_refused(head: bytes, status: int) -> None:
    """The reply is an error and the connection ends."""
    async with serve(key=KEY, script=echo) as model:
        answer = await drain(await dial(model, head))

        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert model.requests == []


@pytest.mark.parametrize(
    "side",
    [{"max_tokens": 1}, {"model": "claude-haiku-9"}, {"output_config": {"format": {"type": "json_schema"}}}],
)
async def test_a_side_request_takes_no_step(side: dict[str, Any]) -> None:
    """A request that the client makes for itself gets a fixed reply, not a step of the script."""
    async with serve(key=KEY, script=Steps((anything, Say("the step")))) as model:
        await ask(model, asking(**side))
        _, _, raw = await ask(model, asking())

        assert text_of(raw) == "the step"
        assert [r.number for r in model.turns] == [2]


async def test_tokens_are_counted_and_models_listed() -> None:
    """The API's two small methods work."""
    async with serve(key=KEY, script=echo) as model:
        _, _, counted = await ask(model, asking(), path="/v1/messages/count_tokens")
        _, _, listed = await ask(model, None, path="/v1/models")
        missing, _, _ = await ask(model, None, path="/v1/files")

    assert json.loads(counted)["input_tokens"] > 0
    assert json.loads(listed)["data"][0]["type"] == "model"
    assert missing == 404


async def test_an_exception_of_the_block_is_raised_unwrapped() -> None:
    """It is not in an exception group."""
    with pytest.raises(LookupError, match="mine"):
        async with serve(key=KEY, script=echo):
            raise LookupError("mine")


def seen(*messages: tuple[str, Any]) -> Request:
    """Return a request whose conversation is `messages`."""
    body = {"tools": [{"name": "Bash"}], "messages": [{"role": role, "content": said} for role, said in messages]}
    return Request(1, "POST", "/v1/messages", {}, 1, b"", body)


def test_steps_match_the_last_message() -> None:
    """The first unused step that fits answers; it sees the last prompt and result, not older ones."""
    used = ("assistant", [{"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}])
    came = ("user", [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a.py"}]}])
    steps = Steps(("list", Say("1")), ("a.py", Say("2")), Step("list", Say("again"), times=None))

    first = steps(seen(("user", "<system-reminder>a.py</system-reminder>list it")))
    second = steps(seen(("user", "list it"), used, came, ("system", "note")))
    later = [steps(seen(("user", "list it"))) for _ in range(2)]
    none = steps(seen(("user", "sing")))

    assert [first, second, *later] == [Say("1"), Say("2"), Say("again"), Say("again")]
    assert isinstance(none, Refuse)
    assert none.status == 400
    assert "sing" in none.message


def test_the_demo_follows_the_results_of_its_tools() -> None:
    """It edits the text that it read, and reports success only if the test passes."""

    def after(tool: str, text: str, *, failed: bool = False, **given: str) -> Any:
        used = ("assistant", [{"type": "tool_use", "id": "t", "name": tool, "input": given}])
        result = {"type": "tool_result", "tool_use_id": "t", "content": text, "is_error": failed}
        return demo(seen(("user", "fix it"), ("system", "- Primary working directory: /w\n"), used, ("user", [result])))

    assert Use("Read", {"file_path": "/w/till.py"}) in after("Bash", "README\ntill.py", command="git ls-files")
    assert after("Read", f"  5\t    {BUG}", file_path="/w/till.py")[-1] == Use(
        "Edit", {"file_path": "/w/till.py", "old_string": BUG, "new_string": FIX}
    )
    assert after("Edit", "done", file_path="/w/till.py")[-1].input["command"] == RUN_TEST
    assert "all tests pass" in after("Bash", "Ran 2 tests\n\nOK", command=RUN_TEST).text
    assert "do not pass" in after("Bash", "FAILED (failures=1)", command=RUN_TEST).text
    assert "not allowed" in after("Edit", "not allowed", failed=True, file_path="/w/till.py").text


def test_the_demo_repository_fails_until_it_is_repaired(tmp_path: Path) -> None:
    """Its test fails at first and passes with the demo's edit."""
    write_demo_repository(tmp_path)
    run = [sys.executable, *RUN_TEST.split()[1:]]
    before = subprocess.run(run, cwd=tmp_path, capture_output=True, timeout=60)
    source = tmp_path / "till.py"
    source.write_text(source.read_text().replace(BUG, FIX))
    after = subprocess.run(run, cwd=tmp_path, capture_output=True, timeout=60)

    assert (before.returncode, after.returncode) == (1, 0)


def test_the_program_prints_its_url_and_ends_at_sigterm(tmp_path: Path) -> None:
    """The first output line is the URL, the key is read from a file, and SIGTERM ends it with 0."""
    (tmp_path / "key").write_text(f"{KEY}\n")
    command = [sys.executable, "-m", "tests.rehearsal", "--key-file", str(tmp_path / "key"), "--script", "echo"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, env={"PATH": os.defpath}, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        model = Model(KEY, echo)
        model.url = program.stdout.readline().strip()
        status, _, raw = fetch(model, asking("one two"))
        program.send_signal(signal.SIGTERM)
        code = program.wait(timeout=30)

    assert (status, text_of(raw), code) == (200, "one two", 0)

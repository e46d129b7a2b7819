"""A provider that repeats the key, in every form through every exit of a real broker: none comes out."""

from __future__ import annotations

import base64
import binascii
import codecs
import gzip
import html
import json
import quopri
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Final
from urllib.parse import quote

import msgspec
import pytest

from hutch_broker.mask import AnswerMask, WithheldError
from hutch_shared.secret_forms import SecretForms
from tests.broker.stage import Stage, Upstream, parsed, read_all, read_until, request, staged, upstream
from tests.sampling import sample

KEY: Final = "sk-ant-api03-Xq9_Zr7Lm2-Tb5_Vn8Kd4Hs6Jw1Pf3Gy0Cu-aB3dE6gH9jK2mN"
RAW: Final = KEY.encode()


def each(form: str) -> str:
    return "".join(form.format(byte) for byte in RAW)


def b64(before: int, encode: Callable[[bytes], bytes] = base64.b64encode) -> str:
    return encode(b"x" * before + RAW + b"y").decode()


FORMS: Final[dict[str, str]] = {
    "plain": KEY,
    "lower case": KEY.lower(),
    "upper case": KEY.upper(),
    "swapped case": KEY.swapcase(),
    "reversed": KEY[::-1],
    "rot13": codecs.encode(KEY, "rot13"),
    "hex": RAW.hex(),
    "HEX": RAW.hex().upper(),
    "hex with colons": RAW.hex(":"),
    "hex with blanks": RAW.hex(" "),
    "hex after 0x": each("0x{:02x}, "),
    "hex reversed": RAW.hex()[::-1],
    "hex of the reversed": RAW[::-1].hex(),
    "hex escapes": each("\\x{:02x}"),
    "octal escapes": each("\\{:03o}"),
    "decimal bytes": ", ".join(map(str, RAW)),
    "binary": each("{:08b} "),
    "JSON escapes": each("\\u{:04x}"),
    "JSON ESCAPES": each("\\u{:04X}"),
    "JSON escapes of some": KEY.replace("-", "\\u002d").replace("a", "\\u0061"),
    "JSON escapes, twice": each("\\\\u{:04x}"),
    "braced escapes": each("\\u{{{:x}}}"),
    "base64": b64(0),
    "base64 after 1": b64(1),
    "base64 after 2": b64(2),
    "base64 without padding": b64(0).rstrip("="),
    "base64url": b64(0, base64.urlsafe_b64encode),
    "base64url after 1": b64(1, base64.urlsafe_b64encode),
    "base64url after 2": b64(2, base64.urlsafe_b64encode),
    "base64 in lines": base64.encodebytes(b"x" * 50 + RAW).decode(),
    "base64 of the reversed": base64.b64encode(RAW[::-1]).decode(),
    "base64 reversed": b64(0)[::-1],
    "base64 twice": base64.b64encode(b64(1).encode()).decode(),
    "base64 of hex": base64.b64encode(RAW.hex().encode()).decode(),
    "hex of base64": b64(0).encode().hex(),
    "base32": base64.b32encode(RAW).decode(),
    "base32 after 3": base64.b32encode(b"abc" + RAW).decode(),
    "base32 in lower case": base64.b32encode(RAW).decode().lower(),
    "base32hex": base64.b32hexencode(RAW).decode(),
    "base85": base64.b85encode(RAW).decode(),
    "ascii85": base64.a85encode(RAW).decode(),
    "URL": quote(KEY, safe="").replace("-", "%2D").replace("_", "%5F"),
    "url": each("%{:02x}"),
    "URL of all": each("%{:02X}"),
    "URL twice": each("%25{:02x}"),
    "URL of some": KEY.replace("a", "%61").replace("9", "%39"),
    "HTML": each("&#{};"),
    "HTML in hex": each("&#x{:x};"),
    "HTML of some": html.escape(KEY).replace("-", "&#45;").replace("3", "&#x33;"),
    "quoted-printable": quopri.encodestring(b"=" + RAW * 2).decode(),
    "utf-16": "\0".join(KEY),
    "utf-32": "\0\0\0".join(KEY),
    "blanks between": " ".join(KEY),
    "hyphens between": "-".join(KEY),
    "lines between": "\n".join(KEY),
    "no-width blanks between": "\u200b".join(KEY),
    "in two words": f"{KEY[:20]} {KEY[20:]}",
    "in quotes": f'{KEY[:30]}", "{KEY[30:]}',
    "without its prefix": KEY[14:],
    "crc before": f"{binascii.crc32(RAW)}{KEY}",
}


def head(*lines: str, status: str = "200 OK") -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *lines, "", "")).encode()


def whole(body: bytes, *lines: str, status: str = "200 OK") -> bytes:
    return head(f"Content-Length: {len(body)}", *lines, status=status) + body


def event(text: str, kind: str = "text") -> bytes:
    data = {"type": "content_block_delta", "index": 0, "delta": {"type": f"{kind}_delta", kind: text}}
    return b"event: content_block_delta\ndata: " + json.dumps(data).encode() + b"\n\n"


def chunked(*chunks: bytes, kind: str = "text/event-stream", trailer: str = "") -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks if chunk)
    return head("Transfer-Encoding: chunked", f"Content-Type: {kind}") + body + f"0\r\n{trailer}\r\n".encode()


def one_line(form: str) -> str:
    return form.replace("\n", " ").replace("\0", "")


def cuts(form: str, kind: str, *places: float) -> bytes:
    """Return a stream with the form cut at these parts of its length, as texts of one block."""
    at = [0, *(int(len(form) * place) for place in places), len(form)]
    pieces = [form[begin:end] for begin, end in pairwise(at)]
    return chunked(event("I say: ", kind), *(event(piece, kind) for piece in pieces), event(" is it.", kind))


JSON: Final = "Content-Type: application/json"
TEXT: Final = "Content-Type: text/plain"

EXITS: Final[dict[str, Callable[[str], bytes]]] = {
    "status line": lambda form: whole(b"{}", JSON, status=f"200 {one_line(form)}"),
    "header name": lambda form: whole(b"{}", JSON, f"X-{one_line(form)}: 1"),
    "header value": lambda form: whole(b"{}", JSON, f"X-Echo: {one_line(form)}"),
    "two header values": lambda form: whole(
        b"{}", JSON, f"X-A: {one_line(form)[: len(form) // 2]}", f"X-B: {one_line(form)[len(form) // 2 :]}"
    ),
    "body": lambda form: whole(f"you sent {form}!".encode(), TEXT),
    "body without a type": lambda form: whole(f"<{form}>".encode()),
    "body in two chunks": lambda form: chunked(
        b"you sent " + form.encode()[: len(form) // 3], form.encode()[len(form) // 3 :] + b" it", kind="text/plain"
    ),
    "JSON body": lambda form: whole(json.dumps({"content": [{"text": form}]}).encode(), JSON),
    "two texts of a JSON body": lambda form: whole(
        json.dumps({"content": [{"text": form[: len(form) // 2]}, {"text": form[len(form) // 2 :]}]}).encode(), JSON
    ),
    "error body": lambda form: whole(json.dumps({"error": form}).encode(), JSON, status="401 No"),
    "gzip": lambda form: whole(gzip.compress(form.encode()), TEXT, "Content-Encoding: gzip"),
    "deflate": lambda form: whole(zlib.compress(form.encode()), TEXT, "Content-Encoding: deflate"),
    "one event": lambda form: chunked(event("I say: "), event(f"it is {form}."), event("Bye.")),
    "two events": lambda form: cuts(form, "text", 0.5),
    "two events, mostly in the second": lambda form: cuts(form, "thinking", 0.1),
    "two events, mostly in the first": lambda form: cuts(form, "partial_json", 0.9),
    "many events": lambda form: cuts(form, "text", *(number / 20 for number in range(1, 20))),
    "an event of another kind": lambda form: chunked(f"id: {one_line(form)}\n: {one_line(form)}\n\n".encode()),
    "data that is not JSON": lambda form: chunked(
        f"data: {one_line(form)[:30]}\n\n".encode(), f"data: {one_line(form)[30:]}\n\n".encode()
    ),
    "trailers": lambda form: chunked(event("Hello."), trailer=f"X-Key: {one_line(form)}\r\n"),
}


def letters(text: bytes) -> bytes:
    return bytes(byte for byte in text.lower() if byte < 128 and chr(byte).isalnum())


def texts(body: bytes) -> Iterator[str]:
    """Yield what a client reads from an answer: its bytes, the texts of its events, and those of a document."""
    yield body.decode("latin-1")
    joined: dict[str, str] = {}
    for line in body.split(b"\n"):
        if line.startswith(b"data:"):
            with suppress(msgspec.DecodeError):
                for kind, text in msgspec.json.decode(line[5:])["delta"].items():
                    joined[kind] = joined.get(kind, "") + text
    yield from joined.values()
    with suppress(msgspec.DecodeError, KeyError, TypeError):
        yield "".join(part["text"] for part in msgspec.json.decode(body)["content"])


def comes_out(form: str, raw: bytes) -> bool:
    """Return whether what the agent received contains the form, whatever stands between its characters."""
    key = letters(form.encode())
    body = raw.partition(b"\r\n\r\n")[2]
    with suppress(EOFError, ValueError):
        body = parsed(raw)[2]
    if b"chunked" in raw and body.count(b"\r\n") > 2:
        body = b"\n".join(line for line in body.split(b"\r\n"))
    return any(key in letters(text.encode()) for text in (*texts(body), raw.decode("latin-1")))


async def received(stage: Stage, provider: Upstream, token: str, answer: bytes) -> bytes:
    provider.answer = answer
    return await stage.send(request(token))


@sample(8)
@pytest.mark.parametrize("exit_", EXITS)
async def test_the_key_leaves_in_no_form(exit_: str) -> None:
    """What the agent receives does not contain the key, as bytes or as the joined texts of events and documents."""
    async with upstream(b"") as provider, staged(provider.url) as stage:
        stage.secret = KEY
        _, token = await stage.lease(requests=10_000)
        leaks = [
            name
            for name, form in FORMS.items()
            if comes_out(form, await received(stage, provider, token, EXITS[exit_](form)))
        ]

        assert len(provider.got) == len(FORMS) >= 31
        assert leaks == []


async def test_what_is_not_the_key_arrives_as_it_was() -> None:
    """A form inside one event is masked with stars; the events around it and the length stay."""
    answer = chunked(event("one"), event(f"key={KEY}!"), event("three"))
    async with upstream(answer) as provider, staged(provider.url) as stage:
        stage.secret = KEY
        _, token = await stage.lease()
        _, _, body = await stage.ask(token)

        assert body == event("one") + event(f"key={'*' * len(KEY)}!") + event("three")


async def test_a_form_that_two_events_complete_cuts_the_stream() -> None:
    """The event with its begin is not sent, the connection is aborted, and hutchd gets a refusal beside the usage."""
    answer = chunked(event("one"), event(KEY[:40]), event(KEY[40:]), event("four"))
    async with upstream(b"") as provider, staged(provider.url) as stage:
        begin = answer.index(KEY[40:].encode())
        provider.answer, provider.later = answer[:begin], answer[begin:]
        stage.secret = KEY
        _, token = await stage.lease()
        stream = await stage.dial()
        await stream.send(request(token))
        raw = await read_until(stream, b'"one"')
        provider.go.set()
        raw += await read_all(stream)
        await stream.aclose()
        records = await stage.recorded(2)

        with pytest.raises(EOFError):
            parsed(raw)
        assert KEY[14:40].encode() not in raw
        assert b"four" not in raw
        assert sorted((record.status, record.refused or "") for record in records) == [
            (200, ""),
            (502, "The provider's answer contained the key, and it cannot be masked there."),
        ]


async def test_an_answer_of_which_nothing_was_sent_is_refused() -> None:
    """If the form is complete before the head was sent, the agent gets an error that it need not try again."""
    async with upstream(chunked(event(KEY[:40]), event(KEY[40:]))) as provider, staged(provider.url) as stage:
        stage.secret = KEY
        _, token = await stage.lease()
        status, headers, body = await stage.ask(token)

        assert (status, headers["x-should-retry"]) == (502, "false")
        assert msgspec.json.decode(body)["error"]["code"] == "key_in_answer"


async def test_an_event_that_only_begins_like_the_key_is_late_but_whole() -> None:
    """Held events are sent in order as soon as the text goes on in another way, or the stream ends."""
    parts = [event("one"), event(KEY[:30]), b": ping\n\n", event(" is how keys begin"), event(KEY[14:22])]
    async with upstream(chunked(*parts)) as provider, staged(provider.url) as stage:
        stage.secret = KEY
        _, token = await stage.lease()
        _, _, body = await stage.ask(token)

        assert body == b"".join(parts)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (whole(b"xx", TEXT, "Content-Encoding: br"), "compressed in a way"),
        (whole(b"xx", TEXT, "Content-Encoding: zstd"), "compressed in a way"),
        (whole(b"xx", TEXT, "Content-Encoding: gzip, gzip"), "compressed in a way"),
        (whole(b"xx", TEXT, "Content-Encoding: gzip", "Content-Encoding: br"), "compressed in a way"),
        (whole(b"not gzip at all", TEXT, "Content-Encoding: gzip"), "damaged"),
        (whole(gzip.compress(b"{}" * 99)[:-9], JSON, "Content-Encoding: gzip"), "damaged"),
        (whole(gzip.compress(b"one") + gzip.compress(b"two"), TEXT, "Content-Encoding: gzip"), "follows"),
        (whole(gzip.compress(bytes(70 << 20), 9), JSON, "Content-Encoding: gzip"), "more than 64 MiB"),
        (whole(b"text", "Content-Type: text/plain; charset=utf-7"), "character set"),
        (whole(b"{}", JSON, status="999 Odd"), "status"),
        (whole(b"[" * 100_000, JSON), "nested too deeply"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_answer_that_cannot_be_inspected_is_refused(answer: bytes, why: str) -> None:
    """The agent gets 502 with a sentence, is not asked to try again, and the refusal is recorded."""
    async with upstream(answer) as provider, staged(provider.url) as stage:
        _, token = await stage.lease()
        status, headers, body = await stage.ask(token)
        records = await stage.recorded(2)

        assert (status, headers["x-should-retry"]) == (502, "false")
        assert msgspec.json.decode(body)["error"]["code"] == "answer_not_inspected"
        assert [why in record.refused for record in records if record.refused] == [True]


async def test_the_providers_words_for_the_status_stay_behind() -> None:
    """The agent gets HTTP's own words, or none for a status that has none."""
    async with upstream(whole(b"{}", JSON, status="529 Custom words")) as provider, staged(provider.url) as stage:
        _, token = await stage.lease()
        raw = await stage.send(request(token))

        assert raw.startswith(b"HTTP/1.1 529 \r\n")


@sample(8)
@pytest.mark.parametrize("seed", range(64))
def test_no_cut_of_a_stream_lets_the_key_out(seed: int) -> None:
    """Whatever the sizes of the provider's chunks and texts, what is released never contains the key."""
    random = Random(seed)
    forms = SecretForms(KEY)
    released, sent = b"", b""
    for name in random.sample(sorted(FORMS), 12):
        form = FORMS[name]
        at = sorted(random.sample(range(1, len(form)), random.randint(0, 6)))
        pieces = [form[begin:end] for begin, end in zip([0, *at], [*at, len(form)], strict=True)]
        line_end = random.choice(["\n", "\r\n", "\r"])
        stream = b"".join(event(piece) for piece in ["begin ", *pieces, " end"]).replace(b"\n", line_end.encode())
        mask, released, sent = AnswerMask(forms, "text/event-stream", "", ""), b"", stream
        with suppress(WithheldError):
            while sent:
                size = random.randint(1, 200)
                released += mask.feed(sent[:size])
                sent = sent[size:]
            released += mask.end()
        joined = released.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

        assert not any(letters(form.encode()) in letters(text.encode()) for text in texts(joined)), (seed, name)


@pytest.mark.parametrize("kind", ["text", "partial_json"])
@pytest.mark.parametrize("pieces", [(KEY[:40], KEY[40:]), (KEY[:20], "\\", KEY[20:]), tuple(KEY)])
def test_events_of_one_shape_are_searched_like_others(kind: str, pieces: tuple[str, ...]) -> None:
    """After many events that differ in one text alone, escaped or not, a form in these texts is still found."""
    before = [event(text, kind) for text in ("I ", "see", ' "\n', "", "a \\u0041", "it.")] * 3
    escaped = [
        event("A" * 9, kind).replace(b"A" * 9, "".join(f"\\u{ord(one):04x}" for one in piece).encode())
        for piece in pieces
    ]
    for rest in ([event(piece, kind) for piece in pieces], escaped):
        mask = AnswerMask(SecretForms(KEY), "text/event-stream", "", "")
        released: list[bytes] = []
        with pytest.raises(WithheldError, match="contained the key"):
            released.extend(mask.feed(one) for one in [*before, *rest, event("end", kind)])

        assert b"".join(released).startswith(b"".join(before[:-1]))
        assert not any(KEY[14:30] in text for text in texts(b"".join(released)))


@pytest.mark.parametrize(
    "body",
    [
        b"\xef\xbb\xbf" + event(KEY[:30]) + event(KEY[30:]),
        b'{"content": [{"text": "' + KEY[:30].encode() + b'"}, {"text": "' + KEY[30:].encode() + b'"}]}',
    ],
    ids=["byte order mark", "document"],
)
def test_a_stream_that_begins_unlike_one_is_searched_too(body: bytes) -> None:
    """Its first event has the same texts as the next one, and a document that is called a stream is still one."""
    mask = AnswerMask(SecretForms(KEY), "text/event-stream", "", "")

    with pytest.raises(WithheldError, match="contained the key"):
        _ = mask.feed(body) + mask.end()


@pytest.mark.timeout(30)
def test_a_run_of_backslashes_is_searched_in_linear_time() -> None:
    """The search of a text with a million of them ends."""
    forms = SecretForms(KEY)
    text = b"%" + b"\\" * (1 << 20) + b" "

    assert not forms.found(text)
    assert forms.goes_on(text) == 0
    assert forms.mask(text) == (text, "")


def test_the_escapes_of_a_text_do_not_depend_on_the_characters_before_them() -> None:
    """However many backslashes an escape has, and whatever stands before it, the key in it is found."""
    for before in ("", "\\", "%5c", "\\u005c", "x\\\\\\"):
        for count in range(1, 6):
            escaped = "".join("\\" * count + f"u{ord(one):04x}" for one in KEY)

            assert SecretForms(KEY).found(f"{before}{escaped}".encode())


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("kind", "begin", "piece", "end"),
    [("text/event-stream", b"data: ", b"y" * 512, b"\n\n"), ("text/plain", RAW[14:30], b" " * 512, b"end")],
    ids=["event", "text that begins like the key"],
)
def test_what_is_held_for_long_arrives_in_time(kind: str, begin: bytes, piece: bytes, end: bytes) -> None:
    """An event of 4 MiB and a long run of blanks, in small chunks, arrive whole; each chunk costs little time."""
    mask = AnswerMask(SecretForms(KEY), kind, "", "")
    pieces = (4 << 20 if kind == "text/event-stream" else 256 << 10) // len(piece)
    held = mask.feed(begin) + b"".join(mask.feed(piece) for _ in range(pieces))
    released = mask.feed(end) + mask.end()

    assert (held, released) == (b"", begin + piece * pieces + end)


@pytest.mark.parametrize("name", ["plain", "reversed", "hex", "binary", "JSON escapes", "JSON escapes, twice"])
@pytest.mark.parametrize("at", [0, 8_150, 16_300, 24_560, 90_000])
def test_a_form_is_masked_wherever_it_is_in_a_large_text(name: str, at: int) -> None:
    """Nothing else of the text changes."""
    forms, rest = SecretForms(KEY), b"one, two. " * 9_000
    form = FORMS[name].encode()
    masked, _ = forms.mask(rest[:at] + b" " + form + b" " + rest[at:])

    assert not forms.found(masked)
    assert (masked[:at], masked[at + len(form) + 2 :]) == (rest[:at], rest[at:])

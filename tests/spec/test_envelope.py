"""From the bytes of a frame to a message, or to the fault of the frame."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from hutch_shared.errors import HutchError, Reason
from hutch_shared.messages import SessionRef
from hutch_shared.rpc import envelope
from hutch_shared.rpc.envelope import Batch, EnvelopeFault, Notification, Request, Response, parse

LARGE = 1 << 18  # larger frames are scanned instead of decoded


def fault(frame: bytes) -> EnvelopeFault:
    found = parse(frame)
    assert isinstance(found, EnvelopeFault), found
    return found


def padded(frame: bytes, size: int) -> bytes:
    """Return the same request with a large string in its parameters."""
    return frame.replace(b'"params":{', b'"params":{"pad":"' + b'\\\\\\"x' * (size // 5) + b'",')


SIZES = pytest.mark.parametrize("size", [0, LARGE], ids=["usual", "large"])


def test_a_request_keeps_its_parameters_as_bytes() -> None:
    """Parameters are typed later, by the method."""
    found = parse(b'{"jsonrpc":"2.0","method":"m","params":{"a": 1 },"id":"x"}')

    assert found == Request("x", "m", Raw(b'{"a": 1 }'))


def test_blanks_and_order_do_not_matter() -> None:
    """Blanks between tokens and any order of the members are accepted."""
    found = parse(b' { "id" : -7 , "params" : [ ] , "method" : "m\\u00e9" , "jsonrpc" : "2.0" } \r')

    assert found == Request(-7, "mé", Raw(b"[ ]"))


def test_ids_are_strings_and_integers_within_two_to_the_53rd() -> None:
    """Floats, booleans, null and larger integers are refused."""
    for good in ("1", "-9007199254740992", "9007199254740992", '""', '"\\u00e9 "', '"2"'):
        assert isinstance(parse(f'{{"jsonrpc":"2.0","method":"m","id":{good}}}'.encode()), Request), good
    for bad in ("1.0", "1e3", "true", "null", "[]", "{}", "9007199254740993", "-9007199254740993", "1" * 300):
        refused = fault(f'{{"jsonrpc":"2.0","method":"m","id":{bad}}}'.encode())
        assert (refused.reason, refused.id) == (Reason.INVALID_REQUEST, None), bad


@pytest.mark.parametrize(
    "frame",
    [
        b'{"jsonrpc":"2.0","method":"a","method":"b","id":1}',
        b'{"jsonrpc":"2.0","method":"a","id":1,"id":1}',
        b'{"jsonrpc":"2.0","method":"a","id":1,"i\\u0064":2}',
        b'{"jsonrpc":"2.0","jsonrpc":"2.0","method":"a","id":1}',
        b'{"jsonrpc":"2.0","method":"a","params":{},"params":{"x":1}, "id":1}',
        b'{"jsonrpc":"2.0","id":7,"result":1,"result":22}',
    ],
)
def test_a_member_that_is_there_twice_is_refused(frame: bytes) -> None:
    """It is unknown which of the two was meant."""
    assert fault(frame).reason is Reason.INVALID_REQUEST


def test_a_member_that_json_rpc_does_not_know_is_refused() -> None:
    """New data belongs into the parameters, never into the envelope."""
    assert fault(b'{"jsonrpc":"2.0","method":"a","id":1,"extra":0}').reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xef\xbb\xbf{}",
        b'{"jsonrpc":"2.0","method":"m","params":{"a":NaN},"id":1}',
        b'{"jsonrpc":"2.0","method":"m","params":{"a":-Infinity},"id":1}',
        b'{"jsonrpc":"2.0","method":"m","params":{"a":"\\ud800"},"id":1}',
        b'{"jsonrpc":"2.0","method":"m","params":{"a":"\\udc00\\ud800"},"id":1}',
        b'{"jsonrpc":"2.0","method":"m","params":{"\\ud800":1},"id":1}',
        b'{"jsonrpc":"2.0","method":"m","params":{"a":"\xff"},"id":1}',
        b'{"jsonrpc":"2.0","method":"m","params":{"a":"\xed\xa0\x80"},"id":1}',
        b'{"jsonrpc":"2.0","method":"m","params":{"a":"\x01"},"id":1}',
        '{"jsonrpc":"2.0","method":"m"}'.encode("utf-16"),
    ],
)
@SIZES
def test_invalid_json_is_a_parse_error_without_an_id(frame: bytes, size: int) -> None:
    """NaN, lone surrogates and bytes that are not UTF-8 are parse errors in frames of any size."""
    refused = fault(padded(frame, size))

    assert (refused.reason, refused.id) == (Reason.PARSE_ERROR, None)


@pytest.mark.parametrize(("open_", "close"), [("[", "]"), ('{"k":', "}")])
@SIZES
def test_nesting_is_bounded(open_: str, close: str, size: int) -> None:
    """64 levels are accepted; 65 and 100,000 are not."""

    def nested(levels: int) -> bytes:
        inner = open_ * levels + ("1" if close == "}" else "") + close * levels
        return padded(f'{{"jsonrpc":"2.0","method":"m","params":{{"a":{inner}}},"id":5}}'.encode(), size)

    assert isinstance(parse(nested(62)), Request)
    assert fault(nested(63)) == EnvelopeFault(Reason.INVALID_REQUEST, "The message is nested deeper than 64 levels.", 5)
    assert fault(nested(100_000)).reason is Reason.INVALID_REQUEST


@SIZES
def test_brackets_inside_strings_are_no_nesting(size: int) -> None:
    """Brackets in text do not count as nesting."""
    text = json.dumps('[{"\\' * 500)

    frame = padded(f'{{"jsonrpc":"2.0","method":"m","params":{{"a":{text},"b":[1]}},"id":5}}'.encode(), size)

    assert isinstance(parse(frame), Request)


@pytest.mark.parametrize(
    ("number", "good"),
    [
        ("9" * 400, True),
        ("9" * 401, False),
        ("-" + "9" * 5000, False),
        ("1.7976931348623157e308", True),
        ("1e309", False),
        ("1E+0309", False),
        ("-1e400", False),
        ("1e-999", True),
        ("9" * 320 + ".5", False),
        ("0." + "9" * 300, True),
    ],
)
@SIZES
def test_numbers_that_break_readers_are_refused(number: str, good: bool, size: int) -> None:
    """An integer has at most 400 digits, and a float is finite."""
    found = parse(padded(f'{{"jsonrpc":"2.0","method":"m","params":{{"a":[{number}]}},"id":5}}'.encode(), size))

    assert isinstance(found, Request if good else EnvelopeFault)


@SIZES
def test_a_sound_value_is_one_that_a_payload_may_be(size: int) -> None:
    """A writer can check a payload beforehand: grammar, depth, numbers, UTF-8."""
    pad = b'"%b"' % (b"x" * size)
    good = [b"[%b]" % pad, b'{"a":[1,2.5,null,%b]}' % pad, b"[%b,%b]" % (pad, b"9" * envelope.DIGITS_LIMIT)]
    bad = [
        b"[%b" % pad,
        b"[%b]]" % pad,
        b"[%b," % pad + b"[" * 64 + b"]" * 64 + b"]",
        b"[%b,%b]" % (pad, b"9" * (envelope.DIGITS_LIMIT + 1)),
        b'[%b,"\xff"]' % pad,
    ]

    assert [envelope.is_sound(value) for value in good] == [True] * len(good)
    assert [envelope.is_sound(value) for value in bad] == [False] * len(bad)


def test_a_bad_payload_of_a_notification_must_not_be_answered() -> None:
    """A notification is never answered, not even with an error."""
    assert fault(b'{"jsonrpc":"2.0","method":"m","params":{"a":1e999}}').id is UNSET


def test_a_batch_holds_1_to_50_members_that_stand_for_themselves() -> None:
    """A bad member is a fault at its place in the batch; the others are messages."""
    found = parse(b'[{"jsonrpc":"2.0","method":"a"}, 1, {"jsonrpc":"2.0","method":"b","id":1}]')

    assert isinstance(found, Batch)
    assert [type(member) for member in found.members] == [Notification, EnvelopeFault, Request]
    assert fault(b"[]").id is None
    assert isinstance(parse(b"[" + b",".join([b"1"] * 50) + b"]"), Batch)
    assert fault(b"[" + b",".join([b"1"] * 51) + b"]").reason is Reason.INVALID_REQUEST


def test_a_response_has_a_result_or_an_error() -> None:
    """With both, or with a broken error, it is a fault and gets no answer: answers to answers would never end."""
    assert parse(b'{"jsonrpc":"2.0","result":null,"id":1}') == Response(1, Raw(b"null"), None)
    answered = parse(b'{"jsonrpc": "2.0", "error": {"code": -32700, "message": "no"}, "id": null}')
    assert isinstance(answered, Response)
    assert answered.id is None
    for bad in (b'"result":1,"error":{"code":1,"message":""}', b'"error":{"code":"x"}', b'"error":null'):
        assert fault(b'{"jsonrpc":"2.0",' + bad + b',"id":1}').id is UNSET


def test_an_error_comes_back_as_it_was_raised() -> None:
    """Reason, sentence and details survive the wire."""
    sent = HutchError(Reason.ALREADY_SETTLED, "Too late.", decision="deny")

    answered = parse(envelope.encode_error(3, sent))

    assert isinstance(answered, Response)
    assert answered.error is not None
    error = answered.error.as_error()
    assert (error.reason, error.message, error.details) == (sent.reason, sent.message, sent.details)


@pytest.mark.parametrize(
    ("params", "twice"),
    [
        (b'{"a":1,"b":{"a":1}}', False),
        (b'{"a":1,"a":1}', True),
        (b'{"x":[{"a":1,"\\u0061":2}]}', True),
        (b'{"a":"\\":\\":","b":":"}', False),
        (b"{}", False),
        (b"[1,2]", False),
    ],
)
def test_duplicate_keys_are_seen_at_any_depth(params: bytes, twice: bool) -> None:
    """The spelling of a key does not matter, and strings are not searched."""
    assert envelope.has_duplicate_keys(params) is twice


def test_a_payload_with_line_breaks_is_sent_on_one_line() -> None:
    """Raw JSON may come from elsewhere with blanks between its tokens."""
    frame = envelope.encode_request(1, "m", Raw(b'{\n "a": "x\\ny"\n}'))

    assert frame.count(b"\n") == 1
    assert parse(frame) == Request(1, "m", Raw(b'{"a":"x\\ny"}'))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.text(), st.dictionaries(st.text(), JSON, max_size=4), st.text() | st.integers(-(2**53), 2**53), st.booleans())
def test_every_request_is_understood_however_it_is_written(
    method: str, params: dict[str, object], number: str | int, plain: bool
) -> None:
    """Escapes, blanks and the order of members do not change the message."""
    frame = json.dumps(
        {"method": method, "params": params, "id": number, "jsonrpc": "2.0"}, ensure_ascii=plain
    ).encode()

    found = parse(frame)

    assert isinstance(found, Request)
    assert (found.id, found.method) == (number, method)
    assert json.loads(bytes(found.params or b"")) == params


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_frame_raises(frame: bytes) -> None:
    """Any bytes are a message or a fault."""
    assert isinstance(parse(frame), Request | Notification | Response | Batch | EnvelopeFault)


@given(JSON, st.integers(0, 3))
def test_both_ways_to_look_at_a_text_agree(value: object, extra: int) -> None:
    """A large frame is refused for the same faults as a small one."""
    frame = json.dumps({"a": value, "n": [0] * extra}).encode()

    assert envelope._scan(frame) == envelope._decode_and_check(frame)


def test_invalid_text_in_an_answer_becomes_a_replacement_character() -> None:
    """The name of a file or a program's words may hold it; the answer arrives all the same."""
    result = parse(envelope.encode_result(1, {"a\ud83d": ["\ude00"]}))
    error = parse(envelope.encode_error(1, HutchError(Reason.NOT_FOUND, "no caf\udce9", path="caf\udce9")))

    assert isinstance(result, Response)
    assert result.result == Raw(b'{"a\xef\xbf\xbd":["\xef\xbf\xbd"]}')
    assert isinstance(error, Response)
    assert error.error is not None
    assert error.error.message == "no caf\ufffd"


def test_a_request_with_invalid_text_is_not_sent() -> None:
    """The other side would act on another text than the one that was meant."""
    with pytest.raises(UnicodeEncodeError):
        envelope.encode_request(1, "get_session", SessionRef("caf\udce9"))

"""Dialogues: `them` is the peer's frame; the assertions check the events that follow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hutch_shared.errors import HutchError, Reason
from hutch_shared.rpc.conversation import (
    Conversation,
    Event,
    MessageDropped,
    NotificationReceived,
    RequestReceived,
    ResponseReceived,
    SendFrame,
    read_params,
)
from hutch_shared.rpc.envelope import parse
from hutch_shared.rpc.stream import OVERSIZED
from tests.spec.words import ASKED, ASKING, Numbers, Text, ask, line, reason_of, tell


def talk(pending: int = 4) -> Conversation:
    return Conversation(ASKED, ASKING, pending)


def only(events: list[Event]) -> Any:
    [event] = events
    return event


def said(events: list[Event]) -> Any:
    event = only(events)
    assert isinstance(event, SendFrame), event
    assert event.frame.endswith(b"\n")
    return json.loads(event.frame)


def test_an_answer_goes_out_under_the_id_of_its_request() -> None:
    """Answers go out under the ids of their requests; the ids 1 and "1" are different."""
    we = talk()

    first = only(we.receive(ask("echo", 1, {"text": "a"})))
    second = only(we.receive(ask("echo", "1", {"text": "b"})))

    assert isinstance(first, RequestReceived)
    assert isinstance(second, RequestReceived)
    assert json.loads(we.answer(second.ticket, Text("b")) or "") == {
        "jsonrpc": "2.0",
        "result": {"text": "b"},
        "id": "1",
    }
    assert json.loads(we.answer(first.ticket, HutchError(Reason.NOT_FOUND)) or "")["error"]["code"] == -32011
    assert we.in_flight == 0


def test_an_id_in_flight_is_refused_and_the_first_is_answered_once() -> None:
    """The refusal has no id, since that id belongs to the first request."""
    we = talk()
    first = only(we.receive(ask("echo", 1)))

    refusal = said(we.receive(ask("echo", 1)))

    assert refusal["id"] is None
    assert reason_of(refusal) == "invalid_request"
    assert we.answer(first.ticket, Text()) is not None
    assert isinstance(only(we.receive(ask("echo", 1))), RequestReceived)


def test_one_request_too_many_is_overloaded_and_the_others_go_on() -> None:
    """The request beyond the limit gets `overloaded` under its own id."""
    we = talk(pending=2)
    asked = [only(we.receive(ask("echo", number))) for number in (1, 2)]

    refusal = said(we.receive(ask("echo", 3)))

    assert (refusal["id"], reason_of(refusal)) == (3, "overloaded")
    assert we.answer(asked[0].ticket, Text()) is not None
    assert isinstance(only(we.receive(ask("echo", 3))), RequestReceived)


def test_a_notification_is_typed_and_never_answered() -> None:
    """Unknown notifications, those with bad parameters, and requests without an id are dropped."""
    we = talk()

    told = only(we.receive(tell("update", {"a": 7})))

    assert (told.method.name, told.params.a) == ("update", 7)
    for bad in (
        tell("nonsense"),
        tell("update", {"a": "x"}),
        tell("update", {"a": 1, "b": {"c": 1}}),
        tell("echo", {"text": "a"}),
        b'{"jsonrpc":"2.0","method":"update","params":{"a":1,"a":2}}',
    ):
        assert isinstance(only(we.receive(bad)), MessageDropped), bad


@pytest.mark.parametrize("spaced", [False, True], ids=["as our peers write it", "as others do"])
def test_a_hot_notification_means_the_same_however_it_is_written(spaced: bool) -> None:
    """The fast decoder accepts exactly what the general one accepts."""
    we = talk()
    compact = b'{"jsonrpc":"2.0","method":"stream","params":{"text":"x"}}'
    for frame, good in (
        (compact, True),
        (compact.replace(b'"x"', b'"\xff"'), False),
        (compact.replace(b'"x"', b"1"), False),
        (compact.replace(b'"x"', b'"x","deep":' + b"[" * 70 + b"]" * 70), False),
        (compact.replace(b'"x"}', b'"x"},"params":{"text":"y"}'), False),
        (compact[:-1], False),
        (compact + b"}", False),
    ):
        event = only(we.receive(frame.replace(b":", b" : ") if spaced else frame))

        assert isinstance(event, NotificationReceived) is good, frame


def test_a_hot_method_with_an_id_is_no_notification() -> None:
    """It is a request; the dispatcher refuses it later."""
    we = talk()

    assert isinstance(
        only(we.receive(b'{"jsonrpc":"2.0","method":"stream","params":{"text":"x"},"id":1}')), RequestReceived
    )


def test_a_batch_is_answered_as_one_when_its_last_member_is() -> None:
    """The answer to a batch contains the refusals of its members, and nothing for notifications."""
    we = talk(pending=2)
    batch = line(
        [
            json.loads(ask("echo", 1)),
            json.loads(tell("update", {"a": 1})),
            {"foo": "boo"},
            json.loads(ask("echo", 2)),
            json.loads(ask("echo", 3)),
        ]
    )

    first, told, second = we.receive(batch)

    assert isinstance(first, RequestReceived)
    assert isinstance(told, NotificationReceived)
    assert isinstance(second, RequestReceived)
    assert we.answer(second.ticket, Text("2")) is None
    answers = json.loads(we.answer(first.ticket, Text("1")) or "")
    assert sorted((answer["id"] or 0, "error" in answer) for answer in answers) == [
        (0, True),
        (1, False),
        (2, False),
        (3, True),
    ]


def test_a_batch_of_notifications_is_not_answered() -> None:
    """Not even an empty array is sent."""
    assert [type(event) for event in talk().receive(line([json.loads(tell("update"))] * 2))] == [
        NotificationReceived,
        NotificationReceived,
    ]


def test_a_call_gets_its_answer_typed() -> None:
    """The conversation chooses the ids of calls, and results have the types of the table."""
    we = talk()
    number, frame = we.call("echo", Text("hi"))

    assert json.loads(frame) == json.loads(ask("echo", number, {"text": "hi"}))
    answered = only(we.receive(line({"jsonrpc": "2.0", "result": {"text": "hi"}, "id": number})))
    assert answered == ResponseReceived(number, Text("hi"))


def test_a_call_gets_the_error_of_the_other_side() -> None:
    """A reason that is unknown here falls back to its code."""
    we = talk()
    number, _ = we.call("echo", Text())

    answered = only(
        we.receive(line({"jsonrpc": "2.0", "error": {"code": 7, "message": "No.", "data": {"reason": "new"}}, "id": 1}))
    )

    assert answered.id == number
    assert repr(answered.outcome) == "<HutchError internal: No.>"


def test_an_answer_that_has_the_wrong_shape_is_an_error_of_the_call() -> None:
    """Its caller gets the error; other calls are unaffected."""
    we = talk()
    number, _ = we.call("echo", Text())

    answered = only(we.receive(line({"jsonrpc": "2.0", "result": {"text": 5}, "id": number})))

    assert answered.outcome.reason is Reason.INTERNAL


def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    """The call was abandoned, answered before, or never made."""
    we = talk()
    number, _ = we.call("echo", Text())
    we.forget(number)

    for late in (number, 99, "x", None):
        assert isinstance(only(we.receive(line({"jsonrpc": "2.0", "result": {}, "id": late}))), MessageDropped)


def test_calls_in_flight_are_bounded() -> None:
    """One more is refused to the caller at once, until one is answered or given up."""
    we = talk(pending=1)
    number, _ = we.call("echo", Text())

    with pytest.raises(HutchError) as caught:
        we.call("echo", Text())

    assert caught.value.reason is Reason.OVERLOADED
    we.forget(number)
    assert we.call("echo", Text())[0] == number + 1


def test_both_sides_may_use_the_same_id_at_once() -> None:
    """The ids of the two directions are independent."""
    we = talk()
    number, _ = we.call("echo", Text())

    asked = only(we.receive(ask("echo", number)))

    assert isinstance(asked, RequestReceived)
    assert isinstance(only(we.receive(line({"jsonrpc": "2.0", "result": {}, "id": number}))), ResponseReceived)
    assert we.answer(asked.ticket, Text()) is not None


def test_a_bad_frame_is_reported_and_disturbs_nothing() -> None:
    """Requests in flight stay in flight."""
    we = talk()
    asked = only(we.receive(ask("echo", 1)))
    number, _ = we.call("echo", Text())

    assert reason_of(said(we.receive(b"{nonsense"))) == "parse_error"
    assert reason_of(said(we.receive(OVERSIZED))) == "frame_too_large"
    assert reason_of(said(we.receive(b'{"jsonrpc":"1.0","method":"echo","id":9}'))) == "invalid_request"

    assert we.answer(asked.ticket, Text()) is not None
    assert isinstance(only(we.receive(line({"jsonrpc": "2.0", "result": {}, "id": number}))), ResponseReceived)


def test_an_outcome_without_a_json_form_leaves_the_ticket_good() -> None:
    """The ticket stays valid, so that the request can be answered with an error."""
    we = talk()
    asked = only(we.receive(ask("echo", 1)))

    with pytest.raises(TypeError):
        we.answer(asked.ticket, object())

    assert we.answer(asked.ticket, HutchError(Reason.INTERNAL)) is not None


@pytest.mark.parametrize("params", [{"minuend": 5, "subtrahend": 3}, [5, 3]])
def test_parameters_come_by_name_or_by_position(params: Any) -> None:
    """Both are allowed by the specification."""
    request = parse(ask("subtract", 1, params))

    assert read_params(ASKED["subtract"], request.params) == Numbers(5, 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("params", [{"minuend": 5}, [5], [5, 3, 1], {"minuend": "5", "subtrahend": 3}, None])
def test_parameters_that_do_not_fit_are_refused(params: Any) -> None:
    """Parameters are refused if one is missing, one is too many, or a type is wrong."""
    request = parse(ask("subtract", 1, params))

    with pytest.raises(HutchError) as caught:
        read_params(ASKED["subtract"], request.params)  # type: ignore[union-attr]
    assert caught.value.reason is Reason.INVALID_PARAMS

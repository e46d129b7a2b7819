from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from hutch_client.untrusted import escaped_json, one_line, plain, visible

_NASTY = st.text(st.sampled_from("\x1b\x9b\x9d\x07\x9c[]();0m?HJ\\\r\n\tab\u202e\u2066\x00\x7f") | st.characters())


def _is_harmless(text: str) -> bool:
    forbidden = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    return all((ch >= " " or ch in "\n\t") and not "\x7f" <= ch <= "\x9f" and ch not in forbidden for ch in text)


@given(_NASTY)
def test_nothing_that_drives_a_terminal_comes_out(text: str) -> None:
    """This holds for any text in any pieces."""
    assert _is_harmless(plain(text))
    assert _is_harmless(visible(text))
    assert _is_harmless(one_line(text, 20))
    assert "\n" not in one_line(text)


@given(_NASTY)
def test_json_stays_the_same_value(text: str) -> None:
    """Escapes in a JSON text are only another spelling."""
    spelled = escaped_json(json.dumps({"text": text}, ensure_ascii=False))

    assert json.loads(spelled) == {"text": text}
    assert _is_harmless(spelled)


def test_prose_loses_whole_sequences() -> None:
    """Colours, titles, links and their C1 forms are removed with everything in them."""
    assert plain("a\x1b[1;31mb\x1b[0m\x1b]0;title\x07c\x9b2Jd\x1b]8;;http://x\x1b\\e\x1bcf") == "abcdef"


def test_a_sequence_without_an_end_hides_nothing() -> None:
    """Text after an unfinished title stays readable."""
    assert plain("\x1b]0;rm -rf /") == "0;rm -rf /"


def test_visible_text_shows_its_control_characters() -> None:
    """No control sequence can hide a part of a command."""
    assert visible("ls\x1b]0;\x07; rm\u202e x\r") == "ls\\x1b]0;\\x07; rm\\u202e x\\r"


def test_a_line_is_cut_with_an_ellipsis() -> None:
    """Only a line longer than the width is cut."""
    assert (one_line("a b\n c", 5), one_line("abcdef", 5)) == ("a b c", "abcd…")

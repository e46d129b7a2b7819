"""Known secrets are found and masked in their usual encodings."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch_daemon.redaction import MASK, KnownSecrets, Splits

KEY = "sk-ant-api03-Xq9/Zr7Lm2-Tb5_Vn8Kd4Hs6Jw1Pf3Gy0Cu"
ODD = 'odd"key\\with+signs&more/0123456789'


def known(*secrets: str) -> KnownSecrets:
    made = KnownSecrets()
    for number, secret in enumerate(secrets):
        made.learn(f"k-{number}", secret)
    return made


@pytest.mark.parametrize("secret", [KEY, ODD, "short-key-1"])
@pytest.mark.parametrize("before", ["", "a", "ab"])
def test_a_secret_is_masked_in_every_form(secret: str, before: str) -> None:
    """Plain, reversed, hexadecimal, base64 at any offset of a longer text, URL and JSON encoding."""
    raw = secret.encode()
    longer = before.encode() + raw + b" and more"
    said = {
        "plain": secret,
        "reversed": secret[::-1],
        "hex": raw.hex(),
        "HEX": raw.hex().upper(),
        "base64": base64.b64encode(longer).decode(),
        "urlsafe": base64.urlsafe_b64encode(longer).decode(),
        "URL": f"https://evil.invalid/?k={quote(secret, safe='')}",
        "JSON": json.dumps(secret),
        "JSON in JSON": json.dumps(json.dumps({"key": secret})),
    }
    masked = {form: known(secret).mask(f"<{text}>".encode()) for form, text in said.items()}

    assert {form for form, one in masked.items() if one is None or not one.whole or MASK not in one.text} == set()
    assert all(one is not None and one.text[:1] == b"<" and one.text[-1:] == b">" for one in masked.values())


def test_a_secret_broken_over_lines_is_masked() -> None:
    """base64 breaks lines: the secret is masked across them, also in JSON and in JSON inside JSON."""
    wrapped = base64.encodebytes(b"a" * 40 + KEY.encode() + b"b" * 20).decode()
    said = [wrapped, json.dumps(wrapped), json.dumps(json.dumps({"key": wrapped}))]
    masked = [known(KEY).mask(text.encode()) for text in said]

    assert [(one.whole, one.key, MASK in one.text) for one in masked if one is not None] == [(True, "k-0", True)] * 3
    assert masked[1] is not None
    assert isinstance(json.loads(masked[1].text), str)


def test_a_cut_secret_is_noticed_but_not_masked() -> None:
    """Where its rest is cannot be known, so the text is not whole; less than a half of it does not count."""
    found = known(KEY).mask(KEY[:40].encode())

    assert found is not None
    assert (found.whole, found.key) == (False, "k-0")
    assert known(KEY).mask(KEY[:26].encode()) is None


def test_the_common_prefix_of_keys_is_not_a_secret() -> None:
    """A text about keys is not withheld, nor is random text."""
    held = known(KEY)

    assert held.mask(b"Anthropic's keys begin with sk-ant-api03- and go on.") is None
    assert held.find(b"0123456789abcdef" * 1000) is None


def test_several_secrets_are_masked_at_once() -> None:
    """The text contains none of them afterwards, and texts for users are masked alike."""
    text = f"first {KEY}, then {ODD}"

    assert known(KEY, ODD).mask_text(text) == f"first {MASK.decode()}, then {MASK.decode()}"
    assert known(KEY).mask_text(f"cut: {KEY[:-3]}") == MASK.decode()
    assert known(KEY).mask_text("nothing here") == "nothing here"


def test_the_secrets_do_not_show() -> None:
    """The masker's repr shows only their number; it keeps a limited number and ignores short words."""
    secrets = [f"{number:04}" * 8 for number in range(100)]
    held = known(*secrets, "short")

    assert repr(held) == "<KnownSecrets 64>"
    assert held.find(secrets[1].encode()) is None
    assert held.find(secrets[99].encode()) == "k-99"


@given(st.lists(st.integers(1, 12), min_size=1, max_size=60), st.text("ab \n", max_size=30))
def test_a_secret_in_pieces_is_noticed(cuts: list[int], before: str) -> None:
    """Neither the size of the pieces nor other streams matter. Each half of the secret may be noticed."""
    splits = Splits(known(KEY))
    text, heard = before + KEY + " end", []
    for size in [*cuts, *[7] * 100]:
        heard += [splits.feed("one", text[:size]), splits.feed("two", "harmless")]
        text = text[size:]

    assert [key for key in heard if key] in (["k-0"], ["k-0", "k-0"])


def test_idle_streams_are_forgotten() -> None:
    """The memory of pieces is bounded."""
    splits = Splits(known(KEY))
    splits.feed("first", KEY[:24])
    for number in range(100):
        splits.feed(number, "x")

    assert splits.feed("first", KEY[24:28]) is None

"""The only errors that may cross a process boundary: a stable reason, its JSON-RPC code, a sentence for the reader.

Any other exception crosses as `internal`, without its text; its id leads to the details in the log.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

__all__ = ["HutchError", "Reason"]


class Reason(Enum):
    """A stable word (`error.data.reason`), its JSON-RPC code, and its default sentence."""

    code: int
    sentence: str

    def __new__(cls, word: str, code: int, sentence: str) -> Reason:
        """Make a member whose value is only the word."""
        member = object.__new__(cls)
        member._value_ = word
        member.code = code
        member.sentence = sentence
        return member

    # the words of JSON-RPC itself
    PARSE_ERROR = ("parse_error", -32700, "The line is not JSON that Hutch accepts.")
    INVALID_REQUEST = ("invalid_request", -32600, "The message is not a JSON-RPC 2.0 request.")
    METHOD_NOT_FOUND = ("method_not_found", -32601, "There is no such method.")
    INVALID_PARAMS = ("invalid_params", -32602, "The parameters do not fit the method.")
    INTERNAL = ("internal", -32603, "Hutch met an internal error; its log has the details under this id.")
    # transport
    FRAME_TOO_LARGE = ("frame_too_large", -32001, "The message is larger than this socket accepts.")
    OVERLOADED = ("overloaded", -32002, "Too many requests are in flight; try again in a moment.")
    TIMED_OUT = ("timed_out", -32003, "No answer came in time.")
    CONNECTION_LOST = ("connection_lost", -32004, "The connection was lost before the answer came.")
    PROTOCOL_MISMATCH = ("protocol_mismatch", -32005, "The two sides speak different protocol versions; update one.")
    SHUTTING_DOWN = ("shutting_down", -32006, "hutchd is stopping and takes no new work.")
    # rights of the caller
    NOT_ALLOWED = ("not_allowed", -32010, "You may not do this.")
    NOT_FOUND = ("not_found", -32011, "It does not exist, or it is not yours.")
    HELLO_FIRST = ("hello_first", -32012, "Say hello first.")
    INSIDER = ("insider", -32013, "A process inside a session may not change anything through the client socket.")
    TOKEN_UNKNOWN = ("token_unknown", -32014, "The token is not known here.")
    TOKEN_EXPIRED = ("token_expired", -32015, "The token has expired or was used up.")
    LEASE_LOST = ("lease_lost", -32016, "Another executor serves this session now.")
    # records and their states
    WRONG_STATE = ("wrong_state", -32020, "Its state does not allow this.")
    ALREADY_SETTLED = ("already_settled", -32021, "It was settled before; the error contains the final decision.")
    CONFLICT = ("conflict", -32022, "The same key was used before with other content.")
    SESSION_CLOSED = ("session_closed", -32023, "The session is closed.")
    COMPACTED = ("compacted", -32024, "Events this old are no longer kept; the error contains the oldest one.")
    JOURNAL_REPLACED = ("journal_replaced", -32025, "The cursor belongs to another journal; start from the beginning.")
    # missing or failing parts
    STORE_UNAVAILABLE = ("store_unavailable", -32030, "The store cannot write; nothing was accepted.")
    AGENT_UNAVAILABLE = ("agent_unavailable", -32031, "The agent cannot be started here.")
    ISOLATION_UNAVAILABLE = ("isolation_unavailable", -32032, "The requested isolation is not available here.")
    NO_KEY = ("no_key", -32033, "There is no key for this provider; add one with `hutch key add`.")
    KEY_UNREADABLE = ("key_unreadable", -32034, "The stored key cannot be opened with this master key.")
    EXECUTOR_LOST = ("executor_lost", -32035, "The executor went away.")
    # mistakes in the user's text
    INVALID_RULE = ("invalid_rule", -32040, "The rule cannot be read.")
    POLICY_FORBIDS = ("policy_forbids", -32041, "The host's policy forbids this.")

    @property
    def word(self) -> str:
        """The stable word, as on the wire."""
        return str(self.value)


class HutchError(Exception):
    """An expected error. `str()` is a sentence for its reader; `details` are plain JSON values."""

    def __init__(self, reason: Reason, message: str | None = None, **details: Any) -> None:
        """Use `message`, or else the default sentence of the reason."""
        self.reason = reason
        self.message = message or reason.sentence
        self.details = details
        super().__init__(self.message)

    def __repr__(self) -> str:
        return f"<HutchError {self.reason.word}: {self.message}>"

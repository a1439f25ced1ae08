"""What a scripted answer may be instead of an answer: the faults that endpoints show.

Malformed arguments need no fault: give a `ScriptedCall` its arguments as text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from spectool_core.errors import ConfigurationError

__all__ = ["DroppedConnection", "EmptyChoices", "Fault", "Hang", "HttpError", "TruncatedAnswer"]

Moment: TypeAlias = Literal["before_headers", "mid_body"]


@dataclass(frozen=True, slots=True)
class HttpError:
    """An HTTP error in OpenAI's format instead of an answer.

    Args:
        status: the HTTP status, 400 to 599.
        retry_after_s: sent as Retry-After in whole seconds, rounded up (RFC 9110, 10.2.3), and exactly as
            `retry-after-ms`, which OpenAI's client prefers; None sends neither.
        message: the text of the error.
        after_s: how long after the request the error comes.

    Raises:
        ConfigurationError: the status is no error status.
    """

    status: int = 500
    retry_after_s: float | None = None
    message: str = "scripted error"
    after_s: float = 0.0

    def __post_init__(self) -> None:
        if not 400 <= self.status <= 599:
            raise ConfigurationError("status", self.status, "400 to 599")


@dataclass(frozen=True, slots=True)
class DroppedConnection:
    """The connection is closed before the answer's headers, or when half of its tokens are sent."""

    when: Moment = "before_headers"


@dataclass(frozen=True, slots=True)
class TruncatedAnswer:
    """Half an answer that is whole as HTTP: a stream without finish reason and `[DONE]`, or half a JSON."""


@dataclass(frozen=True, slots=True)
class EmptyChoices:
    """A well-formed answer without any choice."""


@dataclass(frozen=True, slots=True)
class Hang:
    """No answer, or half of one and then nothing, until the client leaves."""

    when: Moment = "before_headers"


Fault: TypeAlias = HttpError | DroppedConnection | TruncatedAnswer | EmptyChoices | Hang

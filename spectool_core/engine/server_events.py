"""A stream of server-sent events cut into single events, each with the bytes that it came in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from spectool_core.vllm.wire import DONE

__all__ = ["EventSplitter", "MalformedStreamError", "ServerEvent"]


# Not `splitlines`: JSON need not escape U+2028 and its like, which it takes for line ends too.
_LINE_END = re.compile(r"\r\n|\n|\r")


class MalformedStreamError(Exception):
    """The engine sent what the contract does not know; never shown to users."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event.

    Args:
        name: the value of its `event` field; empty where it has none.
        data: its `data` fields, joined by line ends; empty for a comment, which keeps a connection alive.
        raw: its bytes, with the empty line that ends it.
    """

    name: str
    data: str
    raw: bytes

    @property
    def is_done(self) -> bool:
        """Whether it is the end of the response."""
        return not self.name and self.data.startswith(DONE)

    def parsed(self) -> dict[str, Any]:
        """The data as a JSON object. Raises MalformedStreamError."""
        try:
            value = json.loads(self.data)
        except (ValueError, RecursionError) as error:
            raise MalformedStreamError(f"event {self.name!r} holds no JSON") from error
        if not isinstance(value, dict):
            raise MalformedStreamError(f"event {self.name!r} holds no JSON object")
        return value


class EventSplitter:
    """Takes bytes as they come and gives out whole events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[ServerEvent]:
        """The events that `received` completes."""
        held = self._rest + received
        events: list[ServerEvent] = []
        while (end := _end_of_event(held)) is not None:
            events.append(_event(held[:end]))
            held = held[end:]
        self._rest = held
        return events

    @property
    def rest(self) -> bytes:
        """The beginning of an event that has not ended."""
        return self._rest


def _end_of_event(held: bytes) -> int | None:
    ends = [at + len(blank) for blank in (b"\n\n", b"\r\n\r\n") if (at := held.find(blank)) >= 0]
    return min(ends, default=None)


def _event(raw: bytes) -> ServerEvent:
    name, data = "", []
    for line in _LINE_END.split(raw.decode("utf-8", "replace")):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
    return ServerEvent(name, "\n".join(data), raw)

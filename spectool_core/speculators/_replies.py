"""Chat completions as they arrive, whole or as a stream, read into tool calls. No IO, and no input makes it raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from spectool_core.calls import ToolCall
from spectool_core.speculators._choices import (
    BrokenDeltaError,
    CallReader,
    ChoiceReader,
    is_integer,
    list_of_objects,
)
from spectool_core.speculators._events import EventLines

__all__ = ["BodyReply", "Reply", "StreamReply", "Usage"]

_CUT_SHORT = frozenset({"length", "content_filter"})

# As at OpenAI.
_MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that one request has cost, as the server counted them."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


class Reply(Protocol):
    """What the server has answered so far."""

    @property
    def is_complete(self) -> bool:
        """Whether this is a whole chat completion, with nothing more to come."""
        ...

    @property
    def num_choices(self) -> int:
        """Distinct choices seen."""
        ...

    @property
    def num_malformed_calls(self) -> int:
        """What was meant as a tool call and is none."""
        ...

    @property
    def usage(self) -> Usage:
        """Tokens, as far as the server has told."""
        ...

    def feed(self, data: bytes) -> list[ToolCall]:
        """Take the next bytes of the body and return the calls that they complete."""
        ...

    def end(self) -> list[ToolCall]:
        """Take note that the body has ended and return the calls that this completes."""
        ...


class BodyReply:
    """A reply that is one `chat.completion` object.

    Args:
        new_reader: makes what reads the calls out of one choice.
    """

    def __init__(self, new_reader: Callable[[], ChoiceReader] = CallReader) -> None:
        self._new_reader = new_reader
        self._body = bytearray()
        self.is_complete = False
        self.num_choices = 0
        self.num_malformed_calls = 0
        self.usage = Usage()

    def feed(self, data: bytes) -> list[ToolCall]:
        """Keep the bytes: nothing is known before the end."""
        self._body += data
        return []

    def end(self) -> list[ToolCall]:
        """Return the calls of all choices."""
        completion = _parsed(bytes(self._body))
        choices = completion.get("choices")
        if not isinstance(choices, list) or not choices:
            return []
        self.is_complete = True
        self.num_choices = len(choices)
        self.usage = _usage(completion) or self.usage
        return [call for choice in choices for call in self._calls(choice)]

    def _calls(self, choice: Any) -> list[ToolCall]:
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            return []
        reader = self._new_reader()
        calls = reader.read_message(message) + _settled(reader, choice.get("finish_reason"))
        self.num_malformed_calls += reader.num_malformed
        return calls


class StreamReply:
    """A reply that is a stream of `chat.completion.chunk` events, ended by `[DONE]`.

    After an event that is no chunk nothing more is completed, since a piece of some call may be missing.

    Args:
        new_reader: makes what reads the calls out of one choice.
    """

    def __init__(self, new_reader: Callable[[], ChoiceReader] = CallReader) -> None:
        self._new_reader = new_reader
        self._events = EventLines()
        self._choices: dict[int, ChoiceReader] = {}
        self._ended: set[int] = set()
        self._is_done = False
        self._is_broken = False
        self.usage = Usage()

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended and so has the stream."""
        return self._is_done and bool(self._choices) and len(self._ended) == len(self._choices)

    @property
    def num_choices(self) -> int:
        """Distinct choices seen."""
        return len(self._choices)

    @property
    def num_malformed_calls(self) -> int:
        """What was meant as a tool call and is none."""
        return sum(reader.num_malformed for reader in self._choices.values())

    def feed(self, data: bytes) -> list[ToolCall]:
        """Return the calls that these bytes complete, in the order of the stream."""
        calls: list[ToolCall] = []
        try:
            for event in self._events.feed(data):
                self._read(event, calls)
        except BrokenDeltaError:
            self._is_broken = True
        return calls

    def end(self) -> list[ToolCall]:
        """Return nothing: a call that neither a finish reason nor `[DONE]` has ended was cut off."""
        self._is_done = not self._is_broken
        return []

    def _read(self, event: bytes, calls: list[ToolCall]) -> None:
        if self._is_done or self._is_broken:
            return
        if event.strip() == b"[DONE]":
            self._is_done = True
            for index in self._choices:
                self._end_choice(index, None, calls)
            return
        chunk = _parsed(event)
        if not chunk or chunk.get("error"):
            raise BrokenDeltaError
        self.usage = _usage(chunk) or self.usage
        for position, choice in enumerate(list_of_objects(chunk.get("choices"))):
            self._read_choice(choice, position, calls)

    def _read_choice(self, choice: dict[str, Any], position: int, calls: list[ToolCall]) -> None:
        given = choice.get("index")
        index = given if is_integer(given) else position
        reader = self._choices.get(index)
        if reader is None:
            if len(self._choices) == _MAX_CHOICES:
                raise BrokenDeltaError
            reader = self._choices[index] = self._new_reader()
        if index in self._ended:
            return
        delta = choice.get("delta")
        if isinstance(delta, dict):
            calls += reader.read_delta(delta)
        if choice.get("finish_reason"):
            self._end_choice(index, choice["finish_reason"], calls)

    def _end_choice(self, index: int, finish_reason: Any, calls: list[ToolCall]) -> None:
        if index not in self._ended:
            self._ended.add(index)
            calls += _settled(self._choices[index], finish_reason)


def _settled(reader: ChoiceReader, finish_reason: Any) -> list[ToolCall]:
    """End a choice: what its finish reason says of what has not come to its own end."""
    if isinstance(finish_reason, str) and finish_reason in _CUT_SHORT:
        reader.cut()
        return []
    return reader.finish()


def _parsed(text: bytes) -> dict[str, Any]:
    """The JSON object in `text`; empty where there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _usage(completion: dict[str, Any]) -> Usage | None:
    usage = completion.get("usage")
    if not isinstance(usage, dict):
        return None
    return Usage(_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")))


def _count(value: Any) -> int:
    return max(0, value) if is_integer(value) else 0

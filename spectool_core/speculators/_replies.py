"""Chat completions as they arrive, whole or as a stream, read into tool calls. No IO, and no input makes it raise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from spectool_core.calls import ToolCall
from spectool_core.speculators._assembly import CallAssembler, CallPiece
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
        """Tool calls that were no name with a JSON object of arguments."""
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
    """A reply that is one `chat.completion` object."""

    def __init__(self) -> None:
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
        entries = message.get("tool_calls") if isinstance(message, dict) else None
        if not isinstance(entries, list):
            return []
        assembler = CallAssembler()
        calls = []
        for position, entry in enumerate(entries):
            piece = _piece(entry, position)
            if piece is None:
                self.num_malformed_calls += 1
            elif (call := assembler.feed(piece)) is not None:
                calls.append(call)
        calls += _settled(assembler, choice.get("finish_reason"))
        self.num_malformed_calls += assembler.num_malformed
        return calls


class _BrokenStreamError(Exception):
    """An event of the stream is no chunk, so what follows cannot be trusted."""


class StreamReply:
    """A reply that is a stream of `chat.completion.chunk` events, ended by `[DONE]`.

    After an event that is no chunk nothing more is completed, since a piece of some call may be missing.
    """

    def __init__(self) -> None:
        self._events = EventLines()
        self._choices: dict[int, CallAssembler] = {}
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
        """Tool calls that were no name with a JSON object of arguments."""
        return sum(assembler.num_malformed for assembler in self._choices.values())

    def feed(self, data: bytes) -> list[ToolCall]:
        """Return the calls that these bytes complete, in the order of the stream."""
        calls: list[ToolCall] = []
        try:
            for event in self._events.feed(data):
                self._read(event, calls)
        except _BrokenStreamError:
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
            raise _BrokenStreamError
        self.usage = _usage(chunk) or self.usage
        for position, choice in enumerate(_list_of_objects(chunk.get("choices"))):
            self._read_choice(choice, position, calls)

    def _read_choice(self, choice: dict[str, Any], position: int, calls: list[ToolCall]) -> None:
        given = choice.get("index")
        index = given if _is_integer(given) else position
        assembler = self._choices.get(index)
        if assembler is None:
            if len(self._choices) == _MAX_CHOICES:
                raise _BrokenStreamError
            assembler = self._choices[index] = CallAssembler()
        if index in self._ended:
            return
        delta = choice.get("delta")
        for entry in _list_of_objects(delta.get("tool_calls") if isinstance(delta, dict) else None):
            piece = _piece(entry, None)
            if piece is None:
                raise _BrokenStreamError
            if (call := assembler.feed(piece)) is not None:
                calls.append(call)
        if choice.get("finish_reason"):
            self._end_choice(index, choice["finish_reason"], calls)

    def _end_choice(self, index: int, finish_reason: Any, calls: list[ToolCall]) -> None:
        if index not in self._ended:
            self._ended.add(index)
            calls += _settled(self._choices[index], finish_reason)


def _settled(assembler: CallAssembler, finish_reason: Any) -> list[ToolCall]:
    """End a choice: what its finish reason says of the calls that have not closed."""
    if isinstance(finish_reason, str) and finish_reason in _CUT_SHORT:
        assembler.cut()
        return []
    return assembler.finish()


def _parsed(text: bytes) -> dict[str, Any]:
    """The JSON object in `text`; empty where there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _list_of_objects(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise _BrokenStreamError
    return value


def _piece(entry: Any, index: int | None) -> CallPiece | None:
    """One entry of `tool_calls`; None where it is no call of a function. `index` is used where it is given."""
    function = entry.get("function", {}) if isinstance(entry, dict) else None
    if not isinstance(function, dict):
        return None
    if index is None and _is_integer(entry.get("index")):
        index = entry["index"]
    try:
        arguments = _arguments_text(function.get("arguments"))
    except RecursionError:
        return None
    return CallPiece(index, _text(entry.get("id")), _text(function.get("name")), arguments)


def _arguments_text(arguments: Any) -> str:
    """Arguments as the text that they should have been: some servers send the object itself."""
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    return json.dumps(arguments)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _usage(completion: dict[str, Any]) -> Usage | None:
    usage = completion.get("usage")
    if not isinstance(usage, dict):
        return None
    return Usage(_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")))


def _count(value: Any) -> int:
    return max(0, value) if _is_integer(value) else 0

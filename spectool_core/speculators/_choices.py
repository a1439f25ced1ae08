"""One choice of a chat completion, read into tool calls: out of its `tool_calls`, or out of its text. No IO."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeGuard

from spectool_core.calls import Prompt, ToolCall
from spectool_core.speculators._assembly import CallAssembler, CallPiece

__all__ = [
    "BrokenDeltaError",
    "CallReader",
    "ChoiceReader",
    "TextReader",
    "is_integer",
    "list_of_objects",
    "reader_for",
]


class BrokenDeltaError(Exception):
    """A piece of the stream is not what it should be, so what follows cannot be trusted."""


class ChoiceReader(Protocol):
    """Reads the calls of one choice, which comes as one message or as a number of deltas, and then ends."""

    @property
    def num_malformed(self) -> int:
        """What was meant as a tool call and is none."""
        ...

    def read_message(self, message: dict[str, Any]) -> list[ToolCall]:
        """Take the whole `message` and return the calls that need no end."""
        ...

    def read_delta(self, delta: dict[str, Any]) -> list[ToolCall]:
        """Take the next `delta` and return the calls that it completes.

        Raises:
            BrokenDeltaError: this is no delta.
        """
        ...

    def finish(self) -> list[ToolCall]:
        """Return the calls that are left: the server has said that the choice ended by itself."""
        ...

    def cut(self) -> None:
        """Give up what is left: the server has said that it cut the choice short."""
        ...


class CallReader:
    """Reads `tool_calls`: each call is complete when its arguments have closed; see `CallAssembler`.

    Args:
        only_first: only the choice's first call counts.
    """

    def __init__(self, *, only_first: bool = False) -> None:
        self._assembler = CallAssembler(only_first=only_first)
        self._num_unreadable = 0

    @property
    def num_malformed(self) -> int:
        """Calls that were no name with a JSON object of arguments."""
        return self._num_unreadable + self._assembler.num_malformed

    def read_message(self, message: dict[str, Any]) -> list[ToolCall]:
        """Take all calls; what is none takes no other with it."""
        entries = message.get("tool_calls")
        if not isinstance(entries, list):
            return []
        pieces = [piece for position, entry in enumerate(entries) if (piece := _piece(entry, position)) is not None]
        self._num_unreadable += len(entries) - len(pieces)
        return self._completed(pieces)

    def read_delta(self, delta: dict[str, Any]) -> list[ToolCall]:
        """Take the pieces of calls that the delta brings."""
        entries = list_of_objects(delta.get("tool_calls"))
        pieces = [piece for entry in entries if (piece := _piece(entry, None)) is not None]
        if len(pieces) < len(entries):
            raise BrokenDeltaError
        return self._completed(pieces)

    def finish(self) -> list[ToolCall]:
        """Return the calls that waited for the end."""
        return self._assembler.finish()

    def cut(self) -> None:
        """Give up the calls that have not closed."""
        self._assembler.cut()

    def _completed(self, pieces: Sequence[CallPiece]) -> list[ToolCall]:
        return [call for piece in pieces if (call := self._assembler.feed(piece)) is not None]


class TextReader:
    """Reads the text, which says what it says only when it is whole.

    Args:
        read_text: finds the calls in the whole text; where it raises there is none.
        only_first: only the choice's first call counts.
    """

    def __init__(self, read_text: Callable[[str], Sequence[ToolCall]], *, only_first: bool = False) -> None:
        self._read_text = read_text
        self._only_first = only_first
        self._pieces: list[str] = []
        self.num_malformed = 0

    def read_message(self, message: dict[str, Any]) -> list[ToolCall]:
        """Take the whole text, if it is one."""
        try:
            return self.read_delta(message)
        except BrokenDeltaError:
            self.num_malformed += 1
            return []

    def read_delta(self, delta: dict[str, Any]) -> list[ToolCall]:
        """Take the next piece of the text."""
        self._pieces.append(_content_text(delta.get("content")))
        return []

    def finish(self) -> list[ToolCall]:
        """Return the calls in the text."""
        text = "".join(self._pieces)
        if not text.strip():
            return []
        try:
            calls = list(self._read_text(text))
        except Exception:
            self.num_malformed += 1
            return []
        return calls[:1] if self._only_first else calls

    def cut(self) -> None:
        """Give up the text."""


def reader_for(prompt: Prompt) -> Callable[[], ChoiceReader]:
    """Return what makes the reader of each choice of an answer to `prompt`.

    Servers that ignore `parallel_tool_calls` are held to it here.
    """
    only_first = prompt.parallel_tool_calls is False
    if prompt.read_text is None:
        return partial(CallReader, only_first=only_first)
    return partial(TextReader, prompt.read_text, only_first=only_first)


def list_of_objects(value: Any) -> list[dict[str, Any]]:
    """The objects in an optional list of a chunk; raises BrokenDeltaError where it holds anything else."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise BrokenDeltaError
    return value


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether `value` is a JSON integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def _piece(entry: Any, index: int | None) -> CallPiece | None:
    """One entry of `tool_calls`; None where it is no call of a function. `index` is used where it is given."""
    function = entry.get("function", {}) if isinstance(entry, dict) else None
    if not isinstance(function, dict):
        return None
    if index is None and is_integer(entry.get("index")):
        index = entry["index"]
    try:
        arguments = _arguments_text(function.get("arguments"))
    except (TypeError, ValueError, RecursionError):  # an object that is no JSON, where a framework hands it on
        return None
    return CallPiece(index, _text(entry.get("id")), _text(function.get("name")), arguments)


def _arguments_text(arguments: Any) -> str:
    """Arguments as the text that they should have been: some servers send the object itself."""
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    return json.dumps(arguments)


def _content_text(content: Any) -> str:
    """A content's text: some servers send a list of parts, of which those that are no text are passed over."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in list_of_objects(content):
        if part.get("type", "text") == "text":
            if not isinstance(part.get("text"), str):
                raise BrokenDeltaError
            texts.append(part["text"])
    return "".join(texts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""

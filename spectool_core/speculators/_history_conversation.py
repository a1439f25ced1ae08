"""One conversation as a source of arguments: what was said, called and returned, in the order in which it came."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from spectool_core.calls import Message, ToolCall
from spectool_core.speculators._history_values import (
    Record,
    call_key,
    newest_year,
    records_of,
    scalar_key,
    words_of,
)

__all__ = [
    "Answer",
    "AskedCall",
    "Batch",
    "Conversation",
    "Place",
    "Pool",
    "ReadText",
    "answer_in",
    "asked_in",
    "text_of",
    "word",
]

Pool: TypeAlias = tuple[str, str, str]
"""Where records come from: ("output", tool, path), ("text", who spoke, shape) or ("call", tool, "")."""

ReadText: TypeAlias = Callable[[str], Sequence[ToolCall]]

_MAX_PLACES = 12
_MAX_RECORDS = 4000


class Place(NamedTuple):
    """Where one value stands."""

    pool: Pool
    batch: int
    record: int
    field: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Records that came with one message; `turn` counts the answers before it."""

    turn: int
    records: Sequence[Record]


class AskedCall(NamedTuple):
    """A call in a recorded answer; `arguments` is None where they are no JSON object."""

    name: str
    arguments: dict[str, Any] | None
    id: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the main model."""

    calls: tuple[AskedCall, ...] = ()
    text: str = ""


class Conversation:
    """What has been read of one conversation. Not thread-safe."""

    def __init__(self) -> None:
        self.pools: dict[Pool, list[Batch]] = {}
        self.places: dict[Hashable, list[Place]] = {}
        self.made: set[Hashable] = set()
        self.calls_of: dict[str, list[Record]] = {}
        self.last_name = ""
        self.last_role = ""
        self.turn = 0
        self._year: str | None = None
        self._num_records = 0
        self._awaited: list[tuple[str | None, str]] = []

    def read_message(self, message: Message, read_text: ReadText | None) -> None:
        """Read a message that is no answer of the main model."""
        role, text = word(message.get("role")), text_of(message)
        if role in ("system", "developer"):
            self._note_year(text)
            return
        if role == "user" and read_text is not None and self._awaited:
            role, text = "tool", text.removeprefix("Observation:").strip()
        self.last_role = role
        if role in ("tool", "function"):
            self._read_output(self._name_of(message), text)
        else:
            self._add_words(role, text)

    def read_answer(self, answer: Answer) -> None:
        """Read an answer of the main model."""
        self.turn += 1
        self.last_role = "assistant"
        if answer.text:
            self._add_words("assistant", answer.text)
        self._awaited = [(call.id, call.name) for call in answer.calls]
        for call in answer.calls:
            self.last_name = call.name
            if call.arguments is not None:
                self.made.add(call_key(call.name, call.arguments))
                self.calls_of.setdefault(call.name, []).append(call.arguments)
                self._add(("call", call.name, ""), [call.arguments])

    def _name_of(self, message: Message) -> str:
        """The tool that a message is the output of."""
        id_ = message.get("tool_call_id")
        for position, (awaited, name) in enumerate(self._awaited):
            if awaited == id_ or id_ is None:
                del self._awaited[position]
                return name
        return word(message.get("name"))

    def _read_output(self, name: str, text: str) -> None:
        self._note_year(text)
        records = records_of(text)
        if records is None:
            self._add_words(f"tool {name}", text)
            return
        for path, each in records.items():
            self._add(("output", name, path), each)

    def _add_words(self, speaker: str, text: str) -> None:
        self._note_year(text)
        for shape, records in words_of(text, self._year).items():
            self._add(("text", speaker, shape), records)

    def _add(self, pool: Pool, records: list[Record]) -> None:
        if self._num_records > _MAX_RECORDS:
            return
        self._num_records += len(records)
        batches = self.pools.setdefault(pool, [])
        batches.append(Batch(self.turn, records))
        for number, record in enumerate(records):
            for field, value in record.items():
                key = scalar_key(value)
                if key is not None:
                    places = self.places.setdefault(key, [])
                    if len(places) >= _MAX_PLACES:
                        del places[_MAX_PLACES // 2]
                    places.append(Place(pool, len(batches) - 1, number, field))

    def _note_year(self, text: str) -> None:
        year = newest_year(text)
        if year is not None and (self._year is None or year > self._year):
            self._year = year


def word(value: Any) -> str:
    """A role, name or id, which may be missing or anything."""
    return value if isinstance(value, str) else ""


def text_of(message: Message) -> str:
    """The text of a message, whose content may be a text, a list of parts or nothing."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, Iterable) and not isinstance(content, (bytes, Mapping)):
        texts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
        return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def answer_in(message: Message, read_text: ReadText | None) -> Answer | None:
    """The main model's answer that a message is, if it is one."""
    if message.get("role") != "assistant":
        return None
    text = text_of(message)
    asked = message.get("tool_calls")
    calls = [_read_call(call) for call in asked] if isinstance(asked, (list, tuple)) else []
    if not calls and read_text is not None:
        calls = _read_from_text(read_text, text)
    return Answer(tuple(call for call in calls if call is not None), text)


def _read_call(call: Any) -> AskedCall | None:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if function is None or not isinstance(name, str):
        return None
    return AskedCall(name, _read_arguments(function.get("arguments")), word(call.get("id")) or None)


def _read_arguments(arguments: Any) -> dict[str, Any] | None:
    try:
        value = json.loads(arguments if isinstance(arguments, str) else json.dumps(arguments))
    except (TypeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def asked_in(message: Message) -> tuple[Hashable, ...]:
    """What tells the calls in a message from others, without reading them."""
    asked = message.get("tool_calls")
    return tuple(map(_identity, asked)) if isinstance(asked, (list, tuple)) else ()


def _identity(call: Any) -> Hashable:
    function = call.get("function") if isinstance(call, Mapping) else None
    if function is None or not isinstance(function, Mapping):
        return None
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(_read_arguments(arguments))
    return word(call.get("id")), word(function.get("name")), arguments


def _read_from_text(read_text: ReadText, text: str) -> list[AskedCall | None]:
    try:
        return [AskedCall(call.name, _read_arguments(call.arguments), call.id) for call in read_text(text)]
    except Exception:
        return []

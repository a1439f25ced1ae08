"""Values that arguments may be made of: the fields of a tool's output, and the words of a text by their shape."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

__all__ = ["Record", "call_key", "newest_year", "records_of", "scalar_key", "value_key", "words_of"]

Record: TypeAlias = dict[str, Any]
"""Values that stand together, by field: of one object in an output, of one call, or one word under the field ""."""

_MAX_VALUES = 500
_MAX_OUTPUT = 2**16
_MAX_TEXT = 4000
_MAX_DEPTH = 8
_MAX_VALUE = 200

_WORD = re.compile(r"[^\W_](?:[\w\-./:@+]*[^\W_])?")
_RUN = re.compile(r"([a-z]+)|([A-Z]+)(?![a-z])|([A-Z][a-z]+)|([0-9]+)|(.)", re.DOTALL)
_CODE = re.compile(r"[A-Z0-9]+")
_ISO_DATE = re.compile(r"\b(20\d\d)-(\d\d)-(\d\d)")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}\.?"
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"\b(?:(20\d\d)-(\d\d)-(\d\d)|{_MONTH} {_DAY}\b(?:,? (20\d\d))?|{_DAY}(?: of)? {_MONTH}(?:,? (20\d\d))?)(?!\w)",
    re.IGNORECASE | re.ASCII,
)


def scalar_key(value: Any) -> Hashable | None:
    """What is equal for equal strings and numbers of one type; None for what says nothing by being equal."""
    if isinstance(value, str):
        return value if 0 < len(value) <= _MAX_VALUE else None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return type(value), value
    return None


def value_key(value: Any) -> Hashable:
    """What is equal for equal JSON values of one type, and only for these."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, (bool, int, float)):
        return type(value), value
    return dict, json.dumps(value, sort_keys=True, default=repr)


def call_key(name: str, arguments: Mapping[str, Any]) -> Hashable:
    """What is equal for equal calls, and only for these."""
    return name, frozenset((argument, value_key(value)) for argument, value in arguments.items())


def records_of(output: str) -> dict[str, list[Record]] | None:
    """The objects of a JSON output by where they stand; None if it is no JSON object or list, or is too long.

    A path names fields (`payment.id`), elements of lists (`flights[]`) and values of a mapping from data (`cards{}`).
    """
    if len(output) > _MAX_OUTPUT or output.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(output)
    except (ValueError, RecursionError):
        return None
    found: dict[str, list[Record]] = {}
    left = _MAX_VALUES
    for path, record in _records("", value, 0):
        found.setdefault(path, []).append(record)
        left -= len(record)
        if left <= 0:
            break
    return found


def _records(path: str, value: Any, depth: int) -> Iterator[tuple[str, Record]]:
    """All objects in `value`, outer ones before inner ones."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, list):
        for element in value:
            yield from _records(f"{path}[]", element, depth + 1)
    elif isinstance(value, dict):
        record: Record = {}
        inner: list[tuple[str, Any]] = []
        _fill(record, inner, "", value, depth)
        if record:
            yield path, record
        for name, each in inner:
            yield from _records(f"{path}.{name}" if path else name, each, depth + 1)
    elif scalar_key(value) is not None:
        yield path, {"": value}


def _fill(record: Record, inner: list[tuple[str, Any]], prefix: str, value: dict[str, Any], depth: int) -> None:
    """Put the scalars of an object, and of objects that are plain fields of it, into its record."""
    for name, each in value.items():
        field = prefix + name
        if any(letter.isdigit() for letter in name):  # a name with digits is data
            inner.append((f"{prefix}{{}}", {"{key}": name, **each} if isinstance(each, dict) else {"{key}": name}))
        elif isinstance(each, dict) and depth + prefix.count(".") < _MAX_DEPTH:
            _fill(record, inner, f"{field}.", each, depth)
        elif isinstance(each, list):
            inner.append((field, each))
        elif scalar_key(each) is not None:
            record[field] = each


def words_of(text: str, year: str | None) -> dict[str, list[Record]]:
    """The words of a text that look like arguments, by shape: `mia_li_3668` is `a_a_9`; dates as ISO dates.

    Args:
        text: of a message.
        year: of dates that tell none.
    """
    text = text[:_MAX_TEXT]
    found: dict[str, list[Record]] = {}
    for word in _WORD.findall(text):
        for shape in _shapes(word):
            found.setdefault(shape, []).append({"": int(word) if shape == "number" else word})
    for date in _dates(text, year):
        found.setdefault("date", []).append({"": date})
    return found


@lru_cache(4096)
def _shapes(word: str) -> tuple[str, ...]:
    """The shapes of a word, none for a plain one: its kinds of letters, and what is coarser."""
    if len(word) > _MAX_VALUE or (word.isalpha() and not (word.isupper() and len(word) > 1)):
        return ()
    if word.isdecimal():
        return ("9", "number") if len(word) < 10 else ("9",)
    if _CODE.fullmatch(word):
        return (f"A{len(word)}", f"code {len(word)}") if word.isalpha() else (f"code {len(word)}",)
    parts = []
    for lower, upper, capitalized, digits, other in _RUN.findall(word):
        parts.append("a" if lower else f"A{len(upper)}" if upper else "Aa" if capitalized else "9" if digits else other)
    return ("".join(parts)[:40],)


def _dates(text: str, year: str | None) -> Iterator[str]:
    for match in _DATE.finditer(text):
        iso_year, iso_month, iso_day, month, day, month_year, day_first, month_second, second_year = match.groups()
        if iso_year:
            yield f"{iso_year}-{iso_month}-{iso_day}"
        elif of := month_year or second_year or year:
            number = _MONTHS.index((month or month_second).lower()) + 1
            yield f"{of}-{number:02d}-{int(day or day_first):02d}"


def newest_year(text: str) -> str | None:
    """The latest year of the dates in a text."""
    return max((match[1] for match in _ISO_DATE.finditer(text[:_MAX_OUTPUT])), default=None)

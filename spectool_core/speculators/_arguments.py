"""The text of a tool call's arguments: when it has closed, and what it says. Pure and incremental."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

__all__ = ["ClosingScanner", "parse_arguments"]

_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS = re.compile(r'["\\]')

# Far above what tools take, far below where Python's own parser runs out of stack.
_MAX_DEPTH = 100


class ClosingScanner:
    """Finds the bracket that closes a JSON text which arrives in pieces; each character is looked at once.

    Whatever the closed text says, nothing that follows can mend or extend it.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_closed = False
        self.is_too_deep = False

    def feed(self, piece: str) -> None:
        """Read on to the outermost closing bracket, or to nesting that is absurd: `is_too_deep`, and closed too."""
        position = 0
        while position < len(piece) and not self.is_closed:
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            match = (_INSIDE_STRINGS if self._in_string else _OUTSIDE_STRINGS).search(piece, position)
            if match is None:
                return
            position = match.end()
            self._pass(match[0])

    def _pass(self, character: str) -> None:
        if character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = not self._in_string
        elif character in "{[":
            self._depth += 1
            self.is_closed = self.is_too_deep = self._depth > _MAX_DEPTH
        else:
            self._depth -= 1
            self.is_closed = self._depth <= 0


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Parse the whole text of a call's arguments; None where it is not one JSON object.

    Empty text is a call without arguments. NaN and the infinities are refused. What else Python's parser takes is
    taken as the frameworks take it: integers of any size, the last of equal keys, raw control characters in strings.
    """
    if not text.strip():
        return {}
    try:
        arguments = _decoder.decode(text)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)

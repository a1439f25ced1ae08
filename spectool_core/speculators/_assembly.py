"""Tool calls put together from the pieces of one streamed choice, in whichever dialect the server writes. No IO."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from spectool_core.calls import ToolCall
from spectool_core.speculators._arguments import ClosingScanner, parse_arguments

__all__ = ["CallAssembler", "CallPiece"]

_EMPTY_OBJECT = re.compile(r"\s*\{\s*\}\s*")

# Nobody asks for so many; a server that does must not cost the event loop its time.
_MAX_CALLS = 128


@dataclass(frozen=True, slots=True)
class CallPiece:
    """One entry of a delta's `tool_calls`; empty text where a field was absent."""

    index: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""


class CallAssembler:
    """Completes each call of one choice when its arguments have closed, and the rest when the choice has ended.

    A call is complete when the text of its arguments is a non-empty JSON object: no further text can extend it.
    An empty object, or no text, waits for the end, because some servers send `{}` before the arguments.
    `num_malformed` counts the calls that ended as anything but a name with a JSON object.

    Args:
        only_first: the first call of the choice is completed, or none is.
    """

    def __init__(self, *, only_first: bool = False) -> None:
        self._only_first = only_first
        self._calls: list[_Call] = []
        self.num_malformed = 0

    def feed(self, piece: CallPiece) -> ToolCall | None:
        """Take the next piece and return the call that it completes, if it does."""
        call = self._find(piece)
        if call is None or call.is_followed_by(piece):
            if not (piece.name or piece.arguments):
                return None
            if len(self._calls) == _MAX_CALLS:
                self.num_malformed += 1
                return None
            # Servers that repeat the name in a last, empty piece must not make a second call without arguments.
            is_like_previous = call is not None and not piece.id and piece.name in ("", call.name)
            call = _Call(piece.index, needs_arguments=is_like_previous)
            self._calls.append(call)
        call.add(piece)
        return self._settle(call) if call.is_closed and call.name else None

    def finish(self) -> list[ToolCall]:
        """Complete the calls that are left: the server has said that the choice ended by itself."""
        return [tool_call for call in self._calls if (tool_call := self._settle(call)) is not None]

    def cut(self) -> None:
        """Give up the calls that are left: the server has said that it cut the choice short."""
        for call in self._calls:
            self.num_malformed += not call.is_settled
            call.is_settled = True

    def _find(self, piece: CallPiece) -> _Call | None:
        """The call that the piece's index and id, or the lack of them, point at."""
        calls = [call for call in self._calls if piece.index in (None, call.index)]
        if piece.id:
            for call in calls:
                if call.id == piece.id:
                    return call
        if calls:
            return calls[-1]
        if self._calls and self._calls[-1].index is None and not (piece.name or piece.id):
            return self._calls[-1]
        return None

    def _settle(self, call: _Call) -> ToolCall | None:
        if call.is_settled:
            return None
        call.is_settled = True
        if call.needs_arguments and not call.pieces:
            return None
        arguments = call.arguments()
        if not call.name or arguments is None:
            self.num_malformed += 1
            return None
        if self._only_first and call is not self._calls[0]:
            return None
        return ToolCall(call.name, arguments, call.id or None)


class _Call:
    """A call in the making.

    Args:
        index: the index under which the server writes it.
        needs_arguments: without any text of arguments it is no call.
    """

    def __init__(self, index: int | None, *, needs_arguments: bool) -> None:
        self.index = index
        self.id = ""
        self.name = ""
        self.pieces: list[str] = []
        self.needs_arguments = needs_arguments
        self.is_closed = False
        self.is_settled = False
        self._scanner = ClosingScanner()

    def is_followed_by(self, piece: CallPiece) -> bool:
        """Whether the piece opens another call, although it points at this one.

        Servers put several calls under one index, and others give each piece of one call a new id or the name again.
        """
        if piece.id and self.id:
            return piece.id != self.id and (bool(piece.name) or self.is_closed)
        if not piece.name or not self.name:
            return False
        return self.is_closed or (piece.name != self.name and (bool(self.pieces) or self.needs_arguments))

    def add(self, piece: CallPiece) -> None:
        self.id = self.id or piece.id
        # Names come in pieces, or in full again and again, but in either case before the arguments.
        if piece.name != self.name and not (self.name and self.pieces):
            self.name += piece.name
        if piece.arguments and not self.is_closed:
            self.pieces.append(piece.arguments)
            self._scanner.feed(piece.arguments)
            self.is_closed = self._scanner.is_closed and not _EMPTY_OBJECT.fullmatch("".join(self.pieces))

    def arguments(self) -> dict[str, Any] | None:
        """Parse what has arrived; None where it is no JSON object."""
        return None if self._scanner.is_too_deep else parse_arguments("".join(self.pieces))

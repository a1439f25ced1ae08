"""A resident stream: one HTTP response that gives several turns, each of which one model call reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from spectool_core.engine.chat_body import ChatBody
from spectool_core.engine.endpoint import Address
from spectool_core.engine.server_events import EventSplitter, MalformedStreamError, ServerEvent
from spectool_core.engine.steps import Steps
from spectool_core.vllm.wire import DONE_EVENT, INJECTED_EVENT, TURN_EVENT

__all__ = ["Connections", "Reply", "ResidentStream"]

_END = DONE_EVENT.encode()
_WITH_CALLS = ("tool_calls", "function_call")
_OURS = "spectool."


@dataclass(frozen=True, slots=True, eq=False)
class Connections:
    """The connections of one transport.

    Args:
        limit: as many are open at once.
    """

    limit: int

    def num_too_many(self, num_kept: int) -> int:
        """How many of `num_kept` streams that nobody reads have to go, so that others find half of the connections."""
        return max(0, num_kept - self.limit // 2)


class Reply(Protocol):
    """An HTTP response whose body is still to come; `read` and `close` are steps."""

    response: Any
    connections: Connections

    def read(self) -> Any:
        """The next bytes, or None at the end."""
        ...

    def close(self) -> Any:
        """Close the connection unless the response has been read to its end."""
        ...

    def abandon(self) -> None:
        """Close from any thread, without waiting."""
        ...


class ResidentStream:
    """What is left to read of a response, and what the engine was asked when it went on.

    Args:
        reply: the response.
        body: the request that began it.
        address: where outputs for it are posted.
        keep: is told when the turn has ended and another may come.
    """

    def __init__(self, reply: Reply, body: ChatBody, address: Address, keep: Callable[[ResidentStream], None]) -> None:
        self.reply = reply
        self.body = body
        self.address = address
        self.turn = 1
        self._keep = keep
        self._splitter = EventSplitter()
        self._events: deque[ServerEvent] = deque()
        self._turn_has_ended = False
        self._has_ended = False

    @property
    def is_between_turns(self) -> bool:
        """Whether the model call that read the last turn has all of it."""
        return self._turn_has_ended

    # Within a turn

    def piece(self) -> Steps[bytes | None]:
        """The turn's next bytes as a server without the plugin would send them; None at its end.

        Raises MalformedStreamError, or what the connection raises.
        """
        if self._turn_has_ended:
            return None
        event = yield from self._next()
        if event is None:  # without an end: the reader has what came, as it would have had it from any server
            self._turn_has_ended = True
            yield from self.close()
            return self._splitter.rest or None
        if event.name == TURN_EVENT:
            yield from self._end_turn(event)
            return _END
        if event.name.startswith(_OURS):
            raise MalformedStreamError(f"event {event.name!r} within a turn")
        if event.is_done:
            self._turn_has_ended = True
            yield from self.finish()
        return event.raw

    def whole(self) -> Steps[bytes]:
        """The one object that a turn consists of where it is not streamed."""
        event = yield from self._next_told()
        if event is None or event.name:
            raise MalformedStreamError("a turn without a reply")
        try:
            end = yield from self._next_told()
        except Exception:  # the turn is whole
            end = None
        if end is not None and end.name == TURN_EVENT:
            yield from self._end_turn(end)
        else:
            self._turn_has_ended = True
            yield from self.finish()
        return event.data.encode()

    def _end_turn(self, event: ServerEvent) -> Steps[None]:
        self._turn_has_ended = True
        try:
            may_go_on = event.parsed().get("finish_reason") in _WITH_CALLS
        except MalformedStreamError:
            may_go_on = False
        if not may_go_on or any(event.name or event.data for event in self._events):
            # What follows comes at once, or is there.
            try:
                following = yield from self._next_told()
            except Exception:  # the turn is whole
                following = None
            if following is None or following.is_done:
                yield from self.finish()
                return
            self._events.appendleft(following)
        self._keep(self)

    # Between turns

    def injected(self) -> Steps[list[Any] | None]:
        """Wait for what the engine went on from: the messages that it added; None if it did not go on.

        Raises MalformedStreamError, or what the connection raises.
        """
        event = yield from self._next_told()
        if event is None or event.is_done:
            yield from self.finish()
            return None
        messages = event.parsed().get("messages") if event.name == INJECTED_EVENT else None
        if not isinstance(messages, list):
            raise MalformedStreamError(f"event {event.name!r} between turns")
        return messages

    def begin_turn(self, body: ChatBody, keep: Callable[[ResidentStream], None]) -> Steps[None]:
        """Go on with the turn that answers `body`, once its first event is there; `keep` as for the first turn.

        Raises MalformedStreamError, or what the connection raises, where there is none.
        """
        event = yield from self._next_told()
        if event is None or event.name or event.is_done or "error" in event.parsed():
            raise MalformedStreamError("a turn that does not begin")
        self._events.appendleft(event)
        self.body = body
        self._keep = keep
        self.turn += 1
        self._turn_has_ended = False

    # The end

    def finish(self) -> Steps[None]:
        """Read what is left of a response that has no further turn, so that its connection can be used again."""
        self._has_ended = True
        try:
            while (yield self.reply.read) is not None:
                pass
        except Exception:  # noqa: S110 - all that the framework was to see has been read
            pass
        finally:
            yield self.reply.close

    def close(self) -> Steps[None]:
        """Close the connection, which ends the engine's sequence."""
        if not self._has_ended:
            self._has_ended = True
            yield self.reply.close

    def give_up(self) -> Steps[None]:
        """Close the connection, which has failed: the turn has no more."""
        self._turn_has_ended = True
        yield from self.close()

    def abandon(self) -> None:
        """Close the connection from any thread, without waiting."""
        if not self._has_ended:
            self._has_ended = True
            self.reply.abandon()

    def _next(self) -> Steps[ServerEvent | None]:
        while not self._events:
            received = yield self.reply.read
            if received is None:
                return None
            self._events.extend(self._splitter.feed(received))
        return self._events.popleft()

    def _next_told(self) -> Steps[ServerEvent | None]:
        """The next event that says anything."""
        while True:
            event = yield from self._next()
            if event is None or event.data or event.name:
                return event

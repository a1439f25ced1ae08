"""One HTTP response on its way in: the calls that it completes, and when each of them came."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spectool_core.calls import ToolCall
from spectool_core.speculators._choices import ChoiceReader
from spectool_core.speculators._replies import BodyReply, Reply, StreamReply

if TYPE_CHECKING:
    from aiohttp import ClientResponse

__all__ = ["Reception", "ReplyTooLongError"]

_MAX_BYTES = 8 * 2**20


class ReplyTooLongError(Exception):
    """The server sends more than any prediction can be."""


class Reception:
    """Reads a response as what its content type says that it is, or else as what was asked for.

    Args:
        response: an answer of status 200.
        asked_stream: whether a stream was asked for.
        new_reader: makes what reads the calls out of one choice.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        response: ClientResponse,
        *,
        asked_stream: bool,
        new_reader: Callable[[], ChoiceReader],
        clock: Callable[[], float],
    ) -> None:
        kind = response.content_type
        is_stream = kind == "text/event-stream" or (asked_stream and kind != "application/json")
        self.reply: Reply = StreamReply(new_reader) if is_stream else BodyReply(new_reader)
        self.is_ended = False
        self._content = response.content
        self._clock = clock
        self._num_bytes = 0
        self._called_s: list[float] = []

    async def next_calls(self) -> list[ToolCall]:
        """Wait for more of the body and return the calls that it completes; `is_ended` tells of its end.

        Raises:
            ReplyTooLongError: the body is beyond all bounds.
            aiohttp.ClientError, TimeoutError: the connection failed.
        """
        data = await self._content.readany()
        self.is_ended = not data
        self._num_bytes += len(data)
        if self._num_bytes > _MAX_BYTES:
            raise ReplyTooLongError
        calls = self.reply.feed(data) if data else self.reply.end()
        self._called_s += [self._clock()] * len(calls)
        return calls

    def leads_s(self, ended_s: float) -> list[float]:
        """How long before `ended_s` each call came."""
        return [ended_s - called_s for called_s in self._called_s]

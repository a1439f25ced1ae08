"""Plays one scripted answer, or its fault, to one HTTP client on time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spectool_core.testing.exchange import Exchange, response_start, send_body, send_json
from spectool_core.testing.faults import DroppedConnection, Hang, HttpError, TruncatedAnswer
from spectool_core.testing.wire import Generation, error_body
from spectool_core.vllm.wire import DONE_EVENT

__all__ = ["Playback"]

_DONE = DONE_EVENT.encode()


class Playback:
    """Plays one answer, or its fault, to one client.

    Args:
        generation: what is answered.
        exchange: to whom.
        drop: closes the client's connection.
    """

    def __init__(self, generation: Generation, exchange: Exchange, drop: Callable[[], None]) -> None:
        self._generation = generation
        self._exchange = exchange
        self._drop = drop

    async def run(self, on_end: Callable[[], None]) -> None:
        """Play to the end; `on_end` is called before the last byte, so that a client with the answer finds it counted.

        Raises:
            ClientGoneError: the client left first.
        """
        fault = self._generation.fault
        for latch in self._generation.latches:
            await self._exchange.until_open(latch)
        match fault:
            case HttpError():
                await self._exchange.until(fault.after_s)
                on_end()
                await send_json(
                    self._exchange.send, error_body(fault.message, "scripted"), fault.status, _retry_headers(fault)
                )
            case DroppedConnection(when="before_headers"):
                await self._end_dropped(on_end)
            case Hang(when="before_headers"):
                await self._exchange.forever()
            case _ if self._generation.request.stream:
                await self._stream(on_end)
            case _:
                await self._whole(on_end)

    async def _stream(self, on_end: Callable[[], None]) -> None:
        timed = [(chunk.due_s, _event(chunk.chunk)) for chunk in self._generation.chunks()]
        writes = _coalesced(self._generation.sent(timed))
        for number, (due_s, events) in enumerate(writes, 1):
            await self._exchange.until(due_s)
            if number == 1:
                await self._exchange.send(response_start(200, b"text/event-stream"))
            if number < len(writes) or self._generation.is_cut:
                await self._exchange.send({"type": "http.response.body", "body": events, "more_body": True})
            else:
                on_end()
                await self._exchange.send({"type": "http.response.body", "body": events + _DONE})
        if self._generation.is_cut:
            await self._end_cut(on_end)

    async def _whole(self, on_end: Callable[[], None]) -> None:
        body = json.dumps(self._generation.completion()).encode()
        fault = self._generation.fault
        if not self._generation.is_cut:
            await self._exchange.until(self._generation.generation_s)
            on_end()
            await send_body(self._exchange.send, body)
            return
        await self._exchange.until(self._generation.generation_s / 2)
        half = body[: len(body) // 2]
        # The truncated answer is whole as HTTP; of the others the client knows that more is to come.
        length = len(half if isinstance(fault, TruncatedAnswer) else body)
        await self._exchange.send(response_start(200, b"application/json", length))
        await self._exchange.send({"type": "http.response.body", "body": half, "more_body": True})
        await self._end_cut(on_end)

    async def _end_cut(self, on_end: Callable[[], None]) -> None:
        match self._generation.fault:
            case Hang():
                await self._exchange.forever()
            case DroppedConnection():
                await self._end_dropped(on_end)
            case _:
                on_end()
                await self._exchange.send({"type": "http.response.body", "body": b""})

    async def _end_dropped(self, on_end: Callable[[], None]) -> None:
        on_end()
        self._drop()
        # uvicorn would answer 500 for an application that returns before the connection is seen to be closed.
        await self._exchange.gone()


def _coalesced(timed: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Join what is due at the same moment: one write each."""
    joined: dict[float, list[bytes]] = {}
    for due_s, event in timed:
        joined.setdefault(due_s, []).append(event)
    return [(due_s, b"".join(events)) for due_s, events in joined.items()]


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _retry_headers(fault: HttpError) -> Sequence[tuple[bytes, bytes]]:
    if fault.retry_after_s is None:
        return ()
    seconds = str(math.ceil(fault.retry_after_s)).encode()
    return ((b"retry-after", seconds), (b"retry-after-ms", f"{fault.retry_after_s * 1000:.0f}".encode()))

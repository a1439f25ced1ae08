"""HTTP transports that stand before those of httpx or httpx2, so that all of the openai package above them stays stock.

A request that no turn is being asked with, or that goes elsewhere, passes through untouched.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Collection, Iterator
from functools import lru_cache
from typing import Any, Self

from spectool_core.engine.current import current_turn
from spectool_core.engine.exchange import answer, read_piece, release
from spectool_core.engine.resident_stream import Connections, ResidentStream
from spectool_core.engine.steps import arun_steps, run_steps
from spectool_core.engine.turn import EngineTurn
from spectool_core.loops import run_on
from spectool_core.vllm.wire import REPLY_HEADER

__all__ = ["AsyncEngineTransport", "EngineTransport"]


class _Before:
    """What both kinds share: all but requests is the inner transport's own.

    Args:
        inner: the transport that sends.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._connections = _connections_of(inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._inner, name)


class EngineTransport(_Before):
    """Before a sync transport."""

    def handle_request(self, request: Any) -> Any:
        """Answer `request`."""
        turn = _turn_of(request)
        if turn is None:
            return self._inner.handle_request(request)
        return run_steps(answer(request, turn, _SyncChannel(self._inner, request, self._connections)))

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._inner.__exit__(*raised)


class AsyncEngineTransport(_Before):
    """Before an async transport."""

    async def handle_async_request(self, request: Any) -> Any:
        """Answer `request`."""
        turn = _turn_of(request)
        if turn is None:
            return await self._inner.handle_async_request(request)
        return await arun_steps(answer(request, turn, _AsyncChannel(self._inner, request, self._connections)))

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._inner.__aexit__(*raised)


def _turn_of(request: Any) -> EngineTurn | None:
    """The turn whose model call `request` is."""
    turn = current_turn()
    if turn is None or turn.has_answer or request.method != "POST":
        return None
    endpoint = turn.engine.endpoint
    if endpoint.serves(request.url):
        return turn
    if endpoint.is_chat(request.url):
        turn.seen()
        turn.unavailable("other_url")
    return None


class _Channel:
    """What both kinds share: the HTTP library of one request."""

    def __init__(self, inner: Any, request: Any, connections: Connections) -> None:
        self.inner = inner
        self.connections = connections
        self._library = _library_of(request)

    def whole(self, resident: ResidentStream, body: bytes, status: int) -> Any:
        headers = [*_headers_of(resident, _OF_STREAMS), (b"content-type", b"application/json")]
        return self._library.Response(status, headers=headers, content=body)

    def broken(self, request: Any) -> Exception:
        error: Exception = self._library.RemoteProtocolError("the engine sent no reply", request=request)
        return error

    def _response(self, resident: ResidentStream, stream: Any) -> Any:
        head = resident.reply.response
        return self._library.Response(
            head.status_code, headers=_headers_of(resident), stream=stream, extensions=dict(head.extensions)
        )


class _SyncChannel(_Channel):
    def can_read(self, resident: ResidentStream) -> bool:
        return isinstance(resident.reply, _SyncReply)

    def send(self, request: Any) -> Any:
        return self.inner.handle_request(request)

    def reply(self, response: Any, turn: EngineTurn) -> _SyncReply:
        return _SyncReply(response, turn, self.connections)

    def streamed(self, resident: ResidentStream, turn: EngineTurn) -> Any:
        return self._response(resident, _stream_types(self._library)[0](resident, turn))


class _AsyncChannel(_Channel):
    def can_read(self, resident: ResidentStream) -> bool:
        return isinstance(resident.reply, _AsyncReply)

    async def send(self, request: Any) -> Any:
        return await self.inner.handle_async_request(request)

    def reply(self, response: Any, turn: EngineTurn) -> _AsyncReply:
        return _AsyncReply(response, turn, self.connections)

    def streamed(self, resident: ResidentStream, turn: EngineTurn) -> Any:
        return self._response(resident, _stream_types(self._library)[1](resident, turn))


class _SyncReply:
    def __init__(self, response: Any, turn: EngineTurn, connections: Connections) -> None:
        self.response = response
        self.connections = connections
        self._chunks = iter(response.stream)
        self._turn = turn

    def read(self) -> bytes | None:
        return next(self._chunks, None)

    def close(self) -> None:
        self.response.stream.close()

    def abandon(self) -> None:
        run_on(self._turn.loop, self.close)


class _AsyncReply:
    def __init__(self, response: Any, turn: EngineTurn, connections: Connections) -> None:
        self.response = response
        self.connections = connections
        self._chunks: Any = aiter(response.stream)
        self._turn = turn

    async def read(self) -> bytes | None:
        try:
            received: bytes = await anext(self._chunks)
        except StopAsyncIteration:
            return None
        return received

    async def close(self) -> None:
        try:
            await self._chunks.aclose()
        finally:
            await self.response.stream.aclose()

    def abandon(self) -> None:
        run_on(self._turn.loop, self._close_soon)

    def _close_soon(self) -> None:
        self._turn.engine.spawn(self.close(), self._turn.loop, None)


_OURS = REPLY_HEADER.lower().encode()
_OF_STREAMS = (b"content-type", b"content-length", b"transfer-encoding", b"cache-control")


def _headers_of(resident: ResidentStream, left_out: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """The reply's headers, those that come several times too, as a server without the plugin sends them."""
    pairs = resident.reply.response.headers.raw
    return [(name, value) for name, value in pairs if name.lower() not in (_OURS, *left_out)]


_DEFAULT_MAX_CONNECTIONS = 100
"""httpx's; taken to be that of a transport of the user's own, too."""


def _connections_of(transport: Any) -> Connections:
    pool = getattr(getattr(transport, "_pool", None), "_max_connections", None)  # httpx and httpx2, private there
    limits = getattr(getattr(transport, "limits", None), "max_connections", None)  # httpx-aiohttp
    return Connections(next((limit for limit in (pool, limits) if isinstance(limit, int)), _DEFAULT_MAX_CONNECTIONS))


def _library_of(request: Any) -> Any:
    """The package that `request` comes from: httpx, or httpx2 with version 3 of the openai package."""
    return sys.modules[type(request).__module__.partition(".")[0]]


@lru_cache
def _stream_types(library: Any) -> tuple[Any, Any]:
    """Byte streams of `library`, sync and async, that read one turn of a resident stream."""
    broken = library.RemoteProtocolError

    class TurnStream(library.SyncByteStream):  # type: ignore[misc]
        def __init__(self, resident: ResidentStream, turn: EngineTurn) -> None:
            self._resident, self._turn = resident, turn

        def __iter__(self) -> Iterator[bytes]:
            while (piece := run_steps(read_piece(self._resident, self._turn, broken))) is not None:
                yield piece

        def close(self) -> None:
            run_steps(release(self._resident, self._turn))

    class AsyncTurnStream(library.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, resident: ResidentStream, turn: EngineTurn) -> None:
            self._resident, self._turn = resident, turn

        async def __aiter__(self) -> AsyncIterator[bytes]:
            while (piece := await arun_steps(read_piece(self._resident, self._turn, broken))) is not None:
                yield piece

        async def aclose(self) -> None:
            await arun_steps(release(self._resident, self._turn))

    return TurnStream, AsyncTurnStream

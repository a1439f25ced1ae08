"""One HTTP request on its connection, in ASGI's terms: waits that end when the client leaves, and plain responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeAlias

from spectool_core.testing.latch import Latch

__all__ = ["ClientGoneError", "Exchange", "Receive", "Scope", "Send", "response_start", "send_body", "send_json"]

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientGoneError(Exception):
    """The client closed its connection before it had the whole answer."""


class Exchange:
    """One request on its connection: waits that end at once when the client leaves.

    Args:
        receive: the ASGI receive of a request whose body has been read.
        send: the ASGI send.
        started_s: the loop's time when the request came.
    """

    def __init__(self, receive: Receive, send: Send, started_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._started_s = started_s
        self._gone = self._loop.create_task(_disconnected(receive))
        self.send = send

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request came."""
        return self._loop.time() - self._started_s

    def close(self) -> None:
        """Stop watching the client."""
        self._gone.cancel()

    async def until(self, due_s: float) -> None:
        """Wait until `due_s` after the request, an absolute time so that waits do not drift."""
        remaining_s = due_s - self.elapsed_s
        if remaining_s > 0 and not self._gone.done():
            await asyncio.wait((self._gone,), timeout=remaining_s)
        self._raise_if_gone()

    async def until_open(self, latch: Latch) -> None:
        """Wait until `latch` is open; the answer's time begins then."""
        opened = self._loop.create_task(latch.pass_through())
        await asyncio.wait((self._gone, opened), return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            opened.cancel()
        self._raise_if_gone()
        await opened
        self._started_s = self._loop.time()

    def restart(self) -> None:
        """Count the time from now on."""
        self._started_s = self._loop.time()

    async def until_set(self, event: asyncio.Event, timeout_s: float) -> None:
        """Wait until `event` is set, or for `timeout_s`."""
        was_set = self._loop.create_task(event.wait())
        try:
            await asyncio.wait((self._gone, was_set), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            was_set.cancel()
        self._raise_if_gone()

    async def forever(self) -> None:
        """Wait until the client leaves; raises ClientGoneError then."""
        await self.gone()
        self._raise_if_gone()

    async def gone(self) -> None:
        """Wait until the connection is closed, by either side."""
        await asyncio.wait((self._gone,))

    def _raise_if_gone(self) -> None:
        if self._gone.done():
            raise ClientGoneError


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def response_start(
    status: int, content_type: bytes, length: int | None = None, headers: Sequence[tuple[bytes, bytes]] = ()
) -> dict[str, Any]:
    """Make the ASGI event that sends a response's head."""
    lengths = [] if length is None else [(b"content-length", str(length).encode())]
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", content_type), *lengths, *headers],
    }


async def send_body(send: Send, body: bytes, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send a whole JSON response, given as bytes."""
    await send(response_start(status, b"application/json", len(body), headers))
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_json(send: Send, value: Any, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send a whole JSON response."""
    await send_body(send, json.dumps(value).encode(), status, headers)

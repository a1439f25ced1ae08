"""A port in front of servers, behind which one takes another's place at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

__all__ = ["Front"]


class Front:
    """Passes connections on to the server at `behind`; all end where that changes."""

    def __init__(self, behind: str) -> None:
        self.url = ""
        self._behind = behind
        self._connections: set[asyncio.Task[None]] = set()

    def replace(self, behind: str) -> None:
        """As a server that goes down, and another that is there at once."""
        self._behind = behind
        for connection in self._connections:
            connection.cancel()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Front]:
        listening = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.url = "http://127.0.0.1:{1}".format(*listening.sockets[0].getsockname())
        async with listening:
            yield self
            self.replace(self._behind)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)
        at = urlsplit(self._behind)
        behind_reader, behind_writer = await asyncio.open_connection(at.hostname, at.port)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, behind_writer))
                both.create_task(_copy(behind_reader, writer))
        except asyncio.CancelledError:
            return  # replaced: a task of a stream server has nobody who would want to know
        finally:
            writer.close()
            behind_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
        writer.close()

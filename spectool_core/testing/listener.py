"""uvicorn on a socket of ours: started and stopped without its tenths of a second of polling."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from spectool_core.errors import MissingExtraError
from spectool_core.testing.app import ChatApp
from spectool_core.testing.exchange import Scope

try:
    import uvicorn
except ImportError as error:
    raise MissingExtraError("uvicorn", "testing") from error

__all__ = ["Listener", "bound_socket"]


class _Config(uvicorn.Config):
    """Settings that leave the process's loggers as they are: the user may run another uvicorn beside this one."""

    def configure_logging(self) -> None:
        """Do nothing."""


class Listener(uvicorn.Server):
    """Serves one application on one bound socket until it is told to stop; then it cuts what is still open.

    Args:
        app: what is served; it is told how to drop a connection.
        bound: a bound TCP socket, which the listener closes at its end.
    """

    def __init__(self, app: ChatApp, bound: socket.socket) -> None:
        config = _Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            date_header=False,
            server_header=False,
            timeout_keep_alive=60,
        )
        super().__init__(config)
        app.drop_connection = self._drop_connection
        self._bound = bound

    async def listen(self, on_ready: Callable[[Callable[[], None]], None]) -> None:
        """Serve until stopped; `on_ready` is given the function that stops it, callable from any thread."""
        loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[self._bound])
        await self.on_tick(0)
        on_ready(lambda: _call_threadsafe(loop, self._stopped.set))
        await self._stopped.wait()
        await self._close()

    async def _close(self) -> None:
        for server in self.servers:
            server.close()
        self._bound.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)
        for server in self.servers:
            await server.wait_closed()

    def _drop_connection(self, scope: Scope) -> None:
        connections: set[Any] = set(self.server_state.connections)
        for connection in connections:
            if connection.client == scope["client"]:
                connection.transport.close()


def bound_socket(port: int) -> socket.socket:
    """Bind a TCP socket on loopback; port 0 takes a free one.

    The protocol is named because asyncio sets TCP_NODELAY only then; without it an answer waits 40 ms for an ACK.
    """
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        raise
    return bound


def _call_threadsafe(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)

"""One HTTP session for each event loop, which ends with its loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from spectool_core.speculators._endpoint import Endpoint

if TYPE_CHECKING:
    from aiohttp import ClientSession

__all__ = ["SessionPerLoop", "session_opener"]

# A turn comes every few seconds; connecting again, with TLS, costs more than an idle socket.
_KEEPALIVE_S = 60.0
_DNS_CACHE_S = 300
_EXIT_S = 0.2


class SessionPerLoop:
    """Opens a session when a loop first needs one; an async client shared between loops breaks.

    A suspended async generator owns each session: `asyncio.run`, like every runner that calls
    `loop.shutdown_asyncgens()`, finishes it before it closes the loop, and when nothing refers to it any more
    its loop's own hook finishes it there (PEP 525). Loops that still stand when the process exits, on daemon threads
    for example, are asked to finish theirs then. A loop that is closed without any of this leaves its idle connections
    to the garbage collector.

    Args:
        open_session: opens a session on the running loop.
    """

    def __init__(self, open_session: Callable[[], ClientSession]) -> None:
        self._open = open_session
        self._lock = threading.Lock()
        self._held: dict[asyncio.AbstractEventLoop, tuple[ClientSession, AsyncGenerator[None]]] = {}
        # Called at exit, or when this is garbage: then the reference is dead and there is nothing to do.
        weakref.finalize(self, _close_at_exit, weakref.ref(self))
        # When this is garbage, the sessions' loops finish them. Were they garbage of the same cycle, they would not be
        # finished but complain: hence they are held by the finalizer too.
        weakref.finalize(self, self._held.clear).atexit = False

    async def current(self) -> ClientSession:
        """Return the running loop's session."""
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is not None and not held[0].closed:
            return held[0]
        session = self._open()
        owner = _own(session)
        await anext(owner)
        with self._lock:
            self._held[loop] = session, owner
            dead = [self._held.pop(other) for other in list(self._held) if other.is_closed()]
        for stale, _ in dead:
            await stale.close()
        return session

    async def aclose(self) -> None:
        """Close the running loop's session and let the other loops close theirs."""
        held = self._release()
        mine = held.pop(asyncio.get_running_loop(), None)
        held.clear()
        if mine is not None:
            await mine[1].aclose()

    def close_at_exit(self) -> None:
        """Close all sessions from the main thread, for as long as that takes a healthy loop and not longer."""
        closing = []
        for loop, (_, owner) in self._release().items():
            if loop.is_running():
                closing.append(asyncio.run_coroutine_threadsafe(_finish(owner), loop))
            elif not loop.is_closed():
                loop.run_until_complete(_finish(owner))
        concurrent.futures.wait(closing, timeout=_EXIT_S)

    def _release(self) -> dict[asyncio.AbstractEventLoop, tuple[ClientSession, AsyncGenerator[None]]]:
        with self._lock:
            held = dict(self._held)
            self._held.clear()
        return held


async def _own(session: ClientSession) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await session.close()


async def _finish(owner: AsyncGenerator[None]) -> None:
    await owner.aclose()


def _close_at_exit(reference: weakref.ref[SessionPerLoop]) -> None:
    sessions = reference()
    if sessions is not None:
        sessions.close_at_exit()


def session_opener(endpoint: Endpoint, timeout_s: float) -> Callable[[], ClientSession]:
    """Return what opens a session for requests to `endpoint` on the running loop."""
    # Imported when a speculator is made, because it takes too long to be done on an event loop.
    import aiohttp

    def opened() -> ClientSession:
        return aiohttp.ClientSession(
            # Without a limit: a request that queues here is late, and only its own server knows what is too many.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ttl_dns_cache=_DNS_CACHE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=endpoint.headers,
            proxy=endpoint.proxy,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        )

    return opened

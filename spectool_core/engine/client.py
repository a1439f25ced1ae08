"""The client of one engine: its turns, its idle streams, and what it posts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable
from typing import TYPE_CHECKING, Any, Literal

from spectool_core.config import SpeculationConfig
from spectool_core.engine.endpoint import Address, EngineEndpoint
from spectool_core.engine.idle_streams import IdleStreams, Place
from spectool_core.engine.turn import EngineTurn
from spectool_core.events import Event, UnavailableReason
from spectool_core.loops import run_on
from spectool_core.runs import RunContext
from spectool_core.speculators._sessions import SessionPerLoop

if TYPE_CHECKING:
    from aiohttp import ClientSession

__all__ = ["EngineClient", "engine_client"]

_POST_TIMEOUT_S = 5.0

_IN_WORDS: dict[UnavailableReason, str] = {
    "plugin_absent": "the server answers, but without the plugin; start it with `spectool serve`",
    "unreachable": "no connection to the server",
    "cut": "the server closed a stream before its end",
    "malformed": "the server's stream is not what the plugin sends",
    "other_url": "the main model is asked at another URL; engine_url must be its base_url",
    "request_not_seen": "the main model's request did not come by; it must be a model over the openai package, in a"
    " graph of one's own made by speculative_model()",
    "post_failed": "the server did not take a tool's output in time",
    "post_refused": "the server refused a tool's output with this HTTP status",
}

_logger = logging.getLogger("spectool")


class EngineClient:
    """What the turns of one `Speculation` share in engine mode.

    Args:
        endpoint: the engine.
        announce: tells the hooks.

    Attributes:
        idle_streams: the resident streams that nobody reads just now.
        has_answered: whether the engine's latest reply came from the plugin; None before the first reply.
    """

    def __init__(self, endpoint: EngineEndpoint, announce: Callable[[Event], None]) -> None:
        self.endpoint = endpoint
        self.announce = announce
        self.idle_streams = IdleStreams()
        self.has_answered: bool | None = None
        self._sessions = SessionPerLoop(_session_opener())
        self._tasks: dict[asyncio.Task[None], Hashable] = {}
        self._has_warned = False

    @property
    def num_background_tasks(self) -> int:
        """Posts, ends of sequences and closings of streams that are under way."""
        return len(self._tasks)

    def turn(
        self, number: int, context: RunContext, conversation: Hashable, loop: asyncio.AbstractEventLoop
    ) -> EngineTurn | None:
        """A turn of this engine; None where no agent run is known, whose end would end the stream."""
        if context.run is None:
            return None
        return EngineTurn(number, Place(context.run, conversation), loop, self)

    def end_run(self, run: Hashable) -> None:
        """The agent run has ended: nobody will read its streams or ask for its outputs."""
        self.idle_streams.end_run(run)
        for task, of_run in list(self._tasks.items()):
            if of_run == run:
                run_on(task.get_loop(), task.cancel)

    def warn(self, reason: UnavailableReason, status: int | None = None) -> None:
        """See `Engine.warn`."""
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "engine mode is not available at %s: %s (%s). Such turns are client mode's; this is said once",
                self.endpoint.url,
                _IN_WORDS[reason],
                reason if status is None else f"{reason}: {status}",
            )

    def post(self, turn: EngineTurn, address: Address, body: bytes, num_outputs: int) -> None:
        """See `Engine.post`."""
        self.spawn(self._post(turn, address, body, num_outputs), turn.loop, turn.place.run)

    def end(self, address: Address, loop: asyncio.AbstractEventLoop) -> None:
        """See `Engine.end`."""
        run_on(loop, self._end, address, loop)

    def _end(self, address: Address, loop: asyncio.AbstractEventLoop) -> None:
        self.spawn(self._delete(address), loop, None)

    def spawn(self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop, run: Hashable) -> None:
        """See `Engine.spawn`."""
        task = loop.create_task(work, name="spectool:engine")
        self._tasks[task] = run
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _post(self, turn: EngineTurn, address: Address, body: bytes, num_outputs: int) -> None:
        turn.posted(address, await self._request("POST", address, body), num_outputs)

    async def _delete(self, address: Address) -> None:
        await self._request("DELETE", address, None)

    async def _request(self, method: Literal["POST", "DELETE"], address: Address, body: bytes | None) -> int | None:
        try:
            session = await self._sessions.current()
            headers = {**dict(address.headers), "Content-Type": "application/json"}
            # The secret and the outputs are for this server: they follow no redirect.
            options: dict[str, Any] = {"headers": headers, "data": body, "allow_redirects": False}
            async with session.request(method, address.url, **options) as response:
                await response.read()
                return response.status
        except Exception:
            _logger.debug("%s to the engine failed", method, exc_info=True)
            return None


def engine_client(config: SpeculationConfig, announce: Callable[[Event], None]) -> EngineClient | None:
    """The engine that `config` names; None where it names none, or speculation is not in client mode."""
    if config.engine is None or config.engine_url is None or config.mode != "client":
        return None
    key = config.engine_api_key
    return EngineClient(
        EngineEndpoint(config.engine_url, key.get_secret_value() if key is not None else None), announce
    )


def _session_opener() -> Callable[[], ClientSession]:
    # Imported when a `Speculation` is made, because it takes too long to be done on an event loop.
    import aiohttp

    def opened() -> ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=_POST_TIMEOUT_S),
        )

    return opened

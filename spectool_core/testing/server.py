"""An OpenAI-compatible server on loopback that plays scripted models, on a thread of this process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from spectool_core.errors import ConfigurationError
from spectool_core.testing.app import ChatApp
from spectool_core.testing.models import ScriptedModel
from spectool_core.testing.script import ChatRequest, Script
from spectool_core.testing.statistics import ModelStatistics, ServerStatistics
from spectool_core.testing.tally import Tally

if TYPE_CHECKING:
    from spectool_core.testing.listener import Listener

__all__ = ["ModelServer"]

_START_TIMEOUT_S = 30.0


class ModelServer:
    """Serves scripted models over HTTP while its context, sync or async, is entered; on loopback, on a daemon thread.

    Args:
        models: by the name that clients ask for, each a `ScriptedModel` or a script, which answers at once.
        port: 0 takes a free one.
        max_num_logged: how many of the latest requests are kept in `requests`.

    Raises:
        MissingExtraError: the extra `testing` is not installed.
        ConfigurationError: no model is given.
    """

    def __init__(
        self, models: Mapping[str, ScriptedModel | Script], *, port: int = 0, max_num_logged: int = 1000
    ) -> None:
        from spectool_core.testing.listener import Listener, bound_socket

        if not models:
            raise ConfigurationError("models", models, "at least one model by name")
        self._models = {name: ScriptedModel.of(model) for name, model in models.items()}
        self.port = port
        self._tally = Tally(ServerStatistics(models=dict.fromkeys(self._models, ModelStatistics())))
        self._log: deque[ChatRequest] = deque(maxlen=max_num_logged)
        self._bind = bound_socket
        self._listener_type = Listener
        self._thread: threading.Thread | None = None
        self._ready: concurrent.futures.Future[Callable[[], None]] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def base_url(self) -> str:
        """The URL for OpenAI clients, `/v1` included; its port is known once the server has started."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def requests(self) -> Sequence[ChatRequest]:
        """The latest chat requests, oldest first."""
        return tuple(self._log)

    def statistics(self) -> ServerStatistics:
        """The counts so far, in total and by model."""
        return self._tally.value

    def wait_until(self, predicate: Callable[[ServerStatistics], bool], *, timeout_s: float = 10.0) -> ServerStatistics:
        """Block until `predicate(statistics)` holds and return them; raise TimeoutError after `timeout_s`."""
        return self._tally.wait_until(predicate, timeout_s)

    async def until(
        self, predicate: Callable[[ServerStatistics], bool], *, timeout_s: float = 10.0
    ) -> ServerStatistics:
        """Await what `wait_until` blocks for."""
        return await self._tally.until(predicate, timeout_s)

    def __enter__(self) -> Self:
        self._start()
        self._ready.result(_START_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ready.result()()
        if self._thread is not None:
            self._thread.join(_START_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        self._start()
        await asyncio.wait_for(asyncio.wrap_future(self._ready), _START_TIMEOUT_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ready.result()()
        await asyncio.wrap_future(self._ended)
        # That was the thread's last statement; joining it would block this loop, if only for microseconds.
        while self._thread is not None and self._thread.is_alive():  # noqa: ASYNC110
            await asyncio.sleep(0)

    def _app(self) -> ChatApp:
        return ChatApp(self._models, self._tally, self._log)

    def _start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("a ModelServer is started once; make a new one")
        bound = self._bind(self.port)
        self.port = bound.getsockname()[1]
        listener = self._listener_type(self._app(), bound)
        name = f"spectool-model-server-{self.port}"
        self._thread = threading.Thread(target=self._run, args=(listener,), name=name, daemon=True)
        self._thread.start()

    def _run(self, listener: Listener) -> None:
        try:
            asyncio.run(listener.listen(self._ready.set_result))
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        finally:
            self._ended.set_result(None)

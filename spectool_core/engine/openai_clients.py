"""Clients of the openai package whose requests go through an engine's transport."""

from __future__ import annotations

import copy
import logging
import sys
from typing import Any

from spectool_core.engine.transport import AsyncEngineTransport, EngineTransport
from spectool_core.engine.turn import Engine
from spectool_core.identity import WeakIdentityMap

__all__ = ["OpenAIClients"]

_logger = logging.getLogger("spectool")


class OpenAIClients:
    """Makes them, one for each of the user's clients."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._adopted: WeakIdentityMap[Any] = WeakIdentityMap()

    def adopt(self, client: Any) -> Any:
        """A copy of an `OpenAI` or `AsyncOpenAI` client with a transport of ours around its own.

        HTTP client, connections, retries, time limits and credentials are the user's. None for what is no such client,
        and for one that cannot be copied.
        """
        openai = sys.modules.get("openai")  # whoever has a client of it has imported it
        if openai is None or not isinstance(client, openai.OpenAI | openai.AsyncOpenAI):
            return None
        http_client = getattr(client, "_client", None)  # private, as is all that would let a client be copied whole
        if isinstance(getattr(http_client, "_transport", None), EngineTransport | AsyncEngineTransport):
            return client
        adopted = self._adopted.get(client)
        if adopted is not None:
            return adopted
        try:
            around = self._around(http_client, isinstance(client, openai.AsyncOpenAI))
            return None if around is None else self._adopted.set(client, client.with_options(http_client=around))
        except Exception:
            _logger.debug("%s cannot be copied", type(client).__name__, exc_info=True)
            return None

    def _around(self, http_client: Any, is_async: bool) -> Any:
        # Private in httpx, as is all that would let one transport stand before another.
        transport, mounts = getattr(http_client, "_transport", None), getattr(http_client, "_mounts", None)
        if transport is None or not isinstance(mounts, dict):
            return None
        kind: Any = AsyncEngineTransport if is_async else EngineTransport

        def around(inner: Any) -> Any:
            return None if inner is None else kind(inner, self._engine, http_client)

        copied = copy.copy(http_client)
        copied._transport = around(transport)
        copied._mounts = {pattern: around(mounted) for pattern, mounted in mounts.items()}
        return copied

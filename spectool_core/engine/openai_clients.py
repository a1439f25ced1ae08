"""Clients of the openai package whose requests go through an engine's transport."""

from __future__ import annotations

import copy
from typing import Any

from spectool_core.engine.outputs import Engine
from spectool_core.engine.transport import AsyncEngineTransport, EngineTransport
from spectool_core.identity import WeakIdentityMap

__all__ = ["OpenAIClients"]


class OpenAIClients:
    """Makes them, one for each of the user's clients."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._adopted: WeakIdentityMap[Any] = WeakIdentityMap()

    def adopt(self, client: Any) -> Any:
        """A copy of an `OpenAI` or `AsyncOpenAI` client with a transport of ours around its own; None for others.

        HTTP client, connections, retries, time limits and credentials are the user's.
        """
        import openai

        if not isinstance(client, openai.OpenAI | openai.AsyncOpenAI):
            return None
        if isinstance(getattr(client._client, "_transport", None), EngineTransport | AsyncEngineTransport):
            return client
        adopted = self._adopted.get(client)
        if adopted is None:
            http_client = self._around(client._client, isinstance(client, openai.AsyncOpenAI))
            if http_client is None:
                return None
            adopted = self._adopted.set(client, client.with_options(http_client=http_client))
        return adopted

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

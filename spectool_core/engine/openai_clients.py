"""Puts a transport of ours before those of the HTTP client that a client of the openai package has."""

from __future__ import annotations

import sys
from typing import Any

from spectool_core.engine.transport import AsyncEngineTransport, EngineTransport

__all__ = ["follow"]


def follow(client: Any) -> bool:
    """Have the requests of an `OpenAI` or `AsyncOpenAI` client come by, once and for good; False for what is none.

    The client stays the user's own, with its connections, retries, time limits and credentials: in its HTTP client, a
    transport of ours stands before each of its own. A request of no turn in engine mode passes through it untouched.
    """
    openai = sys.modules.get("openai")  # it is there if `client` is one of its clients
    if openai is None or not isinstance(client, openai.OpenAI | openai.AsyncOpenAI):
        return False
    # Private in openai and httpx, as is all that would let one transport stand before another.
    http_client = getattr(client, "_client", None)
    transport, mounts = getattr(http_client, "_transport", None), getattr(http_client, "_mounts", None)
    if http_client is None or transport is None or not isinstance(mounts, dict):
        return False
    kind: Any = AsyncEngineTransport if isinstance(client, openai.AsyncOpenAI) else EngineTransport
    if not isinstance(transport, kind):
        http_client._transport = kind(transport)
    for pattern, mounted in mounts.items():
        if mounted is not None and not isinstance(mounted, kind):
            mounts[pattern] = kind(mounted)
    return True

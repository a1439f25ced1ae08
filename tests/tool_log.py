"""A log of what tools are run, for the tests of either framework."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable


class ToolLog:
    """The runs of one agent's tools: (name, argument, "started" | "returned" | "raised" | "cancelled")."""

    def __init__(self, latency_s: Callable[[str, str], float], broken: frozenset[str] = frozenset()) -> None:
        self._latency_s = latency_s
        self._broken = broken
        self.events: list[tuple[str, str, str]] = []

    async def run(self, name: str, argument: str) -> str:
        self.events.append((name, argument, "started"))
        try:
            await asyncio.sleep(self._latency_s(name, argument))
            if argument in self._broken:
                raise ConnectionError(f"{argument} is unreachable")
        except asyncio.CancelledError:
            self.events.append((name, argument, "cancelled"))
            raise
        except ConnectionError:
            self.events.append((name, argument, "raised"))
            raise
        self.events.append((name, argument, "returned"))
        return f"{name} of {argument}"

    def counts(self, what: str) -> Counter[tuple[str, str]]:
        return Counter((name, argument) for name, argument, event in self.events if event == what)

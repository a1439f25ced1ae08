"""A model speculator at a server on loopback, and what it is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from spectool_core.calls import Prompt, ToolCall
from spectool_core.speculators import ModelSpeculator, Speculator

MESSAGES = [{"role": "user", "content": "which?"}]
PROMPT = Prompt(MESSAGES)
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
EITHER = pytest.mark.parametrize("streaming", [True, False])


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def speculator_at(base_url: str, model: str = "s", **settings: Any) -> AsyncIterator[ModelSpeculator]:
    speculator = ModelSpeculator(model, base_url=base_url, api_key="secret-key", **settings)
    try:
        yield speculator
    finally:
        await speculator.aclose()


async def predicted(
    speculator: Speculator, prompt: Prompt = PROMPT, tools: Sequence[dict[str, Any]] = TOOLS
) -> list[ToolCall]:
    return [prediction async for prediction in speculator.predict(prompt, tools)]


def of(calls: list[ToolCall]) -> list[tuple[str, dict[str, Any]]]:
    return [(made.name, dict(made.arguments)) for made in calls]

"""Listening to one speculator for as long as its predictions are of use."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from spectool_core.calls import Prompt, ToolCall, ToolSchema
from spectool_core.events import SpeculatorOutcome
from spectool_core.speculators.protocol import Speculator

__all__ = ["listen"]

_logger = logging.getLogger("spectool")


async def listen(
    speculator: Speculator, prompt: Prompt, tools: Sequence[ToolSchema], on_call: Callable[[ToolCall], bool]
) -> tuple[int, SpeculatorOutcome]:
    """Ask a speculator, and end it however it ends; returns how many calls it named, and how it ended.

    What it raises is logged and goes no further. Nor does a cancellation, so that the caller can tell of it: it is
    the outcome "cancelled", after which the caller has nothing left to await.

    Args:
        speculator: who is asked.
        prompt: what the main model has been asked.
        tools: what it may choose from.
        on_call: takes each call as it is named; returns False to stop.
    """
    num_calls = 0
    outcome: SpeculatorOutcome = "finished"
    predictions: AsyncIterator[ToolCall] | None = None
    try:
        predictions = speculator.predict(prompt, tools)
        async for call in predictions:
            num_calls += 1
            if not on_call(call):
                break
    except asyncio.CancelledError:
        outcome = "cancelled"
    except Exception:
        outcome = "failed"
        _logger.debug("speculator %s failed", type(speculator).__name__, exc_info=True)
    if (aclose := getattr(predictions, "aclose", None)) is not None:
        with contextlib.suppress(Exception):
            await aclose()
    return num_calls, outcome

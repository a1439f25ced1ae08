"""The main model's own stream as a speculator: each call that it has written starts before its answer has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from spectool_core.calls import Prompt, ToolCall, ToolSchema
from spectool_core.loops import run_on
from spectool_core.speculators._choices import BrokenDeltaError, CallReader

__all__ = ["AnswerStream", "StreamSpeculator"]


class AnswerStream:
    """What the main model has written of its answer so far, fed by an adapter, read by a `StreamSpeculator`.

    Args:
        loop: the event loop on which it is read.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._reader = CallReader()
        self._closed: asyncio.Queue[ToolCall] = asyncio.Queue()
        self._is_broken = False

    def feed(self, delta: Mapping[str, Any]) -> None:
        """Take the next delta, in OpenAI format (`{"tool_calls": [...]}`), from any thread; never raises."""
        if delta.get("tool_calls"):
            run_on(self._loop, self._read, dict(delta))

    def restart(self) -> None:
        """The answer broke off, and the model begins another one."""
        run_on(self._loop, self._restart)

    def _restart(self) -> None:
        self._reader = CallReader()
        self._is_broken = False

    def _read(self, delta: dict[str, Any]) -> None:
        if self._is_broken:
            return
        try:
            calls = self._reader.read_delta(delta)
        except BrokenDeltaError:
            self._is_broken = True  # a piece of some call may be missing
            return
        for call in calls:
            self._closed.put_nowait(call)

    async def calls(self) -> AsyncIterator[ToolCall]:
        """Yield each call when the text of its arguments has closed and is whole; goes on until it is cancelled."""
        while True:
            yield await self._closed.get()


class StreamSpeculator:
    """Predicts what the main model has already written: needs no other model, and is never wrong.

    It gains where the main model writes on after a call: another call, or text. Only models that are streamed are
    heard; a call without arguments counts when the answer has ended, which is too late for a gain.

    Args:
        name: what events call this speculator.
    """

    reads_answers = True
    cpu_s = 0.0001
    uses_model = False

    def __init__(self, *, name: str = "stream") -> None:
        self.name = name

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        """Yield each call of the answer as it closes; see `Speculator`."""
        if prompt.answer is not None and tools:
            async for call in prompt.answer.calls():
                yield call

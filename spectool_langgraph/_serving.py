"""How a tool call of the main model is served: with the result of an early run, or by the tool as stock would.

The stock node executes either way. On a hit it executes a stand-in of the tool that returns the stored value, so
validation, ids, artifacts, callbacks, error handling and stream events stay stock.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from langchain_core.messages import ToolMessage
from langgraph.prebuilt.tool_node import ToolCallRequest

from spectool_core.calls import ToolCall
from spectool_core.events import ToolObserved
from spectool_core.fences import Write
from spectool_core.loops import running_loop
from spectool_core.runs import NotReplayable, RunContext
from spectool_core.turn import Claimed, Turn
from spectool_langgraph._callback import RUNS, Enlisted
from spectool_langgraph._pregel import running_graph
from spectool_langgraph._replay import replaying

__all__ = ["aserve", "serve"]

R = TypeVar("R")


def serve(tools: Enlisted, request: ToolCallRequest, execute: Callable[[ToolCallRequest], R]) -> R:
    """Serve `request` in a sync run; `execute` is the stock execution."""
    call, turn, context = _find(tools, request)
    if turn is not None:
        served = _with_result(request, turn.claim_blocking(call))
        if served is not None:
            return execute(served)
    observation = _Observation(tools, request, context)
    try:
        result = execute(request)
        observation.succeeded = _is_success(result)
        return result
    finally:
        observation.report()


async def aserve(tools: Enlisted, request: ToolCallRequest, execute: Callable[[ToolCallRequest], Awaitable[R]]) -> R:
    """Serve `request` in an async run; `execute` is the stock execution."""
    call, turn, context = _find(tools, request)
    if turn is not None:
        served = _with_result(request, await turn.claim(call))
        if served is not None:
            return await execute(served)
    observation = _Observation(tools, request, context)
    try:
        result = await execute(request)
        observation.succeeded = _is_success(result)
        return result
    finally:
        observation.report()


def _find(tools: Enlisted, request: ToolCallRequest) -> tuple[ToolCall, Turn | None, RunContext | None]:
    asked = request.tool_call
    call = ToolCall(asked["name"], asked["args"], asked["id"])
    if not tools.speculation.is_on:
        return call, None, None
    graph = running_graph(request.runtime.config)
    # Started here if need be: a resumed run may begin with its tools, and a write is a fence there too.
    run = RUNS.find_or_start(graph) if graph is not None else None
    if run is None:
        return call, None, None
    return call, run.turn_of(call, request.tool, tools.speculation), run.context


def _with_result(request: ToolCallRequest, claimed: Claimed) -> ToolCallRequest | None:
    """The request with a stand-in of its tool, or None if the tool itself has to run."""
    if claimed.outcome == "miss" or request.tool is None:
        return None
    try:
        return request.override(tool=replaying(request.tool, claimed.result))
    except NotReplayable:
        return None


def _is_success(result: Any) -> bool:
    return not (isinstance(result, ToolMessage) and result.status == "error")


class _Observation:
    """What the library learns when the framework itself runs a tool."""

    def __init__(self, tools: Enlisted, request: ToolCallRequest, context: RunContext | None) -> None:
        self._tools = tools
        self._tool = request.tool
        self._context = context
        self._started_s = _now_s()
        self.succeeded = False
        self._write = self._begin_write()

    def report(self) -> None:
        """The run has ended: let a tool that works again be run early."""
        if self._context is None or self._tool is None:
            return
        if self._write is not None:
            self._write.end()
        is_marked = self._tool.name in self._tools.marked
        event = ToolObserved(self._tool.name, is_marked, self._started_s, _now_s(), self.succeeded)
        self._tools.speculation.observe(self._tool, event)

    def _begin_write(self) -> Write | None:
        """A tool that may write makes stale what was read before, and what is read until it has ended."""
        if self._context is None or self._tool is None:
            return None
        known = self._tools.marked.get(self._tool.name)
        if known is not None and not known.policy.writes:
            return None
        return self._tools.speculation.begin_write(self._context, known.policy.writes if known is not None else None)


def _now_s() -> float:
    """The time of the event loop that runs here; elsewhere the monotonic clock, which the background loop has."""
    loop = running_loop()
    return loop.time() if loop is not None else time.monotonic()

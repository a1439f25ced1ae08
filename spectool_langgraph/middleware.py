"""Speculation for `langchain.agents.create_agent`, which takes middleware where a graph takes a tool node."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cachetools import LRUCache
from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool
from langgraph.prebuilt.tool_node import ToolCallRequest
from langgraph.types import Command

from spectool_core.errors import ConfigurationError, NotSpeculatableError
from spectool_core.speculation import Speculation
from spectool_langgraph._binding import ToolBinding
from spectool_langgraph._callback import Enlisted, enlisted
from spectool_langgraph._engine import follow_model
from spectool_langgraph._pregel import running_graph
from spectool_langgraph._serving import aserve, serve

__all__ = ["SpeculationMiddleware"]

ModelHandler = Callable[[ModelRequest[Any]], ModelResponse[Any]]
AsyncModelHandler = Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
ToolHandler = Callable[[ToolCallRequest], ToolMessage | Command[Any]]
AsyncToolHandler = Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]

_MAX_BOUND = 1024
_COMPOSED = "langchain.agents.factory"
_INNERMOST = ("_execute_model_sync", "_execute_model_async")

_logger = logging.getLogger("spectool")


class SpeculationMiddleware(AgentMiddleware[AgentState[Any], Any, Any]):
    """Runs marked tools of the agent early; place it last in `middleware`, so that it sees what the model sees.

    Args:
        speculation: speculators and limits; one may serve many agents.

    Raises:
        ConfigurationError: `speculation` is not a `Speculation`.
    """

    def __init__(self, speculation: Speculation) -> None:
        super().__init__()
        if not isinstance(speculation, Speculation):
            raise ConfigurationError("speculation", speculation, "a spectool_core.Speculation")
        self.speculation = speculation
        self._lock = threading.Lock()
        self._bound: LRUCache[int, tuple[BaseTool, ToolBinding | None]] = LRUCache(_MAX_BOUND)
        self._warned = False

    def wrap_model_call(self, request: ModelRequest[Any], handler: ModelHandler) -> ModelResponse[Any]:
        """Start a turn as the main model is called."""
        if not self.speculation.is_on:
            return handler(request)
        self._warn_unless_innermost(handler)
        follow_model(request.model, self.speculation.engine)
        with enlisted(self._offered(request.tools)):
            return handler(request)

    async def awrap_model_call(self, request: ModelRequest[Any], handler: AsyncModelHandler) -> ModelResponse[Any]:
        """Start a turn as the main model is called."""
        if not self.speculation.is_on:
            return await handler(request)
        self._warn_unless_innermost(handler)
        follow_model(request.model, self.speculation.engine)
        with enlisted(self._offered(request.tools)):
            return await handler(request)

    def wrap_tool_call(self, request: ToolCallRequest, handler: ToolHandler) -> ToolMessage | Command[Any]:
        """Serve the call from an early run, or run the tool."""
        if not self.speculation.is_on:
            return handler(request)
        self._warn_unless_innermost(handler)
        return serve(self._enlist([request.tool]), request, handler)

    async def awrap_tool_call(self, request: ToolCallRequest, handler: AsyncToolHandler) -> ToolMessage | Command[Any]:
        """Serve the call from an early run, or run the tool."""
        if not self.speculation.is_on:
            return await handler(request)
        self._warn_unless_innermost(handler)
        return await aserve(self._enlist([request.tool]), request, handler)

    def _offered(self, tools: Sequence[Any]) -> Enlisted:
        """What the agent's tool node will run where `tools` are asked for: other middleware may have put copies in."""
        graph = running_graph()
        run_by_node = graph.tools() if graph is not None else {}
        return self._enlist([run_by_node.get(tool.name, tool) for tool in tools if isinstance(tool, BaseTool)])

    def _enlist(self, tools: Sequence[Any]) -> Enlisted:
        bound = (self._bind(tool) for tool in tools if isinstance(tool, BaseTool))
        return Enlisted(self.speculation, {known.tool.name: known for known in bound if known is not None})

    def _bind(self, tool: BaseTool) -> ToolBinding | None:
        with self._lock:
            known = self._bound.get(id(tool))  # the entry keeps its tool alive, so the id is still this tool's
            if known is None:
                known = self._bound[id(tool)] = (tool, _bound_or_warned(tool))
        return known[1]

    def _warn_unless_innermost(self, handler: Callable[..., Any]) -> None:
        is_composed = handler.__module__ == _COMPOSED and handler.__name__ not in _INNERMOST
        if is_composed and not self._warned:
            self._warned = True
            warnings.warn(
                "SpeculationMiddleware is not the last in middleware=[...]: what comes after it may change the prompt "
                "that speculators are asked, and gets the same result if it repeats a call that was run early",
                UserWarning,
                stacklevel=2,
            )


def _bound_or_warned(tool: BaseTool) -> ToolBinding | None:
    try:
        return ToolBinding.of(tool)
    except NotSpeculatableError as exc:
        # An agent takes its tools after its middleware is made: too late to refuse, so the tool stays stock.
        _logger.warning("%s", exc)
        return None

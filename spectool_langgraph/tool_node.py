"""The tool node whose marked tools may have run before the main model asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from langchain_core.messages import ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.prebuilt import ToolNode
from langgraph.prebuilt.tool_node import ToolCallRequest
from langgraph.types import Command

from spectool_core.errors import ConfigurationError
from spectool_core.speculation import Speculation
from spectool_langgraph._callback import Enlisted, SpeculativeTools
from spectool_langgraph._serving import aserve, serve
from spectool_langgraph._toolbox import marked_tools

__all__ = ["SpeculativeToolNode"]

ToolResult = ToolMessage | Command[Any] | list[Command[Any] | ToolMessage]
InputType = Literal["list", "dict", "tool_calls"]


class SpeculativeToolNode(SpeculativeTools, ToolNode):
    """A `langgraph.prebuilt.ToolNode` that serves calls from early runs where it can.

    Put it where the stock node stood: a turn starts by itself whenever a chat model of the same graph is called with
    some of these tools. A graph without this node is never touched.

    Args:
        tools: as the stock node takes them; only those marked `@speculatable` are run early.
        speculation: speculators and limits; one may serve many nodes.
        stock: every further argument of `ToolNode`, unchanged.

    Raises:
        ConfigurationError: `speculation` is not a `Speculation`.
        NotSpeculatableError: a marked tool cannot be run early, and why.
    """

    def __init__(
        self,
        tools: Sequence[BaseTool | Callable[..., Any]],
        speculation: Speculation,
        **stock: Any,
    ) -> None:
        if not isinstance(speculation, Speculation):
            raise ConfigurationError("speculation", speculation, "a spectool_core.Speculation")
        super().__init__(tools, **stock)
        self.enlisted = Enlisted(speculation, marked_tools(self.tools_by_name.values()))

    # These two, not `wrap_tool_call`: a wrapper would change how `handle_tool_errors` filters exceptions.

    def _execute_tool_sync(self, request: ToolCallRequest, input_type: InputType, config: RunnableConfig) -> ToolResult:
        stock = super()._execute_tool_sync
        return serve(self.enlisted, request, lambda served: stock(served, input_type, config))

    async def _execute_tool_async(
        self, request: ToolCallRequest, input_type: InputType, config: RunnableConfig
    ) -> ToolResult:
        stock = super()._execute_tool_async
        return await aserve(self.enlisted, request, lambda served: stock(served, input_type, config))

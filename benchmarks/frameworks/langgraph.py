"""Graphs of LangGraph with a tool node, and agents of `create_agent` with a middleware."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AnyMessage, BaseMessage, HumanMessage
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import SecretStr

from benchmarks.frameworks import Framework
from benchmarks.playback import MAIN
from benchmarks.timing import microseconds
from spectool_core import Speculation, speculatable
from spectool_langgraph import SpeculationMiddleware, SpeculativeToolNode
from spectool_langgraph._callback import FOLLOWER
from spectool_langgraph._recording import Recorded
from spectool_langgraph._replay import replaying

__all__ = ["FRAMEWORK"]


class _EmptyMiddleware(AgentMiddleware[Any, Any, Any]):
    """What stock charges for any middleware at the place of `SpeculationMiddleware`."""

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request)

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        return await handler(request)


class _LangGraph(Framework):
    name = "langgraph"
    ways = ("tool node", "middleware")
    timed_ways = ("tool node",)

    def tool(self, function: Callable[..., Coroutine[Any, Any, str]]) -> BaseTool:
        return tool(function)

    def agent(self, way: str, base_url: str, tools: Sequence[BaseTool], speculation: Speculation | None) -> Any:
        model = _chat_model(MAIN, base_url)
        if way == "middleware":
            middleware = _EmptyMiddleware() if speculation is None else SpeculationMiddleware(speculation)
            return create_agent(model, list(tools), middleware=[middleware])
        return _graph(
            model, tools, ToolNode if speculation is None else partial(SpeculativeToolNode, speculation=speculation)
        )

    def speculator(self, model: str, base_url: str) -> ChatOpenAI:
        return _chat_model(model, base_url)

    async def run(self, agent: Any, text: str) -> tuple[str, ...]:
        state = await agent.ainvoke({"messages": [HumanMessage(text)]})
        return tuple(str(message.content) for message in state["messages"])

    def parts(self) -> Sequence[tuple[str, float]]:
        recorded = Recorded("the result")
        call = {"name": "search", "args": {"query": "tides"}, "id": "1", "type": "tool_call"}
        return [
            ("a stand-in for a hit", microseconds(lambda: replaying(_search, recorded), 5000)),
            ("a hit, executed", microseconds(lambda: replaying(_search, recorded).invoke(call), 500)),
            ("a tool that does nothing, executed", microseconds(lambda: _search.invoke(call), 500)),
            ("the callback in a stock graph, a model call", _callback_in_a_stock_graph()),
        ]


FRAMEWORK = _LangGraph()


@tool
@speculatable
def _search(query: str) -> str:
    """Search the archive."""
    return query


def _chat_model(name: str, base_url: str) -> ChatOpenAI:
    return ChatOpenAI(model=name, base_url=base_url, api_key=SecretStr("unused"), max_retries=0)


def _graph(model: ChatOpenAI, tools: Sequence[BaseTool], make_node: Callable[[Sequence[BaseTool]], ToolNode]) -> Any:
    bound = model.bind_tools(tools)

    async def call_model(state: MessagesState) -> dict[str, list[AnyMessage]]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", call_model)
    graph.add_node("tools", make_node(tools))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition, ["tools", END])
    graph.add_edge("tools", "agent")
    return graph.compile()


def _callback_in_a_stock_graph() -> float:
    """Microseconds that the process-wide callback adds to one model call in a graph with a stock tool node."""
    measured: list[float] = []

    def call_model(state: MessagesState) -> dict[str, list[Any]]:
        messages: list[list[BaseMessage]] = [list(state["messages"])]
        params = {"invocation_params": {"tools": [{"type": "function", "function": {"name": "search"}}]}}

        def follow() -> None:
            FOLLOWER.on_chat_model_start({}, messages, run_id=uuid4(), **params)

        measured.append(microseconds(follow, 2000))
        return {"messages": []}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", call_model)
    graph.add_node("tools", ToolNode([_search]))
    graph.add_edge(START, "agent")
    graph.add_edge("agent", END)
    graph.compile().invoke({"messages": [HumanMessage("go")]})
    return measured[0]

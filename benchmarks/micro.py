"""What the parts cost: the canonical key, a replay, and the callback in a graph that does not speculate."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from statistics import median
from typing import Any
from uuid import uuid4

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from spectool_core import speculatable
from spectool_core.canonical import canonicalize
from spectool_langgraph._callback import FOLLOWER
from spectool_langgraph._recording import Recorded
from spectool_langgraph._replay import replaying

__all__ = ["main"]

TEN_ARGUMENTS = {
    "query": "opening hours of the upper station",
    "limit": 10,
    "offset": 0,
    "threshold": 0.75,
    "exact": False,
    "language": "en",
    "fields": ["title", "body", "date"],
    "filter": {"year": 2031, "kind": "notice"},
    "sort": "date",
    "page_token": None,
}


@tool
@speculatable
def search(query: str) -> str:
    """Search the archive."""
    return query


def microseconds(function: Callable[[], Any], number: int) -> float:
    """Median of seven repeats, for one call."""
    return median(timeit.repeat(function, number=number, repeat=7)) / number * 1e6


def callback_in_a_stock_graph() -> float:
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
    graph.add_node("tools", ToolNode([search]))
    graph.add_edge(START, "agent")
    graph.add_edge("agent", END)
    graph.compile().invoke({"messages": [HumanMessage("go")]})
    return measured[0]


def main() -> None:
    """Print the figures."""
    recorded = Recorded("the result")
    call = {"name": "search", "args": {"query": "tides"}, "id": "1", "type": "tool_call"}
    stock = microseconds(lambda: search.invoke(call), 500)
    replay = microseconds(lambda: replaying(search, recorded).invoke(call), 500)
    print(f"canonical key of ten arguments   {microseconds(lambda: canonicalize(TEN_ARGUMENTS), 20_000):7.2f} us")
    print(f"a stand-in for a hit             {microseconds(lambda: replaying(search, recorded), 5000):7.2f} us")
    print(f"a hit, executed                  {replay:7.2f} us (a tool that does nothing: {stock:.2f} us)")
    print(f"callback in a stock graph        {callback_in_a_stock_graph():7.2f} us a model call")


if __name__ == "__main__":
    main()

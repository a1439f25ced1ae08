"""LangGraph agents over loopback HTTP, stock and speculative, many on one event loop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import SecretStr

from spectool_core import Speculation, speculatable

__all__ = ["AgentFigures", "build_agent", "chat_model", "run_agents", "search_tool"]


@dataclass(frozen=True, slots=True)
class AgentFigures:
    """One run of a number of agents: mean seconds of an agent, and client CPU of a turn (a model call)."""

    mean_s: float
    cpu_ms_per_turn: float
    transcripts: tuple[tuple[str, ...], ...]


def search_tool(tool_s: float) -> BaseTool:
    """A tool that takes `tool_s` seconds and no CPU."""

    @tool
    @speculatable(max_concurrency=1000)
    async def search(query: str) -> str:
        """Search the archive."""
        await asyncio.sleep(tool_s)
        return f"Results of {query}"

    return search


def chat_model(base_url: str) -> ChatOpenAI:
    """The main model."""
    return ChatOpenAI(model="main", base_url=base_url, api_key=SecretStr("unused"), max_retries=0)


def build_agent(base_url: str, tools: Sequence[BaseTool], make_node: Callable[[Sequence[BaseTool]], ToolNode]) -> Any:
    """A compiled graph of a model and a tool node."""
    model = chat_model(base_url).bind_tools(tools)

    async def call_model(state: MessagesState) -> dict[str, list[AnyMessage]]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", call_model)
    graph.add_node("tools", make_node(tools))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition, ["tools", END])
    graph.add_edge("tools", "agent")
    return graph.compile()


async def run_agents(agent: Any, num_agents: int, *, spread_s: float, repeat: str) -> AgentFigures:
    """Run `num_agents` conversations at once, their starts spread evenly over `spread_s` seconds."""

    async def one(index: int) -> tuple[float, tuple[str, ...]]:
        await asyncio.sleep(spread_s * index / num_agents)
        started_s = time.perf_counter()
        state = await agent.ainvoke({"messages": [HumanMessage(f"task {index} of {repeat}")]})
        return time.perf_counter() - started_s, tuple(str(message.content) for message in state["messages"])

    gc.collect()
    cpu_s = time.process_time()
    results = await asyncio.gather(*(one(index) for index in range(num_agents)))
    cpu_s = time.process_time() - cpu_s
    num_turns = sum(len(transcript) // 2 for _, transcript in results)
    return AgentFigures(
        mean_s=mean(duration_s for duration_s, _ in results),
        cpu_ms_per_turn=1000 * cpu_s / num_turns,
        transcripts=tuple(transcript for _, transcript in results),
    )


def num_served(speculation: Speculation) -> int:
    """Calls served by early runs so far."""
    total = speculation.statistics().total
    return total.num_hits + total.num_joins

"""Client CPU of a turn: stock, speculation off, and speculating; and what a graph without speculation pays."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.tools import BaseTool
from langgraph.prebuilt import ToolNode

from benchmarks.agents import build_agent, chat_model, run_agents, search_tool
from benchmarks.playback import models
from spectool_core import ModelSpeculator, Speculation
from spectool_core.testing import ModelServerProcess
from spectool_langgraph import SpeculationMiddleware, SpeculativeToolNode

NUM_TURNS = 3


class EmptyMiddleware(AgentMiddleware[Any, Any, Any]):
    """What stock charges for any middleware at the place of `SpeculationMiddleware`."""

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        """Do nothing."""
        return await handler(request)

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        """Do nothing."""
        return await handler(request)


def with_tool_node(base_url: str, tools: Sequence[BaseTool], by: Speculation | None) -> Any:
    """A StateGraph with a stock or a speculative tool node."""
    return build_agent(base_url, tools, ToolNode if by is None else partial(SpeculativeToolNode, speculation=by))


def with_middleware(base_url: str, tools: Sequence[BaseTool], by: Speculation | None) -> Any:
    """An agent of `create_agent` with an empty or a speculative middleware."""
    middleware = EmptyMiddleware() if by is None else SpeculationMiddleware(by)
    return create_agent(chat_model(base_url), list(tools), middleware=[middleware])


async def measure(
    name: str, build: Callable[[str, Sequence[BaseTool], Speculation | None], Any], num_agents: int, num_repeats: int
) -> None:
    """Print the medians over the repeats, all variants interleaved in one process."""
    script = models(num_turns=NUM_TURNS, generation_s=0.3, speculator_s=0.06)
    with ModelServerProcess(script) as server:
        tools = [search_tool(0.1)]

        def speculation(**settings: Any) -> Speculation:
            return Speculation([ModelSpeculator("small-1.0", base_url=server.base_url, api_key="unused")], **settings)

        speculations = {
            "stock": None,
            "off": speculation(mode="off"),
            "no speculators": Speculation(),
            "one speculator": speculation(),
        }
        agents = {variant: build(server.base_url, tools, by) for variant, by in speculations.items()}
        cpu_ms: dict[str, list[float]] = {variant: [] for variant in agents}
        mean_s: dict[str, list[float]] = {variant: [] for variant in agents}
        for number in range(-1, num_repeats):
            for variant, agent in agents.items():
                figures = await run_agents(agent, num_agents, spread_s=0.3, repeat=f"repeat {number}")
                if number >= 0:
                    cpu_ms[variant].append(figures.cpu_ms_per_turn)
                    mean_s[variant].append(figures.mean_s)
        for variant in agents:
            added = [ours - base for ours, base in zip(cpu_ms[variant], cpu_ms["stock"], strict=True)]
            print(
                f"{name:10s} {num_agents:2d} agents  {variant:15s} CPU {median(cpu_ms[variant]):6.2f} ms a turn,"
                f" added {median(added):5.2f} ms; an agent {median(mean_s[variant]):6.3f} s,"
                f" {median(mean_s[variant]) / median(mean_s['stock']):5.3f} of stock",
                flush=True,
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    given, _ = parser.parse_known_args()
    print(f"G = 0.3 s, g = 0.06 s, T = 0.1 s, acceptance rate 1, {NUM_TURNS} tool turns and a final one")
    for num_agents in (1, 32):
        asyncio.run(measure("tool node", with_tool_node, num_agents, given.repeats))
        asyncio.run(measure("middleware", with_middleware, num_agents, given.repeats))


if __name__ == "__main__":
    main()

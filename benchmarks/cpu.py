"""Client CPU of a turn: stock, speculation off, and speculating; and what a graph without speculation pays."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from langgraph.prebuilt import ToolNode

from benchmarks.agents import build_agent, run_agents, search_tool
from benchmarks.playback import models
from spectool_core import ModelSpeculator, Speculation
from spectool_core.testing import ModelServerProcess
from spectool_langgraph import SpeculativeToolNode

NUM_TURNS = 3


async def measure(num_agents: int, num_repeats: int) -> None:
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

        def node(by: Speculation | None) -> Callable[[Any], ToolNode]:
            return ToolNode if by is None else partial(SpeculativeToolNode, speculation=by)

        agents = {name: build_agent(server.base_url, tools, node(by)) for name, by in speculations.items()}
        cpu_ms: dict[str, list[float]] = {name: [] for name in agents}
        mean_s: dict[str, list[float]] = {name: [] for name in agents}
        for number in range(-1, num_repeats):
            for name, agent in agents.items():
                figures = await run_agents(agent, num_agents, spread_s=0.3, repeat=f"repeat {number}")
                if number >= 0:
                    cpu_ms[name].append(figures.cpu_ms_per_turn)
                    mean_s[name].append(figures.mean_s)
        for name in agents:
            added = [ours - base for ours, base in zip(cpu_ms[name], cpu_ms["stock"], strict=True)]
            print(
                f"{num_agents:3d} agents  {name:15s} CPU {median(cpu_ms[name]):6.2f} ms a turn,"
                f" added {median(added):5.2f} ms; an agent {median(mean_s[name]):6.3f} s,"
                f" {median(mean_s[name]) / median(mean_s['stock']):5.3f} of stock",
                flush=True,
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    print(f"G = 0.3 s, g = 0.06 s, T = 0.1 s, acceptance rate 1, {NUM_TURNS} tool turns and a final one")
    for num_agents in (1, 32):
        asyncio.run(measure(num_agents, given.repeats))


if __name__ == "__main__":
    main()

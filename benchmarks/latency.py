"""Time saved over loopback HTTP, one agent and many, beside the paper's equations."""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from statistics import median

from langgraph.prebuilt import ToolNode

from benchmarks.agents import build_agent, num_served, run_agents, search_tool
from benchmarks.playback import models
from spectool_core import Speculation
from spectool_core.model import run_standard_time, run_time
from spectool_core.speculators import ModelSpeculator
from spectool_core.testing import ModelServerProcess
from spectool_langgraph import SpeculativeToolNode


async def measure(
    *,
    num_agents: int,
    num_turns: int,
    generation_s: float,
    speculator_s: float,
    tool_s: float,
    acceptance_rates: tuple[float, ...],
    num_repeats: int,
) -> None:
    """Print a row for each acceptance rate: stock and speculative, interleaved, medians over the repeats."""
    script = models(
        num_turns=num_turns,
        generation_s=generation_s,
        speculator_s=speculator_s,
        acceptance_rates=acceptance_rates,
    )
    with ModelServerProcess(script) as server:
        tools = [search_tool(tool_s)]
        speculations = {
            alpha: Speculation([ModelSpeculator(f"small-{alpha}", base_url=server.base_url, api_key="unused")])
            for alpha in acceptance_rates
        }
        stock = build_agent(server.base_url, tools, ToolNode)
        ours = {
            alpha: build_agent(server.base_url, tools, partial(SpeculativeToolNode, speculation=by))
            for alpha, by in speculations.items()
        }
        spread_s = generation_s + tool_s if num_agents > 1 else 0.0
        await run_agents(stock, num_agents, spread_s=spread_s, repeat="warm-up")
        for agent in ours.values():
            await run_agents(agent, num_agents, spread_s=spread_s, repeat="warm-up")
        stock_s: list[float] = []
        ours_s: dict[float, list[float]] = {alpha: [] for alpha in ours}
        served = {alpha: -num_served(by) for alpha, by in speculations.items()}
        for number in range(num_repeats):
            base = await run_agents(stock, num_agents, spread_s=spread_s, repeat=f"repeat {number}")
            stock_s.append(base.mean_s)
            for alpha, agent in ours.items():
                figures = await run_agents(agent, num_agents, spread_s=spread_s, repeat=f"repeat {number}")
                if figures.transcripts != base.transcripts:
                    raise AssertionError("transcripts differ")
                ours_s[alpha].append(figures.mean_s)
        times = {"generation_s": generation_s, "tool_s": tool_s}
        for alpha, by in speculations.items():
            num_hits = (served[alpha] + num_served(by)) / (num_repeats * num_agents)
            expected = run_time(num_turns, 0, speculator_s=speculator_s, **times)
            gain = run_time(num_turns, num_turns, speculator_s=speculator_s, **times) - expected
            predicted = run_standard_time(num_turns, **times) / (expected + gain * num_hits / num_turns)
            ratio = median(stock_s) / median(ours_s[alpha])
            saved, saved_predicted = 1 - 1 / ratio, 1 - 1 / predicted
            share = f"{saved / saved_predicted:6.2f}" if saved_predicted > 0 else "     -"
            print(
                f"{num_agents:6d} {generation_s:5.2f} {speculator_s:5.2f} {tool_s:5.2f} {alpha:5.2f}"
                f" {num_hits / num_turns:6.2f} {median(stock_s):8.3f} {median(ours_s[alpha]):8.3f}"
                f" {1 / ratio:7.3f} {ratio:8.3f} {predicted:9.3f} {ratio / predicted:7.3f}"
                f" {100 * saved:6.1f} {100 * saved_predicted:6.1f} {share}",
                flush=True,
            )


HEADER = (
    "agents     G     g     T alpha   hits  stock s  spec. s spec/st  speedup  equation of eq. saved%    eq.% of eq."
)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, choices=(1, 32), action="append", help="default: both")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats of one agent; many agents run once")
    given, _ = parser.parse_known_args()
    print("Means over agents, medians over repeats; equation (2) with the hits that came true and the final turn.")
    print(HEADER)
    if 1 in (given.agents or (1, 32)):
        for generation_s in (0.5, 1.0, 2.0):
            for share in (0.5, 1.0, 2.0):
                asyncio.run(
                    measure(
                        num_agents=1,
                        num_turns=3,
                        generation_s=generation_s,
                        speculator_s=generation_s / 5,
                        tool_s=generation_s * share,
                        acceptance_rates=(1.0,),
                        num_repeats=given.repeats if generation_s < 2 else 1,
                    )
                )
    if 32 in (given.agents or (1, 32)):
        for tool_s in (0.0, 0.1, 0.5, 1.0, 2.0, 3.0):
            asyncio.run(
                measure(
                    num_agents=32,
                    num_turns=3,
                    generation_s=2.0,
                    speculator_s=0.4,
                    tool_s=tool_s,
                    acceptance_rates=(0.0, 0.5, 0.8, 1.0),
                    num_repeats=1,
                )
            )


if __name__ == "__main__":
    main()

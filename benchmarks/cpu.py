"""Client CPU of a turn: stock, speculation off, and speculating."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

from benchmarks.agents import close_speculators, run_agents, search_function
from benchmarks.frameworks import Framework, add_options, load, speculator_of
from benchmarks.playback import models
from spectool_core import Speculation
from spectool_core.testing import ModelServerProcess

__all__ = ["main"]

NUM_TURNS = 3


async def measure(
    framework: Framework, way: str, num_agents: int, *, num_repeats: int, kind: str, generation_s: float
) -> None:
    """Print the medians over the repeats, all variants interleaved in one process."""
    script = models(num_turns=NUM_TURNS, generation_s=generation_s, speculator_s=generation_s / 5)
    with ModelServerProcess(script) as server:
        tools = [framework.tool(search_function(generation_s / 3))]

        def speculation(**settings: Any) -> Speculation:
            return Speculation([speculator_of(framework, kind, "small-1.0", server.base_url)], **settings)

        speculations = {
            "stock": None,
            "off": speculation(mode="off"),
            "no speculators": Speculation(),
            "one speculator": speculation(),
        }
        agents = {variant: framework.agent(way, server.base_url, tools, by) for variant, by in speculations.items()}
        cpu_ms: dict[str, list[float]] = {variant: [] for variant in agents}
        mean_s: dict[str, list[float]] = {variant: [] for variant in agents}
        for number in range(-1, num_repeats):
            # There and back, so that a machine that gets busier favours none.
            for variant in list(agents)[:: 1 if number % 2 else -1]:
                figures = await run_agents(
                    framework, agents[variant], num_agents, spread_s=generation_s, repeat=f"repeat {number}"
                )
                if number >= 0:
                    cpu_ms[variant].append(figures.cpu_ms_per_turn)
                    mean_s[variant].append(figures.mean_s)
        for variant in agents:
            added = [ours - base for ours, base in zip(cpu_ms[variant], cpu_ms["stock"], strict=True)]
            low, _, high = quantiles(added, n=4)
            print(
                f"{way:13s} {num_agents:2d} agents  {variant:15s} CPU {median(cpu_ms[variant]):6.2f} ms a turn"
                f" (least {min(cpu_ms[variant]):6.2f}), added {median(added):5.2f} ms ({low:5.2f} to {high:5.2f});"
                f" an agent {median(mean_s[variant]):6.3f} s,"
                f" {median(mean_s[variant]) / median(mean_s['stock']):5.3f} of stock",
                flush=True,
            )
        await close_speculators(by for by in speculations.values() if by is not None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--agents", type=int, action="append", help="default: 1 and 32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--generation-s", type=float, default=0.3, help="G; g is a fifth of it and T a third")
    given, _ = parser.parse_known_args(arguments)
    framework = load(given.framework)
    generation_s: float = given.generation_s
    print(f"{framework.name}, {given.speculator} speculator; G = {generation_s:g} s, g = {generation_s / 5:g} s,")
    print(f"T = {generation_s / 3:g} s, acceptance rate 1, {NUM_TURNS} tool turns and a final one;")
    print("medians, in brackets the quartiles of what is added within a repeat")
    asyncio.run(_all(framework, given.way or framework.ways, given))


async def _all(framework: Framework, ways: Sequence[str], given: argparse.Namespace) -> None:
    # On one event loop: clients that are not closed close themselves on it.
    for num_agents in given.agents or (1, 32):
        for way in ways:
            await measure(
                framework,
                way,
                num_agents,
                num_repeats=given.repeats,
                kind=given.speculator,
                generation_s=given.generation_s,
            )


if __name__ == "__main__":
    main()

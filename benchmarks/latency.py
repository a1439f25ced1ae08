"""Time saved over loopback HTTP, one agent and many, beside the paper's equations."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.agents import close_speculators, num_served, run_agents, search_function
from benchmarks.frameworks import Framework, add_options, load, speculator_of
from benchmarks.playback import models
from spectool_core import Speculation
from spectool_core.model import run_standard_time, run_time
from spectool_core.testing import ModelServerProcess

__all__ = ["main"]

NUM_TURNS = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """A number of agents, and the times of their models and tool."""

    num_agents: int
    generation_s: float
    speculator_s: float
    tool_s: float
    acceptance_rates: tuple[float, ...]

    @property
    def spread_s(self) -> float:
        """The time over which many agents start: that of a turn."""
        return self.generation_s + self.tool_s if self.num_agents > 1 else 0.0

    def predicted_speedup(self, num_hits: float, generation_s: float) -> float:
        """Equation (2) for a whole run of which `num_hits` calls were hits."""
        times = {"generation_s": generation_s, "tool_s": self.tool_s}
        without_s = run_time(NUM_TURNS, 0, speculator_s=self.speculator_s, **times)
        with_s = run_time(NUM_TURNS, NUM_TURNS, speculator_s=self.speculator_s, **times)
        return run_standard_time(NUM_TURNS, **times) / (without_s + (with_s - without_s) * num_hits / NUM_TURNS)


async def measure(framework: Framework, way: str, kind: str, cell: Cell, num_repeats: int) -> None:
    """Print a row for each acceptance rate: stock and speculative, interleaved, medians over the repeats."""
    script = models(
        num_turns=NUM_TURNS,
        generation_s=cell.generation_s,
        speculator_s=cell.speculator_s,
        acceptance_rates=cell.acceptance_rates,
    )
    with ModelServerProcess(script) as server:
        tools = [framework.tool(search_function(cell.tool_s))]
        speculations = {
            alpha: Speculation([speculator_of(framework, kind, f"small-{alpha}", server.base_url)])
            for alpha in cell.acceptance_rates
        }
        stock = framework.agent(way, server.base_url, tools, None)
        ours = {alpha: framework.agent(way, server.base_url, tools, by) for alpha, by in speculations.items()}
        for agent in (stock, *ours.values()):
            await run_agents(framework, agent, cell.num_agents, spread_s=cell.spread_s, repeat="warm-up")
        stock_s: list[float] = []
        ours_s: dict[float, list[float]] = {alpha: [] for alpha in ours}
        served = {alpha: -num_served(by) for alpha, by in speculations.items()}
        for number in range(num_repeats):
            repeat = f"repeat {number}"
            base = await run_agents(framework, stock, cell.num_agents, spread_s=cell.spread_s, repeat=repeat)
            stock_s.append(base.mean_s)
            for alpha, agent in ours.items():
                figures = await run_agents(framework, agent, cell.num_agents, spread_s=cell.spread_s, repeat=repeat)
                if figures.transcripts != base.transcripts:
                    raise AssertionError("transcripts differ")
                ours_s[alpha].append(figures.mean_s)
        for alpha, by in speculations.items():
            num_hits = (served[alpha] + num_served(by)) / (num_repeats * cell.num_agents)
            _print_row(cell, alpha, num_hits, stock_s, ours_s[alpha])
        await close_speculators(speculations.values())


def _print_row(cell: Cell, alpha: float, num_hits: float, stock_s: list[float], ours_s: list[float]) -> None:
    predicted = cell.predicted_speedup(num_hits, cell.generation_s)
    # What a turn takes beside its tool: the model's answer, and the framework's own time on this machine.
    stock_generation_s = (median(stock_s) - NUM_TURNS * cell.tool_s) / (NUM_TURNS + 1)
    predicted_here = cell.predicted_speedup(num_hits, stock_generation_s)
    ratio = median(stock_s) / median(ours_s)
    ratios = [ours / stock for ours, stock in zip(ours_s, stock_s, strict=True)]
    saved, saved_predicted = 1 - 1 / ratio, 1 - 1 / predicted
    share = f"{saved / saved_predicted:6.2f}" if saved_predicted > 0 else "     -"
    print(
        f"{cell.num_agents:6d} {cell.generation_s:5.2f} {cell.speculator_s:5.2f} {cell.tool_s:5.2f} {alpha:5.2f}"
        f" {num_hits / NUM_TURNS:6.2f} {median(stock_s):8.3f} {median(ours_s):8.3f}"
        f" {1 / ratio:7.3f} {min(ratios):6.3f} {max(ratios):6.3f} {ratio:8.3f} {predicted:9.3f}"
        f" {ratio / predicted:7.3f} {ratio / predicted_here:6.3f}"
        f" {100 * saved:6.1f} {100 * saved_predicted:6.1f} {share}",
        flush=True,
    )


HEADER = (
    "agents     G     g     T alpha   hits  stock s  spec. s spec/st    min    max"
    "  speedup  equation of eq.  own G saved%    eq.% of eq."
)


def _one_agent() -> Iterable[Cell]:
    for generation_s in (0.5, 1.0, 2.0):
        for share in (0.5, 1.0, 2.0):
            yield Cell(1, generation_s, generation_s / 5, generation_s * share, (1.0,))


def _many_agents() -> Iterable[Cell]:
    for tool_s in (0.0, 0.1, 0.5, 1.0, 2.0, 3.0):
        yield Cell(32, 2.0, 0.4, tool_s, (0.0, 0.5, 0.8, 1.0))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--agents", type=int, choices=(1, 32), action="append", help="default: both")
    parser.add_argument("--repeats", type=int, help="default: 3 of one agent, 1 where G = 2 s and of many")
    parser.add_argument("--generation-s", type=float, action="append", help="G, to measure some cells only")
    parser.add_argument("--tool-s", type=float, action="append", help="T, to measure some cells only")
    given, _ = parser.parse_known_args(arguments)
    cells = [
        cell
        for cell in (*_one_agent(), *_many_agents())
        if cell.num_agents in (given.agents or (1, 32))
        and cell.generation_s in (given.generation_s or (cell.generation_s,))
        and cell.tool_s in (given.tool_s or (cell.tool_s,))
    ]
    framework = load(given.framework)
    print("Means over agents, medians over repeats; equation (2) with the hits that came true and the final turn;")
    print("min and max: the ratio within a repeat; own G: of the equation with the G that the stock runs had.")
    asyncio.run(_all(framework, given.way or framework.timed_ways, given.speculator, cells, given.repeats))


async def _all(
    framework: Framework, ways: Sequence[str], kind: str, cells: Sequence[Cell], num_repeats: int | None
) -> None:
    # On one event loop: clients that are not closed close themselves on it.
    for way in ways:
        print(f"{framework.name}, {way}, {kind} speculator")
        print(HEADER)
        for cell in cells:
            default = 3 if cell.generation_s < 2 else 1
            await measure(framework, way, kind, cell, num_repeats or default)


if __name__ == "__main__":
    main()

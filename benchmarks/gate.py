"""Whether speculation is ever slower: named cells over loopback HTTP, after the gate has had twenty turns to learn.

In each cell two stock populations and a speculative one take the same conversations. Populations that leave the event
loop mostly idle run side by side, as do the cells of that kind; those that fill it take turns, round after round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from benchmarks.agents import close_speculators, num_served, run_agents, search_function
from benchmarks.frameworks import Framework, add_options, load, speculator_of
from benchmarks.playback import MAIN, Script
from spectool_core import Speculation
from spectool_core.model import run_standard_time, run_time
from spectool_core.testing import ModelServerProcess, ScriptedModel

__all__ = ["main"]

NUM_TURNS = 3  # tool turns of a conversation, which ends with an answer
_WARM_UP_TURNS = 20
_MAX_IDLE_LOAD = 0.35
_MAX_LOAD_SIDE_BY_SIDE = 0.035


@dataclass(frozen=True, slots=True)
class Cell:
    """The conditions of a population of agents; `thinks`: the model's first token comes late."""

    name: str
    num_agents: int
    generation_s: float
    speculator_share: float
    tool_s: float
    acceptance_rate: float
    thinks: bool = False

    @property
    def conversation_s(self) -> float:
        """What a conversation takes without speculation, on an idle machine."""
        return NUM_TURNS * (self.generation_s + self.tool_s) + self.generation_s

    @property
    def load(self) -> float:
        """The share of the event loop that the population would use at ten milliseconds of CPU a turn."""
        return self.num_agents * (NUM_TURNS + 1) * 0.01 / self.conversation_s

    def models(self) -> dict[str, ScriptedModel]:
        """The main model and the speculator."""
        script = Script(NUM_TURNS)
        total_s = self.generation_s
        timing: dict[str, Any] = {"generation_s": total_s}
        if self.thinks:
            timing = {"time_to_first_token_s": 0.8 * total_s, "seconds_per_token": 0.2 * total_s / 40}
        small = ScriptedModel(
            script, generation_s=self.speculator_share * total_s, acceptance_rate=self.acceptance_rate
        )
        return {MAIN: ScriptedModel(script, **timing), "small": small}


CELLS = (
    Cell("nothing to gain: instant tool", 1, 0.3, 0.1, 0.0, 1.0),
    Cell("nothing to gain: never right", 1, 0.3, 0.1, 0.5, 0.0),
    Cell("nothing to gain: speculator as slow", 1, 0.3, 1.0, 0.5, 1.0),
    Cell("nothing to gain: speculator slower", 1, 0.3, 2.0, 0.5, 1.0),
    Cell("quick model, quick tool", 1, 0.1, 0.1, 0.05, 0.8),
    Cell("quick model, slow tool", 1, 0.1, 0.5, 3.0, 0.8),
    Cell("slow model, quick tool", 1, 6.0, 0.1, 0.1, 0.5, thinks=True),
    Cell("slow model, slow tool", 1, 6.0, 0.5, 3.0, 1.0, thinks=True),
    Cell("balanced, always right", 1, 1.0, 0.1, 1.0, 1.0),
    Cell("balanced, thinks, half right", 1, 1.0, 0.5, 1.0, 0.5, thinks=True),
    Cell("balanced, seldom right", 1, 2.0, 0.1, 2.0, 0.2),
    Cell("eight, balanced", 8, 1.0, 0.1, 1.0, 0.8),
    Cell("eight, thinks, slow tool", 8, 2.0, 0.5, 3.0, 0.5, thinks=True),
    Cell("eight, never right", 8, 1.0, 0.1, 0.5, 0.0),
    Cell("eight, quick all", 8, 0.1, 0.1, 0.05, 0.8),
    Cell("eight, instant tool", 8, 0.3, 0.5, 0.0, 1.0),
    Cell("eight, speculator slower", 8, 0.3, 2.0, 0.1, 1.0),
    Cell("many, saturated, instant tool", 32, 0.1, 0.1, 0.0, 1.0),
    Cell("many, saturated, quick tool", 32, 0.1, 0.5, 0.1, 0.8),
    Cell("many, saturated, never right", 32, 0.1, 0.1, 0.5, 0.0),
    Cell("many, busy, slow tool", 32, 0.3, 0.1, 1.0, 0.8),
    Cell("many, balanced", 32, 2.0, 0.1, 2.0, 0.8),
    Cell("many, thinks, seldom right", 32, 2.0, 0.5, 0.5, 0.2, thinks=True),
    Cell("many, slow model", 32, 6.0, 0.1, 3.0, 1.0, thinks=True),
)


@dataclass(slots=True)
class Population:
    """Agents that take conversations one after the other; seconds of each round, and its hits."""

    agent: Any
    speculation: Speculation | None = None
    rounds_s: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)

    async def take(self, framework: Framework, cell: Cell, repeat: str, *, alone: bool) -> None:
        """One round: each agent takes one conversation."""
        before = num_served(self.speculation) if self.speculation is not None else 0
        spread_s = cell.generation_s + cell.tool_s if cell.num_agents > 1 else 0.0
        figures = await run_agents(
            framework, self.agent, cell.num_agents, spread_s=spread_s, repeat=repeat, alone=alone
        )
        self.rounds_s.append(figures.mean_s)
        after = num_served(self.speculation) if self.speculation is not None else 0
        self.hits.append((after - before) / cell.num_agents)


async def measure(
    framework: Framework, way: str, cell: Cell, server: ModelServerProcess, *, num_rounds: int, side_by_side: bool
) -> None:
    """Print the row of one cell."""
    num_warm_up = -(-_WARM_UP_TURNS // (NUM_TURNS + 1))
    tools = [framework.tool(search_function(cell.tool_s))]
    speculation = Speculation([speculator_of(framework, "lean", "small", server.base_url)])
    stock, again = (Population(framework.agent(way, server.base_url, tools, None)) for _ in range(2))
    ours = Population(framework.agent(way, server.base_url, tools, speculation), speculation)
    load = 0.0
    for number in range(num_warm_up + num_rounds):
        repeat = f"round {number}"
        if side_by_side:
            await asyncio.gather(*(each.take(framework, cell, repeat, alone=False) for each in (stock, ours, again)))
            continue
        for each in (stock, ours, again):
            started_s, cpu_s = time.monotonic(), time.thread_time()
            await each.take(framework, cell, repeat, alone=True)
            if each is stock:
                load = (time.thread_time() - cpu_s) / (time.monotonic() - started_s)
    for each in (stock, ours, again):
        del each.rounds_s[:num_warm_up], each.hits[:num_warm_up]
    _print_row(cell, stock, ours, again, load)
    await close_speculators([speculation])


def _print_row(cell: Cell, stock: Population, ours: Population, again: Population, load: float) -> None:
    ratio = median(ours.rounds_s) / median(stock.rounds_s)
    spread = max(1.0, median(again.rounds_s) / median(stock.rounds_s), median(stock.rounds_s) / median(again.rounds_s))
    generation_s = (median(stock.rounds_s) - NUM_TURNS * cell.tool_s) / (NUM_TURNS + 1)
    times = {"generation_s": generation_s, "tool_s": cell.tool_s}
    held = ours.speculation.statistics().assessments if ours.speculation is not None else ()
    measured_s = [each.speculator_s for each in held if each.speculator_s is not None]
    speculator_s = min(measured_s, default=cell.speculator_share * cell.generation_s)
    hits = mean(ours.hits)
    without_s = run_time(NUM_TURNS, 0, speculator_s=speculator_s, **times)
    with_s = run_time(NUM_TURNS, NUM_TURNS, speculator_s=speculator_s, **times)
    expected = (without_s + (with_s - without_s) * hits / NUM_TURNS) / run_standard_time(NUM_TURNS, **times)
    on = "on" if any(each.on for each in held) else "off"
    print(
        f"{cell.name:38s} {cell.num_agents:3d} {cell.generation_s:4.1f} {cell.speculator_share:4.1f} {cell.tool_s:5.2f}"
        f" {cell.acceptance_rate:5.2f} {'yes' if cell.thinks else 'no':>6s} {hits / NUM_TURNS:5.2f} {on:>4s}"
        f" {median(stock.rounds_s):8.3f} {ratio:7.3f} {spread:7.3f} {expected:8.3f} {load:5.2f}",
        flush=True,
    )


HEADER = f"{'cell':38s} agt    G  g/G     T alpha thinks  hits gate  stock s   ratio  spread equation  load"


async def _all(framework: Framework, way: str, cells: Sequence[Cell], num_rounds: int) -> None:
    idle = sorted((cell for cell in cells if cell.load < _MAX_IDLE_LOAD / 8), key=lambda cell: cell.conversation_s)
    for together in _packed(idle):
        # Servers start and stop while nothing is measured: that blocks the event loop.
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(ModelServerProcess(cell.models())) for cell in together]
            await asyncio.gather(
                *(
                    measure(framework, way, cell, server, num_rounds=num_rounds, side_by_side=True)
                    for cell, server in zip(together, servers, strict=True)
                )
            )
    for cell in cells:
        if cell not in idle:
            with ModelServerProcess(cell.models()) as server:
                side_by_side = cell.load < _MAX_IDLE_LOAD / 3
                await measure(framework, way, cell, server, num_rounds=num_rounds, side_by_side=side_by_side)


def _packed(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells in groups, in their order, each of which leaves the event loop mostly idle."""
    groups: list[list[Cell]] = []
    for cell in cells:
        if not groups or sum(other.load for other in groups[-1]) + cell.load > _MAX_LOAD_SIDE_BY_SIDE:
            groups.append([])
        groups[-1].append(cell)
    return groups


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=3, help="measured conversations of each agent")
    parser.add_argument("--cell", action="append", help="a part of a cell's name, to measure some only")
    given, _ = parser.parse_known_args(arguments)
    framework = load(given.framework)
    cells = [cell for cell in CELLS if not given.cell or any(part in cell.name for part in given.cell)]
    print("ratio: speculative over stock time, medians over rounds after 20 turns; spread: stock over stock;")
    print("equation: the same by equation (2) with the hits and the G that were measured; load: of the event loop.")
    for way in given.way or framework.timed_ways[:1]:
        print(f"{given.framework}, {way}")
        print(HEADER)
        started_s = time.monotonic()
        asyncio.run(_all(framework, way, cells, given.rounds))
        print(f"{time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()

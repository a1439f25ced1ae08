"""Agents over loopback HTTP, stock and speculative, many on one event loop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from benchmarks.frameworks import Framework
from spectool_core import ModelSpeculator, Speculation, speculatable

__all__ = ["AgentFigures", "close_speculators", "num_served", "run_agents", "search_function"]


@dataclass(frozen=True, slots=True)
class AgentFigures:
    """One run of a number of agents: mean seconds of an agent, and client CPU of a turn (a model call)."""

    mean_s: float
    cpu_ms_per_turn: float
    transcripts: tuple[tuple[str, ...], ...]


def search_function(tool_s: float) -> Callable[..., Coroutine[Any, Any, str]]:
    """A marked function that takes `tool_s` seconds and no CPU."""

    @speculatable(max_concurrency=1000)
    async def search(query: str) -> str:
        """Search the archive."""
        await asyncio.sleep(tool_s)
        return f"Results of {query}"

    return search


async def run_agents(
    framework: Framework, agent: Any, num_agents: int, *, spread_s: float, repeat: str, alone: bool = True
) -> AgentFigures:
    """Run `num_agents` conversations at once, their starts spread evenly over `spread_s` seconds.

    Unless they are `alone` on the event loop, others would wait for a collection of garbage, so there is none before.
    """

    async def one(index: int) -> tuple[float, tuple[str, ...]]:
        await asyncio.sleep(spread_s * index / num_agents)
        started_s = time.perf_counter()
        transcript = await framework.run(agent, f"task {index} of {repeat}")
        return time.perf_counter() - started_s, transcript

    if alone:
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


async def close_speculators(speculations: Iterable[Speculation]) -> None:
    """Close the connections of the lean speculators; LLMs of the frameworks close their own."""
    for speculation in speculations:
        for speculator in speculation.speculators:
            if isinstance(speculator, ModelSpeculator):
                await speculator.aclose()


def num_served(speculation: Speculation) -> int:
    """Calls served by early runs so far."""
    total = speculation.statistics().total
    return total.num_hits + total.num_joins

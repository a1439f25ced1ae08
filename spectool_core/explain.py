"""Why each speculator is asked or not and each tool is run early or not, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spectool_core.appraisal import Assessment, Traits
from spectool_core.config import validated_config
from spectool_core.events import Event, TurnStarted
from spectool_core.gate import Gate
from spectool_core.statistics import Counters, SourceStatistics, SpeculationStatistics, ToolStatistics

__all__ = ["explain", "replayed"]

_RESTING = {
    "failed": "rests until the main model's next call of it succeeds: its last early run failed",
    "not_replayable": "rests for good: an early run did what a hit could not repeat",
}


def replayed(events: Iterable[Event]) -> SpeculationStatistics:
    """The statistics that a `Speculation` with default settings would give after these events."""
    gate, counters = Gate(validated_config()), Counters()
    for event in events:
        if isinstance(event, TurnStarted):
            gate.skipped(event.tools, dict.fromkeys(event.speculators, Traits()), event.load, event.time_s)
        gate(event)
        counters(event)
    return counters.snapshot(tuple(gate.assessments()))


def explain(statistics: SpeculationStatistics) -> str:
    """Lines of text; see `SpeculationStatistics.assessments`."""
    return "\n".join(_lines(statistics))


def _lines(statistics: SpeculationStatistics) -> Iterator[str]:
    yield f"{statistics.num_turns} turns, {statistics.num_launched} early runs, {statistics.num_wasted} of them wasted"
    for name, tool in sorted(statistics.tools.items()):
        yield from _tool(name, tool, statistics.resting.get(name))
    for name, source in sorted(statistics.speculators.items()):
        yield from _source(name, source)
        for assessment in statistics.assessments:
            if assessment.speculator == name:
                yield from _assessment(assessment)


def _tool(name: str, tool: ToolStatistics, resting: str | None) -> Iterator[str]:
    yield ""
    yield f"tool {name}: {_RESTING.get(resting or '', 'may run early')}"
    yield (
        f"  {tool.num_hits} hits, {tool.num_joins} joins, {tool.num_misses} misses; "
        f"{tool.num_speculative_runs} early runs, {tool.num_skipped} predictions not run; {tool.saved_s:.2f} s saved"
    )


def _source(name: str, source: SourceStatistics) -> Iterator[str]:
    yield ""
    yield f"speculator {name}: asked in {source.num_turns} turns, not asked in {source.num_skipped_turns}"
    yield (
        f"  {source.num_right} of {source.num_predictions} predictions came true; "
        f"{source.num_hits} calls served, {source.saved_s:.2f} s saved"
    )


def _assessment(held: Assessment) -> Iterator[str]:
    yield f"  {'on' if held.on else 'off'} for the tools {', '.join(held.agent)}: {held.reason}"
    if held.generation_s is not None:
        slower = f", {held.slowdown:.0%} slower while it is asked" if held.slowdown else ""
        soon = f"; a prediction takes {held.speculator_s:.3f} s" if held.speculator_s is not None else ""
        yield f"    the main model takes {held.generation_s:.3f} s{slower}{soon}"
    for tool, share in sorted(held.acceptance.items()):
        takes = f", which takes {held.tool_s[tool]:.3f} s" if tool in held.tool_s else ""
        yield f"    {share:.0%} of turns: a call of {tool}{takes}, is predicted"

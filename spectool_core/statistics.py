"""Counts of what speculation did, as frozen values; ratios other than the acceptance rate are left to the reader."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from spectool_core.events import (
    CallResolved,
    Event,
    LaunchSkipped,
    RunFinished,
    SpeculatorFinished,
    ToolObserved,
    TurnAnswered,
    TurnSettled,
    TurnStarted,
)

__all__ = ["Counters", "SpeculationStatistics", "ToolStatistics"]


@dataclass(frozen=True, slots=True)
class ToolStatistics:
    """What happened to one tool's calls, by tool name.

    Every call of the main model is one of hit, join or miss; `num_predicted` of them a speculator had named in time.
    Every speculative run is one of succeeded, failed, timed out, not replayable or cancelled.
    """

    num_hits: int = 0
    num_joins: int = 0
    num_misses: int = 0
    num_predicted: int = 0
    num_skipped: int = 0
    num_runs_succeeded: int = 0
    num_runs_failed: int = 0
    num_runs_timed_out: int = 0
    num_runs_not_replayable: int = 0
    num_runs_cancelled: int = 0
    num_real_runs: int = 0
    saved_s: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the main model's calls that a speculator named in time; None before the first call."""
        num_calls = self.num_hits + self.num_joins + self.num_misses
        return self.num_predicted / num_calls if num_calls else None

    @property
    def num_speculative_runs(self) -> int:
        """Runs that ended, however they ended."""
        return (
            self.num_runs_succeeded
            + self.num_runs_failed
            + self.num_runs_timed_out
            + self.num_runs_not_replayable
            + self.num_runs_cancelled
        )


@dataclass(frozen=True, slots=True)
class SpeculationStatistics:
    """Counts over the life of one `Speculation`.

    `num_launched` runs were begun or queued; `num_wasted` of them served no call of the main model.
    """

    num_turns: int = 0
    num_answered_turns: int = 0
    num_settled_turns: int = 0
    num_launched: int = 0
    num_wasted: int = 0
    num_predictions: int = 0
    num_speculators_cancelled: int = 0
    num_speculators_failed: int = 0
    tools: Mapping[str, ToolStatistics] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def total(self) -> ToolStatistics:
        """The sum over all tools."""
        return ToolStatistics(
            **{f.name: sum(getattr(tool, f.name) for tool in self.tools.values()) for f in fields(ToolStatistics)}
        )


class Counters:
    """Adds up events from any thread; `snapshot` gives the frozen sums."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, int] = {}
        self._tools: dict[str, dict[str, float]] = {}

    def __call__(self, event: Event) -> None:
        """Count one event."""
        with self._lock:
            match event:
                case TurnStarted():
                    self._add("num_turns")
                case TurnAnswered():
                    self._add("num_answered_turns")
                case TurnSettled():
                    self._add("num_settled_turns")
                    self._add("num_launched", event.num_launched)
                    self._add("num_wasted", event.num_wasted)
                case SpeculatorFinished():
                    self._add("num_predictions", event.num_calls)
                    if event.outcome != "finished":
                        self._add(f"num_speculators_{event.outcome}")
                case LaunchSkipped():
                    self._add_tool(event.tool, "num_skipped")
                case RunFinished():
                    self._add_tool(event.tool, f"num_runs_{event.outcome}")
                case CallResolved():
                    self._add_tool(event.tool, _RESOLVED[event.outcome])
                    self._add_tool(event.tool, "num_predicted", int(event.predicted))
                    self._add_tool(event.tool, "saved_s", event.saved_s)
                case ToolObserved():
                    self._add_tool(event.tool, "num_real_runs")

    def _add(self, name: str, amount: int = 1) -> None:
        self._sums[name] = self._sums.get(name, 0) + amount

    def _add_tool(self, tool: str, name: str, amount: float = 1) -> None:
        if tool not in self._tools and len(self._tools) >= _MAX_TOOLS:
            tool = _OTHER_TOOLS
        sums = self._tools.setdefault(tool, {})
        sums[name] = sums.get(name, 0) + amount

    def snapshot(self) -> SpeculationStatistics:
        """The sums so far."""
        with self._lock:
            tools = {name: ToolStatistics(**sums) for name, sums in self._tools.items()}  # type: ignore[arg-type]
            return SpeculationStatistics(tools=MappingProxyType(tools), **self._sums)


_MAX_TOOLS = 1024
_OTHER_TOOLS = "(other)"
"""Where tools beyond `_MAX_TOOLS` are counted: speculators invent names without end."""

_RESOLVED = {"hit": "num_hits", "join": "num_joins", "miss": "num_misses"}

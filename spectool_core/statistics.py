"""Counts of what speculation did, as frozen values; ratios other than the acceptance rate are left to the reader."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from spectool_core.appraisal import Assessment
from spectool_core.events import (
    CallPredicted,
    CallResolved,
    EngineUnavailable,
    Event,
    LaunchSkipped,
    OutputsPosted,
    RunFinished,
    SpeculatorFinished,
    SpeculatorSkipped,
    StreamAborted,
    ToolObserved,
    TurnAnswered,
    TurnAttached,
    TurnInjected,
    TurnSettled,
    TurnStarted,
)

__all__ = ["Counters", "EngineStatistics", "SourceStatistics", "SpeculationStatistics", "ToolStatistics"]


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
class SourceStatistics:
    """What one speculator did, by its name.

    In `num_turns` it was asked, in `num_skipped_turns` it was not, since that would not have paid. Of its
    `num_predictions` that could be run early, `num_right` were calls that the main model made; several speculators may
    have named the same call. `num_hits` and `saved_s` are those of the runs that it started.
    """

    num_turns: int = 0
    num_skipped_turns: int = 0
    num_predictions: int = 0
    num_right: int = 0
    num_hits: int = 0
    saved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What engine mode did.

    The engine went on by itself `num_injected` times; `num_attached` of these turns were read from its stream, each a
    chat request less. In `num_posts` posts there were `num_outputs_posted` tool outputs. `num_aborted` streams were
    closed early; `num_unavailable` turns fell back to client mode.
    """

    num_posts: int = 0
    num_outputs_posted: int = 0
    num_injected: int = 0
    num_attached: int = 0
    num_aborted: int = 0
    num_unavailable: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationStatistics:
    """Counts over the life of one `Speculation`.

    `num_launched` runs were begun or queued; `num_wasted` of them served no call of the main model. `speculators` says
    which speculator earned what; `assessments` why each is asked or not; `resting` which tools are not run early, since
    an early run of them "failed" or was "not_replayable"; `engine` what engine mode did.
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
    speculators: Mapping[str, SourceStatistics] = field(default_factory=lambda: MappingProxyType({}))
    resting: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    assessments: tuple[Assessment, ...] = ()
    engine: EngineStatistics = EngineStatistics()

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
        self._sums: Counter[str] = Counter()
        self._tools: dict[str, dict[str, float]] = {}
        self._speculators: dict[str, dict[str, float]] = {}
        self._engine: Counter[str] = Counter()
        self._resting: dict[str, str] = {}

    def __call__(self, event: Event) -> None:
        """Count one event."""
        with self._lock:
            match event:
                case TurnStarted() | TurnAnswered() | TurnSettled():
                    self._count_turn(event)
                case SpeculatorSkipped() | SpeculatorFinished() | CallPredicted():
                    self._count_speculator(event)
                case OutputsPosted() | TurnInjected() | TurnAttached() | StreamAborted() | EngineUnavailable():
                    self._count_engine(event)
                case LaunchSkipped():
                    self._add_tool(event.tool, "num_skipped")
                case RunFinished():
                    self._add_tool(event.tool, f"num_runs_{event.outcome}")
                    if event.outcome in ("failed", "not_replayable") and len(self._resting) < _MAX_TOOLS:
                        self._resting[event.tool] = event.outcome
                case CallResolved():
                    self._count_call(event)
                case ToolObserved():
                    self._add_tool(event.tool, "num_real_runs")
                    if event.succeeded and self._resting.get(event.tool) == "failed":
                        del self._resting[event.tool]

    def _count_turn(self, event: TurnStarted | TurnAnswered | TurnSettled) -> None:
        match event:
            case TurnStarted():
                self._sums["num_turns"] += 1
                for name in event.speculators:
                    self._add_source(name, "num_turns")
            case TurnAnswered():
                self._sums["num_answered_turns"] += 1
                for source, _ in event.came_true:
                    self._add_source(source, "num_right")
            case TurnSettled():
                self._sums["num_settled_turns"] += 1
                self._sums["num_launched"] += event.num_launched
                self._sums["num_wasted"] += event.num_wasted

    def _count_speculator(self, event: SpeculatorSkipped | SpeculatorFinished | CallPredicted) -> None:
        match event:
            case SpeculatorSkipped():
                self._add_source(event.speculator, "num_turns", -1)
                self._add_source(event.speculator, "num_skipped_turns")
            case SpeculatorFinished():
                self._sums["num_predictions"] += event.num_calls
                if event.outcome != "finished":
                    self._sums[f"num_speculators_{event.outcome}"] += 1
            case CallPredicted():
                self._add_source(event.source, "num_predictions")

    def _count_engine(
        self, event: OutputsPosted | TurnInjected | TurnAttached | StreamAborted | EngineUnavailable
    ) -> None:
        match event:
            case OutputsPosted():
                self._engine["num_posts"] += 1
                self._engine["num_outputs_posted"] += event.num_outputs
            case TurnInjected():
                self._engine["num_injected"] += 1
            case TurnAttached():
                self._engine["num_attached"] += 1
            case StreamAborted():
                self._engine["num_aborted"] += 1
            case EngineUnavailable():
                self._engine["num_unavailable"] += 1

    def _count_call(self, event: CallResolved) -> None:
        self._add_tool(event.tool, _RESOLVED[event.outcome])
        self._add_tool(event.tool, "num_predicted", int(event.predicted))
        self._add_tool(event.tool, "saved_s", event.saved_s)
        if event.source is not None:
            self._add_source(event.source, "num_hits")
            self._add_source(event.source, "saved_s", event.saved_s)

    def _add_tool(self, tool: str, name: str, amount: float = 1) -> None:
        if tool not in self._tools and len(self._tools) >= _MAX_TOOLS:
            tool = _OTHER_TOOLS
        sums = self._tools.setdefault(tool, {})
        sums[name] = sums.get(name, 0) + amount

    def _add_source(self, source: str, name: str, amount: float = 1) -> None:
        sums = self._speculators.setdefault(source, {})
        sums[name] = sums.get(name, 0) + amount

    def snapshot(self, assessments: tuple[Assessment, ...] = ()) -> SpeculationStatistics:
        """The sums so far, with the `assessments` that go with them."""
        with self._lock:
            tools = {name: ToolStatistics(**sums) for name, sums in self._tools.items()}  # type: ignore[arg-type]
            speculators = {name: SourceStatistics(**sums) for name, sums in self._speculators.items()}  # type: ignore[arg-type]
            return SpeculationStatistics(
                tools=MappingProxyType(tools),
                speculators=MappingProxyType(speculators),
                resting=MappingProxyType(dict(self._resting)),
                assessments=assessments,
                engine=EngineStatistics(**self._engine),
                **self._sums,
            )


_MAX_TOOLS = 1024
_OTHER_TOOLS = "(other)"
"""Where tools beyond `_MAX_TOOLS` are counted: speculators invent names without end."""

_RESOLVED = {"hit": "num_hits", "join": "num_joins", "miss": "num_misses"}

"""Two runs of one task, stock and speculative: are they the same run, what was gained, and how does it look?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from examples.demo.agent import AgentRun
from examples.demo.report import Measurement
from examples.demo.timeline import Chart, Span
from examples.demo.turns import Turn
from spectool_core.events import CallResolved, LaunchSkipped, SpeculatorFinished, TurnSettled

__all__ = ["Comparison"]

_UNMARKED = "save_note"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The stock and the speculative run of one task."""

    title: str
    stock: AgentRun
    speculative: AgentRun

    @property
    def is_same_run(self) -> bool:
        """Whether both have the same transcript and the same notes."""
        stock, speculative = self.stock, self.speculative
        return stock.transcript == speculative.transcript and stock.notes == speculative.notes

    @property
    def num_early_writes(self) -> int:
        """Runs of the unmarked tool that began before the main model had asked; none, if the library keeps its word."""
        return sum(
            run.tool == _UNMARKED for turn in self.speculative.turns for run in turn.tool_runs if turn.early(run)
        )

    @property
    def num_predicted_writes(self) -> int:
        """How often the speculator predicted the unmarked tool."""
        skipped = [event for event in self.speculative.events if isinstance(event, LaunchSkipped)]
        return sum(event.tool == _UNMARKED for event in skipped)

    @property
    def num_early_runs(self) -> int:
        """Tool runs that began before the main model had answered."""
        return sum(turn.early(run) is not None for turn in self.speculative.turns for run in turn.tool_runs)

    def measurement(self) -> Measurement:
        """The numbers of the report."""
        events = self.speculative.events
        resolved = [event for event in events if isinstance(event, CallResolved)]
        predictions = [event for event in events if isinstance(event, SpeculatorFinished)]
        generation_s = fmean(turn.answered_s - turn.started_s for turn in self.stock.turns)
        in_time_s = [event.ended_s - event.started_s for event in predictions if event.outcome == "finished"]
        with_calls = [turn for turn in self.speculative.turns if turn.calls]
        return Measurement(
            self.title,
            num_turns=len(with_calls),
            num_calls=len(resolved),
            num_hits=sum(event.outcome != "miss" for event in resolved),
            num_hit_turns=sum(all(turn.served(call) for call in turn.calls) for turn in with_calls),
            num_wasted=sum(event.num_wasted for event in events if isinstance(event, TurnSettled)),
            stock_s=self.stock.duration_s,
            speculative_s=self.speculative.duration_s,
            generation_s=generation_s,
            speculator_s=fmean(in_time_s) if in_time_s else generation_s,
            tool_s=_mean_tool_time(self.stock),
            num_prompt_tokens=self.speculative.num_prompt_tokens,
            num_completion_tokens=self.speculative.num_completion_tokens,
        )

    def charts(self) -> list[Chart]:
        """Both runs as charts on one axis."""
        return [Chart("stock", list(_spans(self.stock))), Chart("speculative", list(_spans(self.speculative)))]


def _mean_tool_time(run: AgentRun) -> float:
    slowest = [max(each.ended_s - each.started_s for each in turn.tool_runs) for turn in run.turns if turn.tool_runs]
    return fmean(slowest) if slowest else 0.0


def _spans(run: AgentRun) -> Iterator[Span]:
    began_s = run.turns[0].started_s
    for turn in run.turns:
        yield Span("main model", str(turn.number), turn.started_s - began_s, turn.answered_s - began_s, "model")
    for event in run.events:
        if isinstance(event, SpeculatorFinished):
            label = str(event.turn)
            yield Span("speculator", label, event.started_s - began_s, event.ended_s - began_s, "speculator")
    for turn in run.turns:
        yield from _tool_spans(turn, began_s)


def _tool_spans(turn: Turn, began_s: float) -> Iterator[Span]:
    asked = [name for name, _ in turn.calls]
    for run in sorted(turn.tool_runs, key=lambda run: asked.index(run.tool) if run.tool in asked else len(asked)):
        early = turn.early(run)
        label = early if early in ("hit", "join") else ""
        yield Span(run.tool, label, run.started_s - began_s, run.ended_s - began_s, early or "tool")

"""The gate: which speculators are asked, and which of their predictions are run. Thread-safe.

It hears every event and learns from them alone, so a record of events tells what it held and why.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from spectool_core.annotation import ToolPolicy
from spectool_core.appraisal import Appraisal, Assessment, Predicted, Traits, TurnRecord
from spectool_core.budget import Budget
from spectool_core.config import SpeculationConfig
from spectool_core.events import (
    CallPredicted,
    Event,
    RunFinished,
    SpeculatorSkipped,
    ToolObserved,
    TurnAnswered,
    TurnSettled,
    TurnStarted,
)
from spectool_core.identity import WeakIdentityMap
from spectool_core.load import Load

__all__ = ["Gate"]


class Gate:
    """Decides for one `Speculation`.

    A tool whose speculative run failed rests until a call of the main model to it succeeded; one that emits what
    cannot be replayed rests for good.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self.budget = Budget(config)
        self._config = config
        self._lock = threading.Lock()
        self._appraisal = Appraisal()
        self._turns: dict[int, TurnRecord] = {}
        self._started_s: dict[int, float] = {}
        self._traits: dict[str, Traits] = {}
        self._load = Load()
        self._resting: WeakIdentityMap[bool] = WeakIdentityMap()

    def skipped(
        self, tools: tuple[str, ...], speculators: Mapping[str, Traits], load: Load, now_s: float
    ) -> dict[str, str]:
        """The speculators that are not asked in a turn, and why.

        Args:
            tools: names of the tools that are offered.
            speculators: all that could be asked.
            load: how busy the event loop is.
            now_s: the loop's time.
        """
        limit = self.budget.prediction_limit(now_s)
        if limit is not None:
            return dict.fromkeys(speculators, limit)
        if not self._config.adaptive:
            return {}
        with self._lock:
            self._load = load
            self._traits.update(speculators)
            reasons = {
                name: self._appraisal.reason_not_to_ask(tools, name, traits, load)
                for name, traits in speculators.items()
            }
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def is_likely(self, probability: float | None) -> bool:
        """Whether a call of this probability may be run early; a speculator that names none is taken at its word."""
        return probability is None or probability >= self._config.min_probability

    def objection(self, policy: ToolPolicy, probability: float | None, worth_s: float) -> str | None:
        """Why a predicted call is not worth a run: it is not likely enough, or costs more than it saves."""
        if not self.is_likely(probability):
            return "unlikely"
        value = self._config.value_per_s
        if value is not None and worth_s * value < policy.cost:
            return "too_costly"
        return None

    def worth_s(self, turn: int, tool: str, probability: float | None, now_s: float) -> float:
        """Seconds that an early run of `tool` is expected to save if it starts now; more is more urgent."""
        with self._lock:
            record = self._turns.get(turn)
            tool_s = self._appraisal.tool_s(tool)
            generation_s = self._appraisal.generation_s(record.agent) if record is not None else None
            started_s = self._started_s.get(turn, now_s)
        left_s = max(0.0, generation_s - (now_s - started_s)) if generation_s is not None else None
        known = [seconds for seconds in (tool_s, left_s) if seconds is not None]
        return (min(known) if known else 1.0) * (probability if probability is not None else 1.0)

    def is_resting(self, tool: object) -> bool:
        """Whether this tool object must not be run early now."""
        return self._resting.get(tool) is not None

    def rest(self, tool: object, *, for_good: bool) -> None:
        """Stop running the tool early, until a real call succeeds or `for_good`."""
        with self._lock:
            self._resting.set(tool, for_good or self._resting.get(tool) is True)

    def wake(self, tool: object) -> None:
        """A real call of the tool succeeded."""
        with self._lock:
            if self._resting.get(tool) is False:
                self._resting.discard(tool)

    def assessments(self) -> Sequence[Assessment]:
        """What is held of each speculator for each agent."""
        with self._lock:
            return [
                self._appraisal.assess(agent, speculator, self._traits.get(speculator, Traits()), self._load)
                for agent, speculator in self._appraisal.pairs()
            ]

    def __call__(self, event: Event) -> None:
        """Learn from one event."""
        with self._lock:
            match event:
                case TurnStarted():
                    self._turns[event.turn] = TurnRecord(event.tools, event.speculators, event.speculators)
                    self._started_s[event.turn] = event.time_s
                case TurnSettled():
                    self._started_s.pop(event.turn, None)
                    if (record := self._turns.pop(event.turn, None)) is not None:
                        self._appraisal.observe_turn(record)
                case RunFinished() if event.outcome == "succeeded" and event.started_s is not None:
                    self._appraisal.observe_tool(event.tool, event.ended_s - event.started_s)
                case ToolObserved() if event.succeeded:
                    self._appraisal.observe_tool(event.tool, event.ended_s - event.started_s)
                case SpeculatorSkipped() | CallPredicted() | TurnAnswered():
                    if (record := self._turns.get(event.turn)) is not None:
                        self._note(record, event)
                case _:
                    pass

    def _note(self, record: TurnRecord, event: SpeculatorSkipped | CallPredicted | TurnAnswered) -> None:
        match event:
            case SpeculatorSkipped():
                record.asked = tuple(name for name in record.asked if name != event.speculator)
            case CallPredicted():
                after_s = event.time_s - self._started_s[event.turn]
                record.predictions.append(Predicted(event.source, event.tool, after_s, right=False))
            case TurnAnswered():
                record.generation_s = event.generation_s
                record.predictions = [
                    Predicted(each.source, each.tool, each.after_s, right=(each.source, each.tool) in event.came_true)
                    for each in record.predictions
                ]

"""The early runs of one turn: which are started, which make room for others, which are dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass

from spectool_core.budget import TurnBudget
from spectool_core.cache import Run, ToolCache
from spectool_core.calls import ToolCall
from spectool_core.canonical import CallKey
from spectool_core.config import SpeculationConfig
from spectool_core.decision import Launch, Skip, decide_launch
from spectool_core.engine import EngineTurn
from spectool_core.events import Event, LaunchSkipped, RunFinished, RunOutcome
from spectool_core.gate import Gate
from spectool_core.runs import PreparedCall, RunContext
from spectool_core.speculators.protocol import Speculator

__all__ = ["EarlyRuns", "TurnRules"]

_ANSWER = "answer"
"""The source, in events, of what no speculator named: the main model's answer itself began it."""


@dataclass(frozen=True, slots=True)
class TurnRules:
    """What all turns of one `Speculation` share.

    Args:
        config: its settings.
        gate: which speculators are asked, which tools rest, and what limits are left.
        scope_of: who may share a call's result; raises NotPrepared where the user's `scope` raises.
        may_speculate: the user's word on running a call early.
        outlives_turn: whether results may serve later turns of an agent run.
        announce: tells the hooks.
        account: charges a speculator, by name, for what it has used up to a loop's time.
    """

    config: SpeculationConfig
    gate: Gate
    scope_of: Callable[[ToolCall, RunContext], Hashable]
    may_speculate: Callable[[ToolCall, RunContext], bool]
    outlives_turn: Callable[[RunContext], bool]
    announce: Callable[[Event], None]
    account: Callable[[str, Speculator, float], None]


class EarlyRuns:
    """Starts the early runs of one turn, and drops them. It lives on the turn's event loop.

    Args:
        number: the turn's.
        context: the agent run.
        rules: what all turns share.
        cache: the runs and results of `loop`.
        loop: where the turn lives.
        engine_turn: tells the engine; None outside of engine mode.
    """

    def __init__(
        self,
        number: int,
        context: RunContext,
        rules: TurnRules,
        cache: ToolCache,
        loop: asyncio.AbstractEventLoop,
        engine_turn: EngineTurn | None,
    ) -> None:
        self._number = number
        self._context = context
        self._rules = rules
        self._cache = cache
        self._loop = loop
        self._engine_turn = engine_turn
        self._budget = TurnBudget()
        self._runs: dict[CallKey, Run] = {}
        self._launched: set[Run] = set()
        self._served: set[Run] = set()

    @property
    def are_exhausted(self) -> bool:
        """Whether the turn may start no further run, not even in the place of a queued one."""
        if self._budget.num_runs < self._rules.config.max_runs_per_turn:
            return False
        return not any(run.state == "queued" for run in self._runs.values())

    def launch(
        self, prepared: PreparedCall, source: str | None, probability: float | None = None, *, answered: bool = False
    ) -> None:
        """Run a call, unless something speaks against it; `source` is None where the answer itself asks for it."""
        rules, name, key, now_s = self._rules, prepared.call.name, prepared.key, self._loop.time()
        worth_s = rules.gate.worth_s(self._number, name, probability, now_s)
        present = self._cache.get(key, prepared.policy.reads)
        decision = decide_launch(
            shadow=rules.config.mode == "shadow",
            answered=answered,
            present=present is not None,
            resting=rules.gate.is_resting(key.tool),
            denied=not rules.may_speculate(prepared.call, self._context),
            objection=self._objection(prepared, probability, worth_s, now_s),
        )
        if present is not None and self._engine_turn is not None:
            self._engine_turn.found(present)
        if decision == Skip("max_runs_per_turn") and self._displace(worth_s):
            decision = Launch()
        match decision:
            case Skip(reason):
                self.skip(name, source, reason)
            case Launch() if not rules.gate.budget.spend_run(self._budget, name, prepared.policy.cost, now_s):
                self.skip(name, source, "max_runs")
            case Launch():
                run = self._cache.launch(
                    prepared,
                    source=source,
                    timeout_s=prepared.policy.timeout_s or rules.config.timeout_s,
                    on_end=self._run_ended,
                    worth_s=worth_s,
                    on_begin=self._engine_turn.begun if self._engine_turn is not None else None,
                )
                self._runs[key] = run
                self._launched.add(run)

    def _objection(self, prepared: PreparedCall, probability: float | None, worth_s: float, now_s: float) -> str | None:
        """What speaks against an early run: a write under way, what it is worth, or a limit that is used up."""
        if self._cache.is_being_written(prepared):
            return "being_written"
        gate = self._rules.gate
        return gate.objection(prepared.policy, probability, worth_s) or gate.budget.run_limit(
            self._budget, prepared.call.name, now_s
        )

    def skip(self, tool: str, source: str | None, reason: str) -> None:
        """Tell that a call is not run early, and why."""
        self._rules.announce(LaunchSkipped(self._number, tool, source or _ANSWER, reason))

    def _displace(self, worth_s: float) -> bool:
        """Drop a run that has not begun and is worth less, to make room for one more in this turn."""
        queued = [run for run in self._runs.values() if run.state == "queued" and run.worth_s < worth_s]
        if not queued:
            return False
        least = min(queued, key=lambda run: run.worth_s)
        self._release(least)
        self._budget.give_back(least.prepared.call.name)
        return True

    def _run_ended(self, run: Run, outcome: RunOutcome, ended_s: float) -> None:
        tool = run.prepared.key.tool
        if outcome in ("failed", "not_replayable"):
            self._rules.gate.rest(tool, for_good=outcome == "not_replayable")
        name = run.prepared.call.name
        source = run.source or _ANSWER
        self._rules.announce(RunFinished(self._number, name, source, run.started_s, ended_s, outcome))
        if self._engine_turn is not None:
            self._engine_turn.ended(run, outcome)

    def drop_unasked(self, asked: Container[CallKey]) -> None:
        """The main model has answered: drop what has not begun, and what it did not ask for."""
        for key, run in list(self._runs.items()):
            if run.state == "queued" or (key not in asked and run.prepared.policy.reuse == "turn"):
                self._release(run)

    def served(self, run: Run) -> None:
        """A call of the main model has been served from `run`."""
        self._served.add(run)

    def end(self) -> tuple[int, int]:
        """Drop all that is left; returns how many runs were started, and how many of them were of no use."""
        for run in list(self._runs.values()):
            self._release(run)
        num_launched = len(self._launched)
        num_wasted = sum(run.num_waiters == 0 for run in self._launched - self._served)
        self._launched.clear()  # the turn may be kept for longer than its results
        return num_launched, num_wasted

    def _release(self, run: Run) -> None:
        del self._runs[run.prepared.key]
        if run.prepared.policy.reuse == "turn" or run.state == "queued":
            self._cache.drop(run)

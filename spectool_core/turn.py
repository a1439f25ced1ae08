"""One turn: from the moment the prompt goes to the main model until its tool calls are settled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from spectool_core.appraisal import Traits
from spectool_core.cache import Run, ToolCache
from spectool_core.calls import Prompt, ToolCall, ToolSchema, name_of
from spectool_core.canonical import CallKey
from spectool_core.decision import Claim, Hit, Join, Miss, decide_claim
from spectool_core.engine import EngineTurn
from spectool_core.events import (
    CallPredicted,
    CallResolved,
    Outcome,
    SpeculatorFinished,
    SpeculatorSkipped,
    TurnAnswered,
    TurnSettled,
    TurnStarted,
)
from spectool_core.fences import meet
from spectool_core.launching import EarlyRuns, TurnRules
from spectool_core.listening import listen
from spectool_core.load import LoopLoad
from spectool_core.loops import run_on, running_loop, wait_in_thread, wait_on_loop
from spectool_core.runs import NotPrepared, PreparedCall, RunContext, Scope, Toolbox
from spectool_core.speculators.protocol import Speculator

__all__ = ["Claimed", "Turn"]

# Predictions heard for each run that a turn may start: more than that is no guess at one answer.
_MAX_PREDICTIONS_PER_RUN = 4


@dataclass(frozen=True, slots=True)
class Claimed:
    """How a call of the main model is served; `result` is what the run returned, unless `outcome` is "miss"."""

    outcome: Outcome
    result: Any = None


class Turn:
    """Predictions, early runs and the main model's answer of one turn.

    It lives on one event loop, where its tools run, but its public methods may be called from any thread or loop. None
    of them raises, except that a cancelled `claim` is cancelled.

    Args:
        number: tells the turn from others, in events and in keys.
        prompt: what the main model is asked.
        tools: what it may choose from.
        toolbox: the tools that this run may use.
        context: the agent run.
        rules: what all turns share.
        cache: the runs and results of `loop`.
        load: how busy `loop` is.
        loop: where the turn lives.
        engine_turn: tells the engine; None outside of engine mode.
    """

    def __init__(
        self,
        number: int,
        *,
        prompt: Prompt,
        tools: Sequence[ToolSchema],
        toolbox: Toolbox,
        context: RunContext,
        rules: TurnRules,
        cache: ToolCache,
        load: LoopLoad,
        loop: asyncio.AbstractEventLoop,
        engine_turn: EngineTurn | None = None,
    ) -> None:
        self.number = number
        self.context = context
        self.engine_turn = engine_turn
        self._prompt = prompt
        self._tools = tools
        self._toolbox = toolbox
        self._rules = rules
        self._cache = cache
        self._load = load
        self._loop = loop
        self._early = EarlyRuns(number, context, rules, cache, loop, engine_turn)
        self._listeners: list[asyncio.Task[None]] = []
        self._due: Counter[CallKey] = Counter()
        self._predicted: dict[CallKey, dict[str, None]] = {}
        self._num_considered = 0
        self._num_claiming = 0
        self._started_s = loop.time()
        self._answered = False
        self._settled = False

    # The main model's side

    def start(self, speculators: Sequence[tuple[str, Speculator]]) -> None:
        """Ask the (named) speculators what the main model has just been asked."""
        run_on(self._loop, self._start, speculators)

    def answer(self, calls: Sequence[ToolCall]) -> None:
        """The main model has answered with `calls`: stop predicting, cancel losers, keep what it asked for."""
        run_on(self._loop, self._answer, calls)

    def settle(self) -> None:
        """No further call of this turn will come: cancel and forget what is left."""
        run_on(self._loop, self._settle)

    async def claim(self, call: ToolCall) -> Claimed:
        """Serve a call of the main model: at once if its result is there, after a join if its run has begun."""
        if running_loop() is not self._loop:
            return await wait_on_loop(self.claim(call), self._loop, gone=Claimed("miss"))
        self._num_claiming += 1
        try:
            decision, prepared, run = self._decide(call)
            if run is None or not isinstance(decision, Join):
                return self._resolve(call, decision, prepared, run, waited_s=0.0)
            asked_s = self._loop.time()
            await run.join()
            if run.state == "failed":
                decision = Miss("failed")
            return self._resolve(call, decision, prepared, run, waited_s=self._loop.time() - asked_s)
        finally:
            self._num_claiming -= 1
            self._settle_if_done()

    def claim_blocking(self, call: ToolCall) -> Claimed:
        """`claim` for a thread; on the loop's own thread, which must not wait, a run in flight is a miss."""
        if running_loop() is self._loop:
            return self._claim_at_once(call)
        return wait_in_thread(self.claim(call), self._loop, gone=Claimed("miss"))

    def _claim_at_once(self, call: ToolCall) -> Claimed:
        decision, prepared, run = self._decide(call)
        if run is not None and isinstance(decision, Join):
            decision = Miss("would_block")
            self._cache.drop(run)
        claimed = self._resolve(call, decision, prepared, run, waited_s=0.0)
        self._settle_if_done()
        return claimed

    # Predictions

    def _start(self, speculators: Sequence[tuple[str, Speculator]]) -> None:
        rules, number = self._rules, self.number
        names = tuple(name for name, _ in speculators)
        tools = tuple(sorted(name_of(schema) for schema in self._tools))
        load = self._load.turn_started()
        rules.announce(TurnStarted(number, self._started_s, names, tools, load))
        if self._answered:
            return
        traits = {name: Traits.of(speculator) for name, speculator in speculators}
        skipped = rules.gate.skipped(tools, traits, load, self._loop.time())
        for name, reason in skipped.items():
            rules.announce(SpeculatorSkipped(number, name, reason))
        self._listeners = [
            self._loop.create_task(self._listen(name, speculator), name=f"spectool:{name}")
            for name, speculator in speculators
            if name not in skipped
        ]

    async def _listen(self, name: str, speculator: Speculator) -> None:
        started_s = self._loop.time()
        num_calls, outcome = await listen(speculator, self._prompt, self._tools, partial(self._take, name))
        ended_s = self._loop.time()
        self._rules.account(name, speculator, ended_s)
        self._rules.announce(SpeculatorFinished(self.number, name, started_s, ended_s, num_calls, outcome))

    def _take(self, source: str, call: ToolCall) -> bool:
        """Consider a predicted call; whether further ones could be of use."""
        self._consider(call, source)
        return not (self._answered or self._is_exhausted())

    def _is_exhausted(self) -> bool:
        """Whether no further prediction could start a run, so that asking on is a waste."""
        most = _MAX_PREDICTIONS_PER_RUN * self._rules.config.max_runs_per_turn
        return self._num_considered >= most or self._early.are_exhausted

    def _consider(self, call: ToolCall, source: str) -> None:
        self._num_considered += 1
        try:
            prepared = self._prepare(call)
        except NotPrepared as exc:
            self._early.skip(call.name, source, exc.reason)
            return
        probability: float | None = getattr(call, "probability", None)
        if self._rules.gate.is_likely(probability):  # what is never run early must not count as a success
            self._predicted.setdefault(prepared.key, {})[source] = None
        self._rules.announce(CallPredicted(self.number, call.name, source, self._loop.time(), probability))
        self._early.launch(prepared, source, probability, answered=self._answered)

    # The answer

    def _answer(self, calls: Sequence[ToolCall]) -> None:
        if self._answered:
            return
        self._answered = True
        for listener in self._listeners:
            listener.cancel()
        now_s = self._loop.time()
        asked = self._note_calls(calls)
        if self.engine_turn is not None:
            self.engine_turn.answered(frozenset(asked))
        came_true = tuple(
            (source, prepared.call.name) for key, prepared in asked.items() for source in self._predicted.get(key, ())
        )
        self._rules.announce(TurnAnswered(self.number, now_s, now_s - self._started_s, len(calls), came_true))
        self._early.drop_unasked(self._due)
        for key, prepared in asked.items():
            if self._due[key] > 1:  # identical calls run once, and answer every id
                self._early.launch(prepared, source=None)
        self._settle_if_done()

    def _note_calls(self, calls: Sequence[ToolCall]) -> dict[CallKey, PreparedCall]:
        """Count what is due, and drop each result that a write in the same answer may make stale."""
        writes: list[frozenset[str] | None] = []
        asked: dict[CallKey, PreparedCall] = {}
        for call in calls:
            policy = self._toolbox.policy(call.name)
            if policy is None:
                writes.append(None)
            elif policy.writes:
                writes.append(policy.writes)
            try:
                prepared = self._prepare(call)
            except NotPrepared:
                continue
            asked[prepared.key] = prepared
            self._due[prepared.key] += 1
        for key, prepared in list(asked.items()):
            if any(meet(written, prepared.policy.reads) for written in writes):
                del asked[key], self._due[key]
                if (run := self._cache.get(key, prepared.policy.reads)) is not None:
                    self._cache.drop(run)
        return asked

    def _decide(self, call: ToolCall) -> tuple[Claim, PreparedCall | None, Run | None]:
        try:
            prepared = self._prepare(call)
        except NotPrepared as exc:
            return Miss(exc.reason), None, None
        run = self._cache.get(prepared.key, prepared.policy.reads)
        due = self._due[prepared.key] > 0 and not self._settled
        predicted = prepared.key in self._predicted
        decision = decide_claim(run.state if run is not None else None, due=due, predicted=predicted)
        if due:
            self._due[prepared.key] -= 1
        return decision, prepared, run

    def _resolve(
        self, call: ToolCall, decision: Claim, prepared: PreparedCall | None, run: Run | None, *, waited_s: float
    ) -> Claimed:
        if prepared is None and self._toolbox.policy(call.name) is None:
            return Claimed("miss")
        outcome: Outcome = "hit" if isinstance(decision, Hit) else "join" if isinstance(decision, Join) else "miss"
        reason = decision.reason if isinstance(decision, Miss) else ""
        now_s = self._loop.time()
        saved_s = 0.0
        source: str | None = None
        if run is not None and outcome != "miss":
            self._early.served(run)
            saved_s = max(0.0, run.duration_s - waited_s)
            source = run.source
        predicted_by = tuple(self._predicted.get(prepared.key, ())) if prepared is not None else ()
        self._rules.announce(
            CallResolved(self.number, call.name, outcome, reason, now_s, saved_s, waited_s, predicted_by, source)
        )
        return Claimed(outcome, run.result if run is not None and outcome != "miss" else None)

    # The end

    def _settle_if_done(self) -> None:
        if self._answered and self._num_claiming == 0 and not any(self._due.values()):
            self._settle()

    def _settle(self) -> None:
        if self._settled:
            return
        self._answered = self._settled = True
        self._load.turn_ended()
        for listener in self._listeners:
            listener.cancel()
        num_launched, num_wasted = self._early.end()
        self._rules.announce(TurnSettled(self.number, self._loop.time(), num_launched, num_wasted))
        if self.engine_turn is not None:
            self.engine_turn.settled()

    # Parts

    def _prepare(self, call: ToolCall) -> PreparedCall:
        policy = self._toolbox.policy(call.name)
        if policy is None:
            raise NotPrepared("unmarked")
        if policy.writes:
            raise NotPrepared("writes")
        if policy.needs_approval:
            raise NotPrepared("needs_approval")
        owner = self._rules.scope_of(call, self.context)
        shared = policy.reuse == "ttl" and self._rules.outlives_turn(self.context)
        return self._toolbox.prepare(call, Scope(owner, None if shared else self.number))

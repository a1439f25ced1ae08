"""A scripted model: what it says, how fast, how often it is right, and in which dialect of the wire format."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from spectool_core.errors import ConfigurationError
from spectool_core.testing.script import Answer, ChatRequest, Rule, Script, ScriptedCall, script_of

__all__ = ["Quirks", "ScriptedModel", "wrong_arguments"]


@dataclass(frozen=True, slots=True)
class Quirks:
    """How an endpoint departs from OpenAI's wire format.

    Args:
        call_ids: "stable": derived from the history, so that a repeated run gets the same ids; "unique": never the
            same again; "repeating": `call_0`, `call_1`, from the start in every answer; "missing": none.
        call_indices: of streamed calls: "given", "missing", or "shared" (every call has index 0).
        call_deltas: a streamed call's id and name come before its arguments ("separate"), with the first piece of
            them ("merged"), or with all of them ("whole").
    """

    call_ids: Literal["stable", "unique", "repeating", "missing"] = "stable"
    call_indices: Literal["given", "missing", "shared"] = "given"
    call_deltas: Literal["separate", "merged", "whole"] = "separate"


def wrong_arguments(answer: Answer, request: ChatRequest) -> Answer:
    """Give `answer` with other arguments of the same types, other ones for each choice; no calls if there are none."""
    calls = [_wrong_call(call, request.choice) for call in answer.tool_calls]
    return replace(answer, tool_calls=tuple(call for call in calls if call is not None))


@dataclass(frozen=True)
class ScriptedModel:
    """One model that plays a script.

    Args:
        script: what it answers; see `Script`.
        generation_s: seconds for a whole answer; None adds up the next two.
        time_to_first_token_s: seconds before the first token begins.
        seconds_per_token: seconds for each completion token.
        reasoning_tokens: tokens of reasoning before each answer.
        acceptance_rate: for a speculator that plays the main model's script: each turn and choice is the script's
            with this probability and `wrong_answer`'s otherwise, drawn from `seed`, the task, the turn, the choice and
            the request's own `seed`, so runs repeat exactly. The script's times, reasoning, latches and faults are then
            the main model's and not played. None plays the script as it is.
        seed: of the draws.
        wrong_answer: makes the wrong answer from the right one; the default makes wrong calls and leaves text as it is.
        quirks: departures from the wire format.
        max_num_deltas: bound on the pieces in which one answer is streamed; tokens are coalesced to keep it.

    Raises:
        ConfigurationError: a time is negative, the acceptance rate is not in [0, 1], or the total is given twice.
    """

    script: Script
    generation_s: float | None = None
    time_to_first_token_s: float = 0.0
    seconds_per_token: float = 0.0
    reasoning_tokens: int = 0
    acceptance_rate: float | None = None
    seed: int = 0
    wrong_answer: Callable[[Answer, ChatRequest], Answer] = wrong_arguments
    quirks: Quirks = field(default_factory=Quirks)
    max_num_deltas: int = 16

    def __post_init__(self) -> None:
        for name in ("generation_s", "time_to_first_token_s", "seconds_per_token", "reasoning_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigurationError(name, value, "a number of at least 0")
        if self.generation_s is not None and self.seconds_per_token:
            raise ConfigurationError("seconds_per_token", self.seconds_per_token, "0 where generation_s is given")
        if self.acceptance_rate is not None and not 0 <= self.acceptance_rate <= 1:
            raise ConfigurationError("acceptance_rate", self.acceptance_rate, "None or 0 to 1")
        if self.max_num_deltas < 1:
            raise ConfigurationError("max_num_deltas", self.max_num_deltas, "an integer of at least 1")
        script_of(self.script)

    @classmethod
    def of(cls, script: ScriptedModel | Script) -> ScriptedModel:
        """Give `script` as a model, which answers at once if it is not one already."""
        return script if isinstance(script, ScriptedModel) else cls(script)

    def answers(self, request: ChatRequest) -> Sequence[Answer]:
        """Answer all `n` choices of `request`; raises ScriptEndedError where the script says nothing."""
        rule = script_of(self.script)
        return [self._answer(rule, replace(request, choice=choice)) for choice in range(request.n)]

    def accepts(self, request: ChatRequest) -> bool:
        """Tell whether this choice of this turn is drawn to be the script's own answer."""
        if self.acceptance_rate is None:
            return True
        key = (self.seed, request.body.get("seed"), request.task, request.turn, request.choice)
        return random.Random(repr(key)).random() < self.acceptance_rate

    def _answer(self, rule: Rule, request: ChatRequest) -> Answer:
        answer = rule(request)
        if self.acceptance_rate is None:
            return answer
        played = Answer(text=answer.text, tool_calls=answer.tool_calls)
        return played if self.accepts(request) else self.wrong_answer(played, request)


def _wrong_call(call: ScriptedCall, choice: int) -> ScriptedCall | None:
    if not isinstance(call.arguments, Mapping):
        return None
    for name, value in call.arguments.items():
        wrong = _wrong_value(value, choice)
        if wrong is not None:
            return replace(call, arguments={**call.arguments, name: wrong})
    return None


def _wrong_value(value: Any, choice: int) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value} (wrong guess {choice})"
    if isinstance(value, int | float):
        return value + 1 + choice
    return None

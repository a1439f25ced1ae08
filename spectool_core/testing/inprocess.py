"""Scripted models without sockets, for virtual clocks: the main model's playback, and a speculator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias, TypeVar

from spectool_core.calls import Message, Prompt, ToolCall, ToolSchema
from spectool_core.speculators.protocol import SpeculatorStatistics
from spectool_core.testing.clock import sleep_until
from spectool_core.testing.faults import DroppedConnection, Fault, Hang, HttpError, TruncatedAnswer
from spectool_core.testing.models import ScriptedModel
from spectool_core.testing.script import ChatRequest, Script, ScriptedCall
from spectool_core.testing.statistics import ModelStatistics
from spectool_core.testing.tally import Tally
from spectool_core.testing.wire import Generation

__all__ = ["ModelPlayback", "ScriptedFaultError", "ScriptedSpeculator"]

T = TypeVar("T")


class ScriptedFaultError(ConnectionError):
    """A scripted fault, where there is no HTTP to carry it.

    Args:
        fault: the fault of the answer.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(repr(fault))


class ModelPlayback:
    """Plays a scripted model in process: what `ModelServer` answers, on the running loop's own clock.

    Args:
        model: a `ScriptedModel`, or a script, which answers at once.
        name: the model's name in what it returns.
    """

    def __init__(self, model: ScriptedModel | Script, *, name: str = "main") -> None:
        self._model = ScriptedModel.of(model)
        self._name = name
        self._tally = Tally(ModelStatistics())

    def statistics(self) -> ModelStatistics:
        """The counts so far."""
        return self._tally.value

    def request(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, n: int = 1, **parameters: Any
    ) -> ChatRequest:
        """Make the request that the methods below play; `parameters` are the other fields of its body."""
        return ChatRequest(model=self._name, messages=messages, tools=tools, n=n, body=parameters)

    async def complete(self, request: ChatRequest) -> Mapping[str, Any]:
        """Give the whole answer as a `chat.completion` when its last token is generated.

        Raises:
            ScriptedFaultError: the answer is a fault.
            ScriptEndedError: the script says nothing to this request.
        """
        generation = Generation(request, self._model)
        whole = [] if generation.is_cut else [(generation.generation_s, generation.completion())]
        async with aclosing(self.play(generation, whole)) as played:
            async for completion in played:
                return completion
        raise ScriptedFaultError(TruncatedAnswer())

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the answer as `chat.completion.chunk` objects, each when it is due; raises as `complete` does."""
        generation = Generation(request, self._model)
        chunks = [(timed.due_s, timed.chunk) for timed in generation.sent(generation.chunks())]
        async with aclosing(self.play(generation, chunks)) as played:
            async for chunk in played:
                yield chunk

    async def play(self, generation: Generation, timed: Sequence[tuple[float, T]]) -> AsyncGenerator[T, None]:
        """Yield the items of `timed`, each so many seconds from now, play the answer's latches and fault, and count."""
        self._count(num_requests=1, num_active_requests=1, **generation.tokens_read())
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        outcome = {"num_failed_requests": 1}
        try:
            for latch in generation.latches:
                await latch.pass_through()
                started_s = loop.time()
            await _fail_at_once(generation.fault, started_s)
            for due_s, item in timed:
                await sleep_until(started_s + due_s)
                if not generation.is_cut and due_s >= generation.generation_s:
                    # Before the last item, after which the consumer need not come back.
                    outcome = generation.outcome()
                yield item
            if generation.is_cut:
                await sleep_until(started_s + generation.generation_s / 2)
                await _fail_half_way(generation.fault)
        except (asyncio.CancelledError, GeneratorExit):
            if "num_completed_requests" not in outcome:
                num_generated = generation.num_tokens_at(loop.time() - started_s)
                outcome = {"num_cancelled_requests": 1, "num_completion_tokens": num_generated}
            raise
        finally:
            self._count(num_active_requests=-1, **outcome)

    def _count(self, **changes: int) -> None:
        self._tally.update(lambda statistics: statistics.plus(**changes))


class ScriptedSpeculator:
    """A `Speculator` that predicts what a scripted model says, on the running loop's own clock.

    Calls come when their last token is generated, those of equal samples once for each; arguments that are no JSON
    object are counted as malformed and not predicted; a fault is raised as ScriptedFaultError. Where the prompt has a
    `read_text`, its calls come instead, when the text's choice has ended; where it raises, it is counted as malformed.

    Args:
        model: a `ScriptedModel`, most often the main model's script with an `acceptance_rate`; or a script.
        num_samples: how many answers are drawn for each prompt.
    """

    def __init__(self, model: ScriptedModel | Script, *, num_samples: int = 1) -> None:
        self._model = ScriptedModel.of(model)
        self._num_samples = num_samples
        self._playback = ModelPlayback(self._model, name="speculator")
        self._num_malformed_calls = 0
        self._num_predictions = 0

    @property
    def num_predictions(self) -> int:
        """How many calls were predicted so far."""
        return self._num_predictions

    @property
    def num_active_requests(self) -> int:
        """How many prompts are being answered now."""
        return self._playback.statistics().num_active_requests

    def statistics(self) -> SpeculatorStatistics:
        """What the predictions have cost so far."""
        played = self._playback.statistics()
        return SpeculatorStatistics(
            num_requests=played.num_requests,
            num_cancelled_requests=played.num_cancelled_requests,
            num_failed_requests=played.num_failed_requests,
            num_malformed_calls=self._num_malformed_calls,
            num_prompt_tokens=played.num_prompt_tokens,
            num_completion_tokens=played.num_completion_tokens,
        )

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncGenerator[ToolCall, None]:
        """Yield the scripted calls for `prompt`."""
        request = self._playback.request(prompt.messages, tools, n=self._num_samples)
        generation = Generation(request, self._model)
        said = _timed_calls(generation) if prompt.read_text is None else _timed_readings(generation, prompt.read_text)
        if not generation.is_cut:
            said = [*said, (generation.generation_s, list)]  # the answer's end
        async with aclosing(self._playback.play(generation, said)) as played:
            async for calls_in in played:
                try:
                    calls = list(calls_in())
                except Exception:
                    self._num_malformed_calls += 1
                    continue
                for call in calls:
                    self._num_predictions += 1
                    yield call


_Said: TypeAlias = tuple[float, Callable[[], Sequence[ToolCall]]]
"""A moment of the answer, and what reads the calls out of what it completes, or raises."""


def _timed_calls(generation: Generation) -> Sequence[_Said]:
    """Lay out the calls that the client gets, each at its last token."""
    deltas = [(delta.due_s, choice, delta) for choice in generation.sent_choices for delta in choice.deltas()]
    deltas.sort(key=lambda timed: timed[0])
    return [
        (due_s, partial(_parsed, choice.calls[delta.completes_call]))
        for due_s, choice, delta in generation.sent(deltas)
        if delta.completes_call is not None
    ]


def _timed_readings(generation: Generation, read_text: Callable[[str], Sequence[ToolCall]]) -> Sequence[_Said]:
    """Lay out the texts that the client gets to their own ends, each at the end of its choice."""
    whole = [] if generation.is_cut else [choice for choice in generation.sent_choices if choice.answer.text.strip()]
    return [
        (choice.generation_s, partial(read_text, choice.answer.text))
        for choice in sorted(whole, key=lambda choice: choice.generation_s)
        if choice.finish_reason not in ("length", "content_filter")
    ]


def _parsed(call: ScriptedCall) -> Sequence[ToolCall]:
    arguments = json.loads(call.text)
    if not isinstance(arguments, dict):
        raise ValueError(f"{call.text} is no JSON object")
    return [ToolCall(call.name, arguments, call.id)]


async def _fail_at_once(fault: Fault | None, started_s: float) -> None:
    match fault:
        case HttpError():
            await sleep_until(started_s + fault.after_s)
            raise ScriptedFaultError(fault)
        case DroppedConnection(when="before_headers"):
            raise ScriptedFaultError(fault)
        case Hang(when="before_headers"):
            await asyncio.get_running_loop().create_future()


async def _fail_half_way(fault: Fault | None) -> None:
    match fault:
        case DroppedConnection():
            raise ScriptedFaultError(fault)
        case Hang():
            await asyncio.get_running_loop().create_future()

"""A speculator that asks a small model, at any OpenAI-compatible endpoint, what the main model is about to call."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from spectool_core.calls import Prompt, ToolCall, ToolSchema
from spectool_core.errors import ConfigurationError
from spectool_core.speculators._choices import ChoiceReader, reader_for
from spectool_core.speculators._endpoint import resolve_endpoint
from spectool_core.speculators._merge import merged
from spectool_core.speculators._pace import StreamingPace
from spectool_core.speculators._reception import Reception
from spectool_core.speculators._refusals import refused_option, retry_after_s
from spectool_core.speculators._replies import Reply, StreamReply
from spectool_core.speculators._sessions import SessionPerLoop, session_opener
from spectool_core.speculators._tally import Tally
from spectool_core.speculators.protocol import SpeculatorStatistics

if TYPE_CHECKING:
    from aiohttp import ClientResponse

__all__ = ["ModelSpeculator", "speculator_from_string"]

_Outcome: TypeAlias = Literal["complete", "cancelled", "failed"]

_logger = logging.getLogger("spectool")

_MAX_ERROR_BYTES = 2**16
_RESERVED = frozenset({"messages", "model", "n", "stream", "tools"})


class ModelSpeculator:
    """Predicts by asking `model` exactly what the main model was asked. Prompts and tools are sent to the endpoint.

    Nothing that the endpoint does is an error: what is no prediction is counted in `statistics()` and otherwise
    ignored. A request is never repeated, since a late prediction is worth nothing, and none is sent while the endpoint
    has asked for a pause (Retry-After). Close `predict` (`contextlib.aclosing`) or cancel the task in it to close its
    connections.

    Args:
        model: the model's name at the endpoint.
        base_url: of the endpoint, with its `/v1`; None is OPENAI_BASE_URL or OpenAI, as for the openai SDK.
        api_key: None is OPENAI_API_KEY, as for the openai SDK. A local server without keys takes any text.
        num_samples: answers asked for in each turn (the paper's λ); equal calls among them are yielded once. One
            request with `n`, or as many requests once the endpoint has refused or ignored `n`.
        streaming: True yields each call when its arguments have closed, at some client CPU for each token; False
            yields all calls at the end; "auto" streams while that is measurably worth it (see `StreamingPace`), which
            it never is where calls are read from text (`Prompt.read_text`).
        temperature: None leaves it to the endpoint; some of OpenAI's models refuse any.
        max_tokens: bound on each answer, sent as `max_completion_tokens` to OpenAI and as `max_tokens` to others;
            None sets none: the request is cancelled anyway when the main model has answered.
        timeout_s: for a whole request.
        prompt_token_cost: what a million tokens of prompts cost, in the currency of `ToolPolicy.cost`.
        completion_token_cost: the same for what the model writes.
        extra_body: more fields of the request, such as `{"reasoning_effort": "minimal"}`.
        extra_headers: more HTTP headers.
        name: what events call this speculator; None is the model's name.
        clock: monotonic seconds.

    Raises:
        ConfigurationError: naming the field, the value and what is allowed; `api_key` where there are no credentials.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        num_samples: int = 1,
        streaming: bool | Literal["auto"] = "auto",
        temperature: float | None = None,
        max_tokens: int | None = None,
        timeout_s: float = 30.0,
        prompt_token_cost: float = 0.0,
        completion_token_cost: float = 0.0,
        extra_body: Mapping[str, Any] | None = None,
        extra_headers: Mapping[str, str] | None = None,
        name: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _require(_is_text(model), "model", model, "a model's name")
        _require(_is_count(num_samples), "num_samples", num_samples, "an integer of at least 1")
        _require(isinstance(streaming, bool) or streaming == "auto", "streaming", streaming, 'True, False or "auto"')
        if temperature is not None:
            _require(_is_number(temperature), "temperature", temperature, "None or a number of at least 0")
        if max_tokens is not None:
            _require(_is_count(max_tokens), "max_tokens", max_tokens, "None or an integer of at least 1")
        _require(_is_number(timeout_s) and timeout_s > 0, "timeout_s", timeout_s, "a number of seconds above 0")
        _require(_is_number(prompt_token_cost), "prompt_token_cost", prompt_token_cost, "a number of at least 0")
        _require(
            _is_number(completion_token_cost), "completion_token_cost", completion_token_cost, "a number of at least 0"
        )
        _require(name is None or _is_text(name), "name", name, "None or some text")
        self.model = model
        self.name = name or model
        self.num_samples = num_samples
        self._endpoint = resolve_endpoint(base_url, api_key, extra_headers)
        self._streaming = streaming
        self._token_costs = prompt_token_cost, completion_token_cost
        self._clock = clock
        self._settings: dict[str, Any] = {"model": model}
        if temperature is not None:
            self._settings["temperature"] = temperature
        if max_tokens is not None:
            self._settings["max_completion_tokens" if self._endpoint.is_openai else "max_tokens"] = max_tokens
        self._settings |= _extra_fields(extra_body)
        self._refused: set[str] = set()
        self._pace = StreamingPace()
        self._paused_until_s = -math.inf
        self._has_warned = False
        self._tally = Tally()
        self._sessions = SessionPerLoop(session_opener(self._endpoint, timeout_s))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, url={self._endpoint.url!r}, num_samples={self.num_samples})"

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncGenerator[ToolCall]:
        """Yield the calls that the model makes, each once, as soon as they are complete; see `Speculator`."""
        if not _may_call(prompt, tools) or self._clock() < self._paused_until_s:
            return
        reader = reader_for(prompt)
        requests = [self._ask(body, options, reader) for body, options in self._bodies(prompt, tools)]
        seen: set[tuple[str, str]] = set()
        async with aclosing(requests[0] if len(requests) == 1 else merged(requests)) as calls:
            async for call in calls:
                key = call.name, json.dumps(call.arguments, sort_keys=True)
                if key not in seen:
                    seen.add(key)
                    yield call

    def statistics(self) -> SpeculatorStatistics:
        """Count what this speculator has cost so far; the tokens of requests that were cut off are not known."""
        value = self._tally.value()
        prompt_cost, completion_cost = self._token_costs
        tokens_cost = value.num_prompt_tokens * prompt_cost + value.num_completion_tokens * completion_cost
        return replace(value, cost=tokens_cost / 1e6)

    async def aclose(self) -> None:
        """Close the connections; a later `predict` opens new ones. Not needed where the event loop ends properly."""
        await self._sessions.aclose()

    def _bodies(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> list[tuple[bytes, frozenset[str]]]:
        """The requests of one turn, each with the optional fields that it makes use of."""
        fields = {**self._settings, "messages": list(prompt.messages)}
        tool_options = {"tool_choice": prompt.tool_choice, "parallel_tool_calls": prompt.parallel_tool_calls}
        if prompt.read_text is None:
            fields["tools"] = list(tools)
            fields |= {name: value for name, value in tool_options.items() if value is not None}
        else:
            # Not even those of `extra_body`: endpoints refuse them where there are no tools.
            fields = {name: value for name, value in fields.items() if name not in tool_options}
        options: dict[str, Any] = {}
        if self.num_samples > 1 and "n" not in self._refused:
            options["n"] = self.num_samples
        if self._streams(prompt):
            options["stream"] = True
            if "stream_options" not in self._refused:
                options["stream_options"] = {"include_usage": True}
        body = json.dumps({**fields, **options}, separators=(",", ":"), default=dict).encode()
        return [(body, frozenset(options))] * (1 if "n" in options else self.num_samples)

    def _streams(self, prompt: Prompt) -> bool:
        if self._streaming == "auto":
            return prompt.read_text is None and self._pace.streams_next()
        return self._streaming

    async def _ask(
        self, body: bytes, options: frozenset[str], new_reader: Callable[[], ChoiceReader]
    ) -> AsyncGenerator[ToolCall]:
        """Send one request and yield its calls; whatever becomes of it is counted."""
        outcome: _Outcome = "cancelled"
        reception: Reception | None = None
        try:
            session = await self._sessions.current()
            started_s = self._clock()
            async with session.post(self._endpoint.url, data=body) as response:
                if response.status != 200:
                    await self._heed_refusal(response, options)
                    outcome = "failed"
                    return
                reception = Reception(
                    response, asked_stream="stream" in options, new_reader=new_reader, clock=self._clock
                )
                while not reception.is_ended:
                    for call in await reception.next_calls():
                        yield call
            outcome = "complete" if reception.reply.is_complete else "failed"
            self._learn(reception, options, started_s)
        except Exception as exc:
            # A prediction is not worth an error: whatever goes wrong on the way is a failed request.
            outcome = "failed"
            self._report(type(exc).__name__)
        finally:
            self._count(outcome, reception.reply if reception is not None else None)

    async def _heed_refusal(self, response: ClientResponse, options: frozenset[str]) -> None:
        """Learn from an HTTP error what not to ask, or when."""
        self._report(f"HTTP status {response.status}")
        if response.status in (429, 503):
            pause_s = retry_after_s(response.headers)
            if pause_s is not None:
                self._paused_until_s = max(self._paused_until_s, self._clock() + pause_s)
        elif response.status in (400, 422):
            if "stream" in options:
                self._pace.observe_failure()
            option = refused_option(await response.content.read(_MAX_ERROR_BYTES), options - {"stream"})
            if option is not None:
                self._refused.add(option)

    def _report(self, fault: str) -> None:
        """Say once aloud that requests fail: a wrong name or address is else seen in nothing but the counts."""
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        _logger.log(level, "speculator %s at %s: a request failed (%s)", self.name, self._endpoint.url, fault)

    def _learn(self, reception: Reception, options: frozenset[str], started_s: float) -> None:
        """Learn from a reply that came to its end what this endpoint does well."""
        reply = reception.reply
        if not reply.is_complete:
            if "stream" in options:
                self._pace.observe_failure()
            return
        if "n" in options and reply.num_choices < self.num_samples:
            self._refused.add("n")
        if "stream" in options and isinstance(reply, StreamReply):
            ended_s = self._clock()
            self._pace.observe(ended_s - started_s, reception.leads_s(ended_s))

    def _count(self, outcome: _Outcome, reply: Reply | None) -> None:
        if outcome == "cancelled" and reply is not None and reply.is_complete:
            outcome = "complete"  # the server had said everything
        amounts = {"num_requests": 1}
        if outcome != "complete":
            amounts[f"num_{outcome}_requests"] = 1
        if reply is not None:
            amounts["num_malformed_calls"] = reply.num_malformed_calls
            amounts["num_prompt_tokens"] = reply.usage.num_prompt_tokens
            amounts["num_completion_tokens"] = reply.usage.num_completion_tokens
        self._tally.add(**amounts)


def speculator_from_string(text: str) -> ModelSpeculator:
    """Make the speculator that `"openai:MODEL"` is short for.

    Raises:
        ConfigurationError: `text` has another form, or there are no credentials.
    """
    provider, _, model = text.partition(":")
    if provider != "openai" or not model.strip():
        raise ConfigurationError("speculators", text, '"openai:MODEL", such as "openai:gpt-5-nano"')
    return ModelSpeculator(model)


def _may_call(prompt: Prompt, tools: Sequence[ToolSchema]) -> bool:
    return prompt.read_text is not None or (bool(tools) and prompt.tool_choice != "none")


def _require(is_allowed: bool, field: str, value: Any, allowed: str) -> None:
    if not is_allowed:
        raise ConfigurationError(field, value, allowed)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _extra_fields(extra_body: Mapping[str, Any] | None) -> dict[str, Any]:
    if extra_body is None:
        return {}
    _require(isinstance(extra_body, Mapping), "extra_body", extra_body, "None or a mapping")
    reserved = sorted(_RESERVED & extra_body.keys())
    _require(not reserved, "extra_body", reserved, "fields other than " + ", ".join(sorted(_RESERVED)))
    try:
        json.dumps(dict(extra_body))
    except (TypeError, ValueError) as exc:
        raise ConfigurationError("extra_body", extra_body, "a mapping that JSON can hold") from exc
    return dict(extra_body)

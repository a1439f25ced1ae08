"""vLLM's engine client as its chat handler sees it: each call of the handler reads one turn of a sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from spectool_core.vllm.injector import Injector
from spectool_core.vllm.planner import TurnStart
from spectool_core.vllm.rendering import Message, RenderingRefusedError
from spectool_core.vllm.sequences import EngineRequest
from spectool_core.vllm.turn_outputs import TurnReader
from spectool_core.vllm.wire import RefusalReason

__all__ = ["ReadsTurns", "Turn", "TurnClient", "why_not_resident"]


class ReadsTurns(Protocol):
    """The part of a response that a turn is read from; see `turn_serving.ResidentResponse`.

    Attributes:
        request: as it came.
        injector: the response's.
        reader: of the engine's sequence, once that is open.
    """

    request: ChatCompletionRequest
    injector: Injector
    reader: TurnReader | None

    def open(self, request: EngineRequest) -> None:
        """Open the engine's sequence."""
        ...


class Turn:
    """One turn, while vLLM's chat handler reads it.

    Args:
        response: the turn's.
        number: from 1.
        messages: what the turn is rendered from.
        suffix_ids: the tokens by which the engine went on to it; none for the first.

    Attributes:
        has_started: set when the turn is being generated.
    """

    def __init__(self, response: ReadsTurns, number: int, messages: Sequence[Message], suffix_ids: list[int]) -> None:
        self.number = number
        self.has_started = asyncio.Event()
        self._response = response
        self._messages = messages
        self._suffix_ids = suffix_ids

    def enter(self) -> None:
        """What the current task asks the engine for from now on is this turn."""
        _CURRENT.set(self)

    def read(self, engine_client: Any, engine_request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """What the handler reads of the engine."""
        prompt, params = engine_request.prompt, engine_request.params
        response = self._response
        if self.number == 1:
            reason = why_not_resident(response.request, prompt, params)
            if reason is not None:
                response.injector.cached.refuse(1, reason)
                self.has_started.set()
                request = engine_request
                stock: AsyncGenerator[RequestOutput, None] = engine_client.generate(
                    request.prompt, params, request.request_id, **request.options
                )
                return stock
        prompt_ids = list(prompt["prompt_token_ids"])
        num_cached = None
        if self.number == 1:
            response.open(engine_request)
        else:
            num_cached = len(prompt_ids) - len(self._suffix_ids)
            if prompt_ids[num_cached:] != self._suffix_ids:
                raise RenderingRefusedError("the next turn's prompt does not end as the engine went on")
        response.injector.begin_turn(TurnStart(self.number, self._messages, prompt_ids))
        self.has_started.set()
        if response.reader is None:
            raise RenderingRefusedError("the sequence has ended")
        return response.reader.read(prompt_ids, params, num_cached)


_CURRENT: ContextVar[Turn | None] = ContextVar("spectool_turn", default=None)


class TurnClient:
    """vLLM's engine client, as its chat handler sees it: within a turn, `generate` reads that turn.

    Args:
        engine_client: vLLM's.
    """

    def __init__(self, engine_client: Any) -> None:
        self._engine_client = engine_client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine_client, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """See vllm/engine/protocol.py; no coroutine, so that what a turn refuses is raised in the handler."""
        turn = _CURRENT.get()
        if turn is None:
            stock: AsyncGenerator[RequestOutput, None] = self._engine_client.generate(
                prompt, sampling_params, request_id, **options
            )
            return stock
        return turn.read(self._engine_client, EngineRequest(prompt, sampling_params, request_id, options))


def why_not_resident(request: ChatCompletionRequest, prompt: Any, params: Any) -> RefusalReason | None:
    """Why a chat request's sequence cannot stay in the engine; None if it can.

    `scheduler.why_not_extendable` protects the scheduler, from the engine's request alone; the tools, the stop strings
    and the level sessions, which has no such scheduler, are seen here only.
    """
    if not isinstance(params, SamplingParams) or params.n != 1:
        return "several_samples"
    if not isinstance(prompt, dict) or prompt.get("type") != "token":
        return "prompt_is_not_text"
    reasons: dict[RefusalReason, bool] = {
        "no_tools": not request.tools or request.tool_choice not in ("auto", None),
        "structured_output": params.structured_outputs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "stop": bool(params.stop) or bool(request.stop_token_ids) or params.ignore_eos,
        "continued_message": request.echo or request.continue_final_message or not request.add_generation_prompt,
        "seeded_sampling": params.seed is not None and params.temperature > 0,
        "kv_transfer": request.kv_transfer_params is not None,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)

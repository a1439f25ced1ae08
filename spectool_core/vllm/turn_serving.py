"""One call of vLLM's chat handler per turn, over one sequence of the engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from spectool_core.vllm.answers import AnswerMessage, calls_of, event_data, single_pieces
from spectool_core.vllm.plans import TurnStart
from spectool_core.vllm.rendering import Message, ModelTokens, RenderingRefusedError
from spectool_core.vllm.residents import Injection, Resident
from spectool_core.vllm.sequences import EngineRequest, EngineSequence
from spectool_core.vllm.turn_outputs import TurnReader
from spectool_core.vllm.wire import REQUEST_ID_HEADER, server_sent_event

__all__ = ["RefusedAnswerError", "ResidentResponse", "TurnAnswer", "TurnClient", "TurnServer"]


class RefusedAnswerError(Exception):
    """vLLM's chat handler refuses a turn's request.

    Args:
        response: what it answered.
    """

    def __init__(self, response: ErrorResponse) -> None:
        self.response = response
        super().__init__(response.error.message)


@dataclass(frozen=True, slots=True)
class TurnServer:
    """What all responses share.

    Args:
        handler: vLLM's chat handler, whose engine client is a `TurnClient`.
        tokenizer: the model's.
        tokens: the model's.
        open_sequence: opens a sequence in the engine.
    """

    handler: Any
    tokenizer: Any
    tokens: ModelTokens
    open_sequence: Callable[[EngineRequest], EngineSequence]


class _Turn:
    """One turn, while vLLM's handler reads it."""

    def __init__(
        self, response: ResidentResponse, number: int, messages: Sequence[Message], suffix_ids: list[int]
    ) -> None:
        self.number = number
        self.has_started = asyncio.Event()
        self._response = response
        self._messages = messages
        self._suffix_ids = suffix_ids

    def read(self, engine_client: Any, engine_request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        prompt, params = engine_request.prompt, engine_request.params
        response = self._response
        if self.number == 1:
            reason = _left_alone(response.request, prompt, params)
            if reason:
                response.resident.cached.refuse(1, reason)
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
        response.resident.begin_turn(TurnStart(self.number, self._messages, prompt_ids))
        self.has_started.set()
        if response.reader is None:
            raise RenderingRefusedError("the sequence has ended")
        return response.reader.read(prompt_ids, params, num_cached)


_CURRENT: ContextVar[_Turn | None] = ContextVar("spectool_turn", default=None)


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


class TurnAnswer:
    """vLLM's answer in one turn.

    Args:
        number: the turn's.
        result: the handler's result.
        has_started: set when the turn is being generated.

    Attributes:
        answer: the message, as far as it has been read.
        completion: the whole answer, where it was not streamed and has been read.
        has_failed: whether an error ended the stream.
    """

    def __init__(self, number: int, result: asyncio.Task[Any], has_started: asyncio.Event) -> None:
        self.number = number
        self.answer = AnswerMessage()
        self.completion: dict[str, Any] | None = None
        self.has_failed = False
        self._result = result
        self._has_started = has_started

    async def wait_for_start(self) -> None:
        """Return when the turn is being generated; raises what the handler raises before that."""
        started = asyncio.create_task(self._has_started.wait())
        try:
            await asyncio.wait((started, self._result), return_when=asyncio.FIRST_COMPLETED)
        finally:
            started.cancel()
        if not self._has_started.is_set():
            await self.result()

    async def result(self) -> Any:
        """The handler's result: events, or a completion.

        Raises:
            RefusedAnswerError: it refuses the request.
        """
        result = await self._result
        if isinstance(result, ErrorResponse):
            raise RefusedAnswerError(result)
        return result

    async def events(self) -> AsyncIterator[tuple[str, dict[str, Any] | None]]:
        """The events of a streamed turn and their objects, `[DONE]` held back; or the completion as one event."""
        result = await self.result()
        if isinstance(result, ChatCompletionResponse):
            self.completion = result.model_dump()
            self.answer = AnswerMessage.of(self.completion)
            return
        async for event in result:
            data = event_data(event)
            if data is not None:
                self.has_failed |= "error" in data
                self.answer.add(data)
                parts = single_pieces(data)
                for part in parts:
                    yield event if len(parts) == 1 else server_sent_event(part), part

    def cancel(self) -> None:
        """Nobody reads on."""
        self._result.cancel()


class ResidentResponse:
    """One chat request, answered turn by turn.

    Args:
        server: what all responses share.
        request: as it came, before vLLM adjusts it.
        raw_request: as it came.
        base_id: the response id without "chatcmpl-".
        resident: the response's.
    """

    def __init__(
        self, server: TurnServer, request: ChatCompletionRequest, raw_request: Request, base_id: str, resident: Resident
    ) -> None:
        self.request = request
        self.resident = resident
        self.reader: TurnReader | None = None
        self._server = server
        self._raw_request = raw_request
        self._base_id = base_id
        self._sequence: EngineSequence | None = None
        self._messages: list[Message] = list(self.request.messages)
        self._answer: TurnAnswer | None = None
        self._is_closed = False

    def open(self, request: EngineRequest) -> None:
        """Open the engine's sequence; its first turn begins."""
        self._sequence = self._server.open_sequence(request)
        reader = self.reader = TurnReader(self._sequence, self._server.tokens, self._server.tokenizer)
        self.resident.num_left = lambda: (request.params.max_tokens or 0) - reader.num_written

    def begin(self) -> TurnAnswer:
        """The first turn."""
        return self._ask(_Turn(self, 1, self._messages, []))

    async def go_on(self, answer: TurnAnswer) -> tuple[Injection, TurnAnswer] | None:
        """The turn behind `answer`, which has been read to its end; None where the response is over."""
        calls = calls_of(answer.answer.message())
        sequence, reader = self._sequence, self.reader
        if sequence is None or reader is None or reader.end_id is None or calls is None:
            return None
        if answer.has_failed or answer.answer.finish_reason != "tool_calls":
            return None
        injection = await self.resident.settle(sequence, answer.answer.message(), calls, reader.end_id)
        if injection is None:
            return None
        self._messages = [*self._messages, *injection.messages]
        following = self._ask(_Turn(self, answer.number + 1, self._messages, injection.suffix_ids))
        try:
            await following.wait_for_start()
        except Exception as exc:  # whatever vLLM says of a request that nobody has made: the client makes its own
            self.resident.cached.refuse(answer.number, f"the next turn cannot begin: {exc}")
            return None
        return injection, following

    def _ask(self, turn: _Turn) -> TurnAnswer:
        messages = copy.deepcopy(self._messages)
        request = self.request.model_copy(update={"messages": messages})
        raw_request = self._raw_request
        if turn.number > 1:
            raw_request = _with_request_id(raw_request, f"{self._base_id}-t{turn.number}")
        result = asyncio.get_running_loop().create_task(self._stock_call(turn, request, raw_request))
        self._answer = TurnAnswer(turn.number, result, turn.has_started)
        return self._answer

    async def _stock_call(self, turn: _Turn, request: ChatCompletionRequest, raw_request: Request) -> Any:
        _CURRENT.set(turn)  # in this task's own context
        return await self._server.handler.create_chat_completion(request, raw_request)

    async def aclose(self) -> None:
        """Abort what still runs; a second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self.resident.close()
        if self._answer is not None:
            self._answer.cancel()
        if self._sequence is not None:
            await self._sequence.aclose()
            await self.resident.note_end()


def _with_request_id(raw_request: Request, request_id: str) -> Request:
    name = REQUEST_ID_HEADER.lower().encode()
    headers = [(key, value) for key, value in raw_request.scope["headers"] if key.lower() != name]
    scope = {**raw_request.scope, "headers": [*headers, (name, request_id.encode())]}
    return Request(scope, raw_request.receive)


def _left_alone(request: ChatCompletionRequest, prompt: Any, params: Any) -> str:
    """Why a request cannot be gone on from; empty if it can."""
    if not isinstance(params, SamplingParams) or params.n != 1:
        return "several_samples"
    if not isinstance(prompt, dict) or prompt.get("type") != "token":
        return "prompt_is_not_text"
    reasons = {
        "no_tools": not request.tools or request.tool_choice not in ("auto", None),
        "structured_output": params.structured_outputs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "stop": bool(params.stop) or bool(request.stop_token_ids) or params.ignore_eos,
        "continued_message": request.echo or request.continue_final_message or not request.add_generation_prompt,
        "seeded_sampling": params.seed is not None and params.temperature > 0,
        "kv_transfer": request.kv_transfer_params is not None,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")

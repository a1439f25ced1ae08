"""One call of vLLM's chat handler per turn, over one sequence of the engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from spectool_core.vllm.answers import AnswerMessage, calls_of, event_data, single_pieces
from spectool_core.vllm.injector import Injection, Injector
from spectool_core.vllm.rendering import Message, ModelTokens
from spectool_core.vllm.sequences import EngineRequest, EngineSequence
from spectool_core.vllm.turn_client import Turn
from spectool_core.vllm.turn_outputs import TurnReader
from spectool_core.vllm.wire import REQUEST_ID_HEADER, server_sent_event

__all__ = ["RefusedAnswerError", "ResidentResponse", "TurnAnswer", "TurnServer"]


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
        handler: vLLM's chat handler, whose engine client is a `turn_client.TurnClient`.
        tokenizer: the model's.
        tokens: the model's.
        open_sequence: opens a sequence in the engine.
    """

    handler: Any
    tokenizer: Any
    tokens: ModelTokens
    open_sequence: Callable[[EngineRequest], EngineSequence]


class TurnAnswer:
    """vLLM's answer in one turn.

    Args:
        number: the turn's.
        result: the handler's result.
        has_started: set when the turn is being generated.

    Attributes:
        message: as far as it has been read.
        completion: the whole answer, where it was not streamed and has been read.
        has_failed: whether an error ended the stream.
    """

    def __init__(self, number: int, result: asyncio.Task[Any], has_started: asyncio.Event) -> None:
        self.number = number
        self.message = AnswerMessage()
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
            self.message = AnswerMessage.of(self.completion)
            return
        async for event in result:
            data = event_data(event)
            if data is not None:
                self.has_failed |= "error" in data
                self.message.add(data)
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
        injector: the response's.
    """

    def __init__(
        self, server: TurnServer, request: ChatCompletionRequest, raw_request: Request, base_id: str, injector: Injector
    ) -> None:
        self.request = request
        self.injector = injector
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
        self.injector.num_left = lambda: (request.params.max_tokens or 0) - reader.num_written

    def begin(self) -> TurnAnswer:
        """The first turn."""
        return self._ask(Turn(self, 1, self._messages, []))

    async def go_on(self, answer: TurnAnswer) -> tuple[Injection, TurnAnswer] | None:
        """The turn behind `answer`, which has been read to its end; None where the response is over."""
        message = answer.message.as_dict()
        calls = calls_of(message)
        sequence, reader = self._sequence, self.reader
        if sequence is None or reader is None or reader.end_id is None or calls is None:
            return None
        if answer.has_failed or answer.message.finish_reason != "tool_calls":
            return None
        injection = await self.injector.inject(sequence, message, calls, reader.end_id)
        if injection is None:
            return None
        self._messages = [*self._messages, *injection.messages]
        following = self._ask(Turn(self, answer.number + 1, self._messages, injection.suffix_ids))
        try:
            await following.wait_for_start()
        except Exception as exc:  # whatever vLLM says of a request that nobody has made: the client makes its own
            self.injector.cached.refuse(answer.number, "next_turn_refused", str(exc))
            return None
        return injection, following

    def _ask(self, turn: Turn) -> TurnAnswer:
        messages = copy.deepcopy(self._messages)
        request = self.request.model_copy(update={"messages": messages})
        raw_request = self._raw_request
        if turn.number > 1:
            raw_request = _with_request_id(raw_request, f"{self._base_id}-t{turn.number}")
        result = asyncio.get_running_loop().create_task(self._stock_call(turn, request, raw_request))
        self._answer = TurnAnswer(turn.number, result, turn.has_started)
        return self._answer

    async def _stock_call(self, turn: Turn, request: ChatCompletionRequest, raw_request: Request) -> Any:
        turn.enter()
        return await self._server.handler.create_chat_completion(request, raw_request)

    async def aclose(self) -> None:
        """Abort what still runs; a second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self.injector.close()
        if self._answer is not None:
            self._answer.cancel()
        if self._sequence is not None:
            await self._sequence.aclose()
            await self.injector.note_unexplained_finish()


def _with_request_id(raw_request: Request, request_id: str) -> Request:
    name = REQUEST_ID_HEADER.lower().encode()
    headers = [(key, value) for key, value in raw_request.scope["headers"] if key.lower() != name]
    scope = {**raw_request.scope, "headers": [*headers, (name, request_id.encode())]}
    return Request(scope, raw_request.receive)

"""A sequence that stays in the engine over several turns, held by the scheduler or by a stock resumable session."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from vllm.engine.protocol import StreamingInput
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from spectool_core.vllm.engine_commands import EngineCommands
from spectool_core.vllm.turns import EndedTurn

__all__ = ["EngineRequest", "EngineSequence", "ScheduledSequence", "SessionSequence"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What vLLM's chat handler gave to `generate`.

    Args:
        prompt: the rendered prompt.
        params: the sampling parameters.
        request_id: the response id.
        options: further keyword arguments.
    """

    prompt: Any
    params: SamplingParams
    request_id: str
    options: dict[str, Any]


class EngineSequence(ABC):
    """One request of the engine, read as deltas.

    Args:
        engine_client: vLLM's.
        request: the first turn's.
    """

    def __init__(self, engine_client: Any, request: EngineRequest) -> None:
        self._engine_client = engine_client
        self._request = replace(request, params=_as_deltas(request.params))
        self._outputs: AsyncGenerator[RequestOutput, None] = self._open()

    @abstractmethod
    def _open(self) -> AsyncGenerator[RequestOutput, None]: ...

    @abstractmethod
    async def turn_end(self, turn: int) -> EndedTurn:
        """How the turn was ended whose end token has come."""

    @abstractmethod
    async def resume(self, turn: int, end_id: int, suffix_ids: Sequence[int], max_tokens: int | None) -> bool:
        """A parked sequence goes on by `suffix_ids`; False if it cannot."""

    @abstractmethod
    async def release(self, turn: int) -> None:
        """The sequence ends here, parked or not."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self._outputs

    async def aclose(self) -> None:
        """Abort what still runs in the engine."""
        try:
            await self._outputs.aclose()
        except RuntimeError:
            # Another task is reading, and is being cancelled: vLLM's generate() aborts the request then.
            await self._engine_client.abort(self._request.request_id)


class ScheduledSequence(EngineSequence):
    """Levels o3 and o2+o3: the scheduler of `scheduler` decides at each turn's end.

    Args:
        engine_client: vLLM's.
        request: the first turn's.
        commands: the engine core's.
        end_ids: the tokens that may end a turn which holds calls.
    """

    def __init__(
        self, engine_client: Any, request: EngineRequest, commands: EngineCommands, end_ids: Collection[int]
    ) -> None:
        super().__init__(engine_client, request)
        self._commands = commands
        self._announcing = commands.begin("announce", request.request_id, sorted(end_ids))
        self._announcing.add_done_callback(_retrieve)

    async def _open(self) -> AsyncGenerator[RequestOutput, None]:
        # When this task goes on, the announcement's has made its first step: it is ahead of the request.
        await asyncio.sleep(0)
        request = self._request
        generate = self._engine_client.generate
        outputs = generate(request.prompt, request.params, request.request_id, **request.options)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def turn_end(self, turn: int) -> EndedTurn:
        """See `EngineSequence`."""
        for record in await self._commands.call("turns", self._request.request_id):
            if record["turn"] == turn and record["outcome"] in ("injected", "parked"):
                return EndedTurn(record["outcome"], tuple(record["keys"]))
            if record["turn"] == turn:
                return EndedTurn("finished", tuple(record["keys"]), record["reason"] or None)
        return EndedTurn("finished")

    async def resume(self, turn: int, end_id: int, suffix_ids: Sequence[int], max_tokens: int | None) -> bool:  # noqa: ARG002
        """See `EngineSequence`."""
        return bool(await self._commands.call("resume", self._request.request_id, turn, list(suffix_ids), max_tokens))

    async def release(self, turn: int) -> None:
        """See `EngineSequence`."""
        await self._commands.call("release", self._request.request_id, turn)
        await self.aclose()


_SESSION_OPTIONS = frozenset({"data_parallel_rank", "lora_request", "priority", "session_id", "trace_headers"})

_Inputs: TypeAlias = "asyncio.Queue[StreamingInput | None]"


class SessionSequence(EngineSequence):
    """Level sessions: the stock scheduler parks a resumable session at each turn's end (v1/engine/async_llm.py)."""

    def __init__(self, engine_client: Any, request: EngineRequest, max_model_len: int) -> None:
        self._inputs: _Inputs = asyncio.Queue()
        self._max_model_len = max_model_len
        self._num_tokens = len(request.prompt["prompt_token_ids"])
        super().__init__(engine_client, request)

    async def _open(self) -> AsyncGenerator[RequestOutput, None]:
        request = self._request
        options = {name: value for name, value in request.options.items() if name in _SESSION_OPTIONS}
        self._inputs.put_nowait(StreamingInput(prompt=request.prompt))
        outputs = self._engine_client.generate(self._read_inputs(), request.params, request.request_id, **options)
        try:
            async for output in outputs:
                self._num_tokens += len(output.outputs[0].token_ids)
                yield output
        finally:
            await outputs.aclose()

    async def _read_inputs(self) -> AsyncGenerator[StreamingInput, None]:
        while (given := await self._inputs.get()) is not None:
            yield given

    async def turn_end(self, turn: int) -> EndedTurn:  # noqa: ARG002
        """See `EngineSequence`."""
        return EndedTurn("parked")

    async def resume(self, turn: int, end_id: int, suffix_ids: Sequence[int], max_tokens: int | None) -> bool:  # noqa: ARG002
        """See `EngineSequence`."""
        params = self._request.params.clone()
        params.max_tokens = max_tokens
        num_tokens = self._num_tokens + len(suffix_ids)
        if num_tokens + 1 > self._max_model_len or (max_tokens is not None and max_tokens < 1):
            return False
        self._num_tokens = num_tokens
        # The engine drops the last token that was sampled, as it has no KV: it is sent again.
        self._inputs.put_nowait(StreamingInput(prompt=tokens_input([end_id, *suffix_ids]), sampling_params=params))
        return True

    async def release(self, turn: int) -> None:  # noqa: ARG002
        """See `EngineSequence`."""
        await self.aclose()


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # an engine that does not answer is seen by who reads from it


def _as_deltas(params: SamplingParams) -> SamplingParams:
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    # Each turn's text is made anew, as for a request of its own; only logprobs need the tokenizer earlier.
    params.detokenize = params.detokenize and params.logprobs is not None
    return params

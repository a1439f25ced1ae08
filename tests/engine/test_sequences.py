"""A sequence over stock resumable sessions, and what it sends to them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from spectool_core.vllm.sequences import EngineRequest, SessionSequence

PROMPT = [1, 5, 6]
TURNS = [[[7], [8, 2]], [[9, 2]]]


class Sessions:
    """An engine client whose session writes one of `TURNS` for each input, in these deltas."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.is_closed = False

    async def generate(
        self, inputs: AsyncIterator[Any], params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        try:
            async for given in inputs:
                self.inputs.append(given)
                for delta in TURNS[len(self.inputs) - 1]:
                    completion = CompletionOutput(0, "", delta, 0.0, None)
                    yield RequestOutput(request_id, None, PROMPT, None, [completion], finished=False)
        finally:
            self.is_closed = True


async def read_turn(sequence: SessionSequence) -> list[int]:
    token_ids: list[int] = []
    async for output in sequence:
        token_ids += output.outputs[0].token_ids
        if token_ids[-1] == 2:
            break
    return token_ids


# The prompt of 3 tokens, a turn of 3, a suffix of 2, a turn of 2, a suffix of 2, and one token of the model's.
@pytest.mark.parametrize(("max_model_len", "goes_on"), [(12, False), (13, True)])
async def test_a_session_goes_on_while_there_is_room(max_model_len: int, *, goes_on: bool) -> None:
    engine = Sessions()
    request = EngineRequest({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=100), "chatcmpl-a", {})
    sequence = SessionSequence(engine, request, max_model_len)

    assert await read_turn(sequence) == [7, 8, 2]
    assert not await sequence.resume(1, 2, [3, 4], 0)
    assert await sequence.resume(1, 2, [3, 4], 50)
    assert await read_turn(sequence) == [9, 2]
    assert await sequence.resume(2, 2, [3, 4], 50) == goes_on

    assert engine.inputs[1].prompt["prompt_token_ids"] == [2, 3, 4]
    assert engine.inputs[1].sampling_params.max_tokens == 50
    await sequence.release(2)
    assert engine.is_closed

"""Turns read from one sequence of the engine, however vLLM merges its deltas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from spectool_core.vllm.formats import Hermes
from spectool_core.vllm.rendering import ModelTokens
from spectool_core.vllm.turn_outputs import TurnReader

TURNS = ['<tool_call>\n{"name": "f", "arguments": {"x": "é漢🙂"}}\n</tool_call>', "It is 15 °C — São Paulo. 🙂"]
PROMPTS = [[1, 4093, 198], [1, 9690, 198, 2]]


class FakeSequence:
    """A sequence that says these deltas; the last is finished."""

    def __init__(
        self, deltas: Sequence[Sequence[int]], finish_reason: str = "stop", *, is_session: bool = False
    ) -> None:
        self._deltas = deltas
        self._finish_reason = finish_reason
        self._is_session = is_session

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        for place, delta in enumerate(self._deltas):
            is_last = place + 1 == len(self._deltas)
            logprobs: Any = [{token_id: token_id} for token_id in delta]
            finish_reason = self._finish_reason if is_last or (self._is_session and delta[-1] == 2) else None
            completion = CompletionOutput(0, "", list(delta), 0.0, logprobs, finish_reason=finish_reason)
            yield RequestOutput("r", None, [0], None, [completion], is_last, num_cached_tokens=7)


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def tokens(tokenizer: Any) -> ModelTokens:
    return ModelTokens.of(tokenizer, 2, Hermes())


def params(kind: RequestOutputKind = RequestOutputKind.DELTA) -> SamplingParams:
    return SamplingParams(temperature=0, output_kind=kind, skip_special_tokens=False)


def written(tokenizer: Any) -> list[list[int]]:
    return [[*tokenizer.encode(text, add_special_tokens=False), 2] for text in TURNS]


def cut(token_ids: list[int], places: list[int]) -> list[list[int]]:
    edges = [0, *sorted({place % len(token_ids) for place in places} - {0}), len(token_ids)]
    return [token_ids[start:stop] for start, stop in pairwise(edges)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.integers(0, 1000), max_size=12), is_delta=st.booleans())
async def test_turns_are_what_their_own_requests_would_have_been(
    places: list[int], tokenizer: Any, tokens: ModelTokens, *, is_delta: bool
) -> None:
    turns = written(tokenizer)
    reader = TurnReader(FakeSequence(cut(turns[0] + turns[1], places)), tokens, tokenizer)  # type: ignore[arg-type]
    kind = RequestOutputKind.DELTA if is_delta else RequestOutputKind.FINAL_ONLY

    for number, (token_ids, text, prompt_ids) in enumerate(zip(turns, TURNS, PROMPTS, strict=True)):
        outputs = [output async for output in reader.read(prompt_ids, params(kind), 3 if number else None)]

        completions = [output.outputs[0] for output in outputs]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert [token for completion in completions for token in completion.token_ids] == token_ids
        assert "".join(completion.text for completion in completions) == text
        assert [next(iter(told)) for completion in completions for told in completion.logprobs or ()] == token_ids
        assert (completions[-1].finish_reason, completions[-1].stop_reason) == ("stop", None)
        assert all(output.prompt_token_ids == prompt_ids for output in outputs)
        assert outputs[-1].num_cached_tokens == (3 if number else 7)
        assert len(outputs) == 1 or is_delta
        assert reader.end_id == (None if number else 2)
    assert reader.num_written == len(turns[0] + turns[1])


async def test_a_session_that_is_parked_may_go_on_until_it_is_finished(tokenizer: Any, tokens: ModelTokens) -> None:
    first, second = written(tokenizer)
    reader = TurnReader(FakeSequence([first, second], is_session=True), tokens, tokenizer)  # type: ignore[arg-type]

    for end_id, prompt_ids in ((2, PROMPTS[0]), (None, PROMPTS[1])):
        outputs = [output async for output in reader.read(prompt_ids, params(), None)]
        assert outputs[-1].outputs[0].finish_reason == "stop"
        assert reader.end_id == end_id


@pytest.mark.parametrize("finish_reason", ["length", "abort"])
async def test_another_finish_is_passed_on(finish_reason: str, tokenizer: Any, tokens: ModelTokens) -> None:
    first, _ = written(tokenizer)
    reader = TurnReader(FakeSequence([first[:3], first[3:-1]], finish_reason), tokens, tokenizer)  # type: ignore[arg-type]

    outputs = [output async for output in reader.read(PROMPTS[0], params(), None)]

    assert outputs[-1].outputs[0].finish_reason == finish_reason
    assert "".join(output.outputs[0].text for output in outputs) == TURNS[0]
    assert reader.end_id is None


async def test_an_end_token_that_is_not_the_eos_is_the_stop_reason(tokenizer: Any) -> None:
    first, second = written(tokenizer)
    tokens = ModelTokens(0, frozenset({0, 2}), frozenset({2}), frozenset(), (), ())
    reader = TurnReader(FakeSequence([first + second]), tokens, tokenizer)  # type: ignore[arg-type]

    (output,) = [output async for output in reader.read(PROMPTS[0], params(), None)]

    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 2)

"""Scripted models without sockets, timed to the nanosecond on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import openai
import pytest

from spectool_core.calls import Prompt, ToolCall
from spectool_core.speculators import Speculator
from spectool_core.testing import (
    Answer,
    ChatRequest,
    DroppedConnection,
    EmptyChoices,
    Hang,
    HttpError,
    Latch,
    ModelPlayback,
    ModelServer,
    ScriptedCall,
    ScriptedFaultError,
    ScriptedModel,
    ScriptedSpeculator,
    TruncatedAnswer,
    run_virtual,
)

QUESTION = [{"role": "user", "content": "which?"}]
PROMPT = Prompt(QUESTION)
ONE = Answer(tool_calls=[ScriptedCall("search", {"query": "tides"}, id="c1")])
TWO = Answer(tool_calls=[ScriptedCall("search", {"query": "tides"}), ScriptedCall("search", {"query": "tides"})])


async def predicted(speculator: Speculator, prompt: Prompt = PROMPT) -> list[tuple[float, ToolCall]]:
    loop = asyncio.get_running_loop()
    return [(loop.time(), call) async for call in speculator.predict(prompt, ())]


def test_speculator_follows_the_protocol():
    assert isinstance(ScriptedSpeculator(ONE), Speculator)


def test_one_call_comes_exactly_after_generation():
    speculator = ScriptedSpeculator(ScriptedModel(ONE, generation_s=0.4))
    assert run_virtual(lambda: predicted(speculator)) == [(0.4, ToolCall("search", {"query": "tides"}, "c1"))]
    assert speculator.num_predictions == 1
    assert speculator.statistics().num_requests == 1
    assert speculator.num_active_requests == 0


def test_parallel_calls_come_each_at_its_own_last_token():
    speculator = ScriptedSpeculator(ScriptedModel(TWO, generation_s=1.0, time_to_first_token_s=0.5))
    assert [at for at, _ in run_virtual(lambda: predicted(speculator))] == [0.75, 1.0]


def test_turns_and_samples_follow_the_script():
    model = ScriptedModel([ONE, Answer("done")], acceptance_rate=0.5, generation_s=0.1)
    speculator = ScriptedSpeculator(model, num_samples=8)

    calls = [call.arguments["query"] for _, call in run_virtual(lambda: predicted(speculator))]
    assert len(calls) == 8
    assert 0 < calls.count("tides") < 8

    after = Prompt([*QUESTION, {"role": "assistant", "content": "..."}])
    assert run_virtual(lambda: predicted(speculator, after)) == []


def test_cancelled_prediction_is_counted_with_the_tokens_generated():
    speculator = ScriptedSpeculator(
        ScriptedModel(Answer(tool_calls=ONE.tool_calls, completion_tokens=100), generation_s=1)
    )

    async def main() -> None:
        predicting = asyncio.create_task(predicted(speculator))
        await asyncio.sleep(0.25)
        predicting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await predicting

    run_virtual(main)
    counts = speculator.statistics()
    assert counts.num_cancelled_requests == 1
    assert counts.num_completion_tokens == 25
    assert speculator.num_predictions == speculator.num_active_requests == 0


def test_prediction_closed_half_way_is_cancelled():
    speculator = ScriptedSpeculator(ScriptedModel(TWO, generation_s=1))

    async def main() -> None:
        predictions = speculator.predict(PROMPT, ())
        await anext(predictions)
        await predictions.aclose()

    run_virtual(main)
    assert speculator.statistics().num_cancelled_requests == 1


def test_prediction_closed_after_its_last_call_is_complete():
    speculator = ScriptedSpeculator(ScriptedModel(ONE, generation_s=1))

    async def main() -> None:
        predictions = speculator.predict(PROMPT, ())
        await anext(predictions)
        await predictions.aclose()

    run_virtual(main)
    assert speculator.statistics().num_cancelled_requests == 0


def test_malformed_arguments_are_no_prediction():
    calls = [ScriptedCall("search", '{"query": "ti'), ScriptedCall("search", "[1]"), ScriptedCall("search", {})]
    speculator = ScriptedSpeculator(Answer(tool_calls=calls))
    assert [call.arguments for _, call in run_virtual(lambda: predicted(speculator))] == [{}]
    assert speculator.statistics().num_malformed_calls == 2


@pytest.mark.parametrize(
    ("fault", "at_s"),
    [(HttpError(429, after_s=0.2), 0.2), (DroppedConnection(), 0.0), (DroppedConnection("mid_body"), 0.5)],
)
def test_faults_are_raised_on_time(fault, at_s):
    speculator = ScriptedSpeculator(ScriptedModel(Answer(tool_calls=TWO.tool_calls, fault=fault), generation_s=1.0))

    async def main() -> float:
        with pytest.raises(ScriptedFaultError) as caught:
            await predicted(speculator)
        assert caught.value.fault == fault
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == at_s
    assert speculator.statistics().num_failed_requests == 1


@pytest.mark.parametrize("fault", [Hang(), Hang("mid_body")])
def test_hang_lasts_until_cancelled(fault):
    speculator = ScriptedSpeculator(ScriptedModel(Answer(tool_calls=TWO.tool_calls, fault=fault), generation_s=1.0))

    async def main() -> None:
        async with asyncio.timeout(3600):
            await predicted(speculator)

    with pytest.raises(TimeoutError):
        run_virtual(main)
    assert speculator.statistics().num_cancelled_requests == 1


@pytest.mark.parametrize("fault", [TruncatedAnswer(), EmptyChoices()])
def test_answers_without_an_end_fail_quietly(fault):
    speculator = ScriptedSpeculator(Answer(tool_calls=TWO.tool_calls, fault=fault))
    assert run_virtual(lambda: predicted(speculator)) == []
    assert speculator.statistics().num_failed_requests == 1


def read_words(text: str) -> list[ToolCall]:
    """Every word that can be a name is a call, unless the text says stop or nothing."""
    if "stop" in text or not text.strip():
        raise ValueError(text)
    return [ToolCall(word, {}) for word in text.split() if word.isidentifier()]


READ_AS_TEXT = Prompt(QUESTION, read_text=read_words)


def test_calls_are_read_from_the_text_when_its_choice_has_ended():
    def script(request: ChatRequest) -> Answer:
        return Answer(f"search {'twice' * request.choice}", tool_calls=ONE.tool_calls, generation_s=2 - request.choice)

    speculator = ScriptedSpeculator(script, num_samples=2)
    assert run_virtual(lambda: predicted(speculator, READ_AS_TEXT)) == [
        (1, ToolCall("search", {})),
        (1, ToolCall("twice", {})),
        (2, ToolCall("search", {})),
    ]
    assert speculator.num_predictions == 3
    assert speculator.statistics().num_failed_requests == speculator.statistics().num_malformed_calls == 0


@pytest.mark.parametrize(
    ("answer", "num_failed", "num_malformed"),
    [
        (Answer(), 0, 0),
        (Answer(" \n"), 0, 0),
        (Answer("please stop"), 0, 1),
        (Answer("search", finish_reason="length"), 0, 0),
        (Answer("search", finish_reason="content_filter"), 0, 0),
        (Answer("search " * 50, fault=TruncatedAnswer()), 1, 0),
        (Answer("search", fault=EmptyChoices()), 1, 0),
    ],
)
def test_texts_that_give_no_call(answer, num_failed, num_malformed):
    speculator = ScriptedSpeculator(answer)
    assert run_virtual(lambda: predicted(speculator, READ_AS_TEXT)) == []
    assert speculator.statistics().num_failed_requests == num_failed
    assert speculator.statistics().num_malformed_calls == num_malformed


def test_latch_holds_a_prediction_and_starts_its_time():
    latch = Latch(timeout_s=60)
    speculator = ScriptedSpeculator(ScriptedModel(Answer(tool_calls=ONE.tool_calls, latch=latch), generation_s=0.4))

    async def main() -> list[tuple[float, ToolCall]]:
        asyncio.get_running_loop().call_later(2, latch.open)
        return await predicted(speculator)

    assert [at for at, _ in run_virtual(main)] == [2.4]


def test_playback_completes_and_streams_on_time():
    playback = ModelPlayback(ScriptedModel(Answer("word " * 20), generation_s=2.0, time_to_first_token_s=1.0))

    async def main() -> Sequence[float]:
        loop = asyncio.get_running_loop()
        completion = await playback.complete(playback.request(QUESTION))
        assert completion["choices"][0]["message"]["content"] == "word " * 20
        completed_s = loop.time()
        due = [loop.time() async for _ in playback.stream(playback.request(QUESTION))]
        return [completed_s, due[0], due[-1]]

    assert run_virtual(main) == [2.0, 3.0, 4.0]
    assert playback.statistics().num_completed_requests == 2


@pytest.mark.parametrize("fault", [TruncatedAnswer(), DroppedConnection("mid_body"), HttpError()])
def test_playback_raises_where_there_is_no_whole_answer(fault):
    playback = ModelPlayback(Answer("text", fault=fault))
    with pytest.raises(ScriptedFaultError):
        run_virtual(lambda: playback.complete(playback.request(QUESTION)))
    assert playback.statistics().num_failed_requests == 1


async def test_playback_says_what_the_server_says():
    model = ScriptedModel(TWO, acceptance_rate=0.5, reasoning_tokens=5)
    async with (
        ModelServer({"main": model}) as server,
        openai.AsyncOpenAI(base_url=server.base_url, api_key="unused") as client,
    ):
        over_http = await client.chat.completions.create(model="main", messages=QUESTION, n=3)
    playback = ModelPlayback(model)
    in_process = await playback.complete(playback.request(QUESTION, n=3))

    assert over_http.to_dict() == {**in_process, "created": over_http.created}

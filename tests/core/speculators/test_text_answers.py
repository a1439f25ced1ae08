"""The model speculator where the main model is given no tools, so that its calls are read from its text."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import aclosing
from typing import Any

import pytest

from spectool_core.calls import Prompt, ToolCall
from spectool_core.speculators import SpeculatorStatistics
from spectool_core.testing import (
    Answer,
    ChatRequest,
    DroppedConnection,
    EmptyChoices,
    Fault,
    Hang,
    HttpError,
    ModelServer,
    ScriptedCall,
    TruncatedAnswer,
)
from tests.core.speculators.asking import EITHER, MESSAGES, PROMPT, TOOLS, Clock, of, predicted, speculator_at
from tests.core.speculators.canned import CannedServer, call, chunk, completion, http, sse

TIDES = 'Thought: I need to look.\nAction: search\nAction Input: {"query": "tides ~ü"}\n'
MOON = 'Action: search\nAction Input: {"query": "moon"}\n'
SEARCH_TIDES = ("search", {"query": "tides ~ü"})
SEARCH_MOON = ("search", {"query": "moon"})


class Reader:
    """Reads actions as a ReAct agent writes them, and remembers the texts that it was given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> list[ToolCall]:
        self.texts.append(text)
        actions = re.findall(r"Action: (\w+)\nAction Input: (.*)\n", text)
        return [ToolCall(name, json.loads(arguments)) for name, arguments in actions]


def asking(reader: Reader, **fields: Any) -> Prompt:
    return Prompt(MESSAGES, read_text=reader, **fields)


def text_completion(*contents: Any, finish: str = "stop") -> bytes:
    choices = [
        {"index": i, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
        for i, content in enumerate(contents)
    ]
    return http({"choices": choices})


def text_stream(*contents: Any) -> bytes:
    chunks = [{"choices": [{"index": 0, "delta": {"content": content}}]} for content in contents]
    return http(sse(*chunks, chunk(finish="stop")), kind="text/event-stream")


# What is asked


@EITHER
async def test_it_asks_with_the_messages_alone(streaming: bool) -> None:
    prompt = asking(Reader(), tool_choice="auto", parallel_tool_calls=False)
    settings: dict[str, Any] = {
        "temperature": 0.5,
        "extra_body": {"top_p": 0.5, "tool_choice": "auto", "parallel_tool_calls": True},
    }
    async with (
        ModelServer({"s": Answer(TIDES)}) as server,
        speculator_at(server.base_url, streaming=streaming, **settings) as speculator,
    ):
        assert of(await predicted(speculator, prompt)) == [SEARCH_TIDES]

    extra = {"stream": True, "stream_options": {"include_usage": True}} if streaming else {}
    assert server.requests[0].body == {"model": "s", "messages": MESSAGES, "temperature": 0.5, "top_p": 0.5, **extra}


@pytest.mark.parametrize(("tools", "tool_choice"), [([], None), (TOOLS, "none"), ([], "none")])
async def test_it_asks_whatever_is_said_of_tools(tools: list[Any], tool_choice: Any) -> None:
    prompt = asking(Reader(), tool_choice=tool_choice)
    async with ModelServer({"s": Answer(TIDES)}) as server, speculator_at(server.base_url) as speculator:
        assert of(await predicted(speculator, prompt, tools)) == [SEARCH_TIDES]


async def test_a_pause_that_the_endpoint_asked_for_is_kept() -> None:
    answer = Answer(fault=HttpError(429, retry_after_s=60))
    async with ModelServer({"s": answer}) as server, speculator_at(server.base_url, clock=Clock()) as speculator:
        assert [await predicted(speculator, asking(Reader())) for _ in range(2)] == [[], []]
        assert server.statistics().num_requests == 1


async def test_auto_neither_streams_text_nor_learns_from_it() -> None:
    clock = Clock()

    def answers(body: dict[str, Any]) -> bytes:
        clock.now_s += 1
        if "tools" not in body:
            return text_stream(TIDES)  # although it was not asked for
        return http(sse(chunk(call("a", '{"x":1}', index=0), finish="stop")), kind="text/event-stream")

    async with CannedServer(answers) as server, speculator_at(server.base_url, clock=clock) as speculator:
        for _ in range(3):
            for _ in range(2):
                assert len(await predicted(speculator, asking(Reader()))) == 1
            await predicted(speculator)
        for _ in range(2 + 31):
            await predicted(speculator)
            assert len(await predicted(speculator, asking(Reader()))) == 1
    streams = [bool(body.get("stream")) for body in server.bodies if "tools" in body]
    assert streams == [True] * 4 + [False] * 31 + [True]
    assert not any("stream" in body for body in server.bodies if "tools" not in body)


# What is read


@EITHER
async def test_the_reader_gets_the_whole_text_once(streaming: bool) -> None:
    reader = Reader()
    text = " \n" + TIDES + MOON + " "
    async with (
        ModelServer({"s": Answer(text, reasoning_tokens=5)}) as server,
        speculator_at(server.base_url, streaming=streaming) as speculator,
    ):
        assert of(await predicted(speculator, asking(reader))) == [SEARCH_TIDES, SEARCH_MOON]
    assert reader.texts == [text]


async def test_it_reads_what_comes_whatever_was_asked_for() -> None:
    def answers(body: dict[str, Any]) -> bytes:
        return text_completion(TIDES) if body.get("stream") else text_stream(TIDES[:30], TIDES[30:])

    async with CannedServer(answers) as server:
        for streaming in (True, False):
            async with speculator_at(server.base_url, streaming=streaming) as speculator:
                assert of(await predicted(speculator, asking(Reader()))) == [SEARCH_TIDES]


@EITHER
async def test_a_content_of_parts_is_its_text(streaming: bool) -> None:
    reader = Reader()
    parts = [{"type": "thinking", "text": "Hm."}, {"type": "text", "text": TIDES[:30]}, {"text": TIDES[30:40]}]
    last = [{"type": "text", "text": TIDES[40:]}]

    def answers(body: dict[str, Any]) -> bytes:
        return text_stream(parts, None, last) if streaming else text_completion([*parts, *last])

    async with CannedServer(answers) as server, speculator_at(server.base_url, streaming=streaming) as speculator:
        assert of(await predicted(speculator, asking(reader))) == [SEARCH_TIDES]
    assert reader.texts == [TIDES]


@pytest.mark.parametrize("content", [5, True, {"text": TIDES}, [TIDES], [{"type": "text", "text": 5}], [{}]])
async def test_a_content_that_is_no_text_is_never_read(content: Any) -> None:
    reader = Reader()

    def answers(body: dict[str, Any]) -> bytes:
        return text_stream(TIDES, content, TIDES) if body.get("stream") else text_completion(content, MOON)

    async with CannedServer(answers) as server:
        async with speculator_at(server.base_url, streaming=True) as speculator:
            assert await predicted(speculator, asking(reader)) == []
            assert speculator.statistics().num_failed_requests == 1
        async with speculator_at(server.base_url, streaming=False) as speculator:
            assert of(await predicted(speculator, asking(reader))) == [SEARCH_MOON]
            assert speculator.statistics().num_malformed_calls == 1
    assert reader.texts == [MOON]


@EITHER
@pytest.mark.parametrize("text", ["", " \n"])
async def test_an_empty_text_is_no_call(text: str, streaming: bool) -> None:
    reader = Reader()
    async with (
        ModelServer({"s": Answer(text)}) as server,
        speculator_at(server.base_url, streaming=streaming) as speculator,
    ):
        assert await predicted(speculator, asking(reader)) == []
        assert speculator.statistics().num_malformed_calls == speculator.statistics().num_failed_requests == 0
    assert reader.texts == []


@EITHER
async def test_a_text_without_calls_is_an_answer_like_any_other(streaming: bool) -> None:
    async with (
        ModelServer({"s": Answer("Answer: high at noon.", completion_tokens=9)}) as server,
        speculator_at(server.base_url, streaming=streaming) as speculator,
    ):
        assert await predicted(speculator, asking(Reader())) == []
        assert speculator.statistics() == SpeculatorStatistics(
            num_requests=1, num_prompt_tokens=server.statistics().num_prompt_tokens, num_completion_tokens=9
        )


@EITHER
@pytest.mark.parametrize("found", [ValueError("no JSON"), RecursionError(), None])
async def test_a_reader_that_fails_takes_no_other_choice_with_it(found: Any, streaming: bool) -> None:
    def read(text: str) -> Any:
        if text == MOON:
            return Reader()(text)
        if found is None:
            return found
        raise found

    def script(request: ChatRequest) -> Answer:
        return Answer(MOON if request.choice else TIDES)

    async with (
        ModelServer({"s": script}) as server,
        speculator_at(server.base_url, streaming=streaming, num_samples=2) as speculator,
    ):
        assert of(await predicted(speculator, Prompt(MESSAGES, read_text=read))) == [SEARCH_MOON]
        assert speculator.statistics().num_malformed_calls == 1
        assert speculator.statistics().num_failed_requests == 0


@EITHER
async def test_calls_beside_the_text_are_not_read(streaming: bool) -> None:
    answer = Answer(TIDES, [ScriptedCall("search", {"query": "moon"})])
    async with ModelServer({"s": answer}) as server, speculator_at(server.base_url, streaming=streaming) as speculator:
        assert of(await predicted(speculator, asking(Reader()))) == [SEARCH_TIDES]
        assert of(await predicted(speculator, PROMPT)) == [SEARCH_MOON]


# Texts that did not end by themselves


@EITHER
@pytest.mark.parametrize("reason", ["length", "content_filter"])
async def test_a_text_that_was_cut_short_is_not_read(reason: str, streaming: bool) -> None:
    reader = Reader()
    async with (
        ModelServer({"s": Answer(TIDES, finish_reason=reason)}) as server,
        speculator_at(server.base_url, streaming=streaming) as speculator,
    ):
        assert await predicted(speculator, asking(reader)) == []
        assert speculator.statistics().num_failed_requests == 0
    assert reader.texts == []


@EITHER
@pytest.mark.parametrize("fault", [DroppedConnection("mid_body"), TruncatedAnswer(), EmptyChoices()], ids=str)
async def test_half_a_text_is_not_read(fault: Fault, streaming: bool) -> None:
    """The half that comes holds a whole action, which the other half might have taken back."""
    reader = Reader()
    async with (
        ModelServer({"s": Answer(TIDES + "Observation: " * 50, fault=fault)}) as server,
        speculator_at(server.base_url, streaming=streaming) as speculator,
    ):
        assert await predicted(speculator, asking(reader)) == []
        assert speculator.statistics().num_failed_requests == 1
    assert reader.texts == []


async def test_done_without_a_finish_reason_ends_a_text() -> None:
    stream = http(sse({"choices": [{"index": 0, "delta": {"content": TIDES}}]}), kind="text/event-stream")
    async with (
        CannedServer(lambda _body: stream) as server,
        speculator_at(server.base_url, streaming=True) as speculator,
    ):
        assert of(await predicted(speculator, asking(Reader()))) == [SEARCH_TIDES]


@EITHER
async def test_cancelling_closes_the_connection(streaming: bool) -> None:
    reader = Reader()
    answer = Answer(TIDES + "Observation: " * 50, fault=Hang("mid_body"))
    async with ModelServer({"s": answer}) as server, speculator_at(server.base_url, streaming=streaming) as speculator:
        task = asyncio.create_task(predicted(speculator, asking(reader)))
        await server.until(lambda counted: counted.num_active_requests == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.until(lambda counted: counted.num_cancelled_requests == 1)
        assert speculator.statistics() == SpeculatorStatistics(num_requests=1, num_cancelled_requests=1)
    assert reader.texts == []


# Samples


@EITHER
async def test_samples_are_one_request_and_equal_calls_come_once(streaming: bool) -> None:
    def script(request: ChatRequest) -> Answer:
        if request.choice == 3:
            return Answer(TIDES.replace("tides", "stars"), finish_reason="length")
        return Answer([TIDES, "Thought: once more.\n" + TIDES, MOON][request.choice])

    async with (
        ModelServer({"s": script}) as server,
        speculator_at(server.base_url, streaming=streaming, num_samples=4) as speculator,
    ):
        assert of(await predicted(speculator, asking(Reader()))) == [SEARCH_TIDES, SEARCH_MOON]
    assert [request.n for request in server.requests] == [4]


async def test_where_n_is_ignored_several_requests_are_sent_from_then_on() -> None:
    async with (
        CannedServer(lambda _body: text_completion(TIDES)) as server,
        speculator_at(server.base_url, num_samples=2) as speculator,
    ):
        assert [len(await predicted(speculator, asking(Reader()))) for _ in range(2)] == [1, 1]
    assert [body.get("n") for body in server.bodies] == [2, None, None]


async def test_a_streamed_choice_is_read_when_it_has_ended_and_the_others_have_not() -> None:
    def script(request: ChatRequest) -> Answer:
        return Answer(MOON, generation_s=3600) if request.choice else Answer(TIDES)

    async with (
        ModelServer({"s": script}) as server,
        speculator_at(server.base_url, streaming=True, num_samples=2) as speculator,
        aclosing(speculator.predict(asking(Reader()), TOOLS)) as predictions,
    ):
        assert of([await anext(predictions)]) == [SEARCH_TIDES]
        assert server.statistics().num_active_requests == 1


# A main model that makes one call at a time


@EITHER
async def test_of_each_text_only_the_first_call_counts(streaming: bool) -> None:
    def script(request: ChatRequest) -> Answer:
        return Answer(MOON + TIDES if request.choice else TIDES + MOON + MOON.replace("moon", "stars"))

    async with (
        ModelServer({"s": script}) as server,
        speculator_at(server.base_url, streaming=streaming, num_samples=2) as speculator,
    ):
        calls = await predicted(speculator, asking(Reader(), parallel_tool_calls=False))
    assert of(calls) == [SEARCH_TIDES, SEARCH_MOON]


@EITHER
@pytest.mark.parametrize(("parallel", "num_calls"), [(None, 4), (True, 4), (False, 2)])
async def test_of_each_choice_only_the_first_call_counts(parallel: Any, num_calls: int, streaming: bool) -> None:
    def script(request: ChatRequest) -> Answer:
        return Answer(tool_calls=[ScriptedCall("search", {"choice": request.choice, "call": n}) for n in range(2)])

    async with (
        ModelServer({"s": script}) as server,
        speculator_at(server.base_url, streaming=streaming, num_samples=2) as speculator,
    ):
        calls = await predicted(speculator, Prompt(MESSAGES, parallel_tool_calls=parallel))
    assert len(calls) == num_calls
    assert [made.arguments["choice"] for made in calls if made.arguments["call"] == 0] == [0, 1]


async def test_a_first_call_that_is_malformed_is_not_replaced_by_the_second() -> None:
    body = completion([call("search", "{"), call("search", '{"x":1}')])
    async with CannedServer(lambda _body: http(body)) as server, speculator_at(server.base_url) as speculator:
        assert await predicted(speculator, Prompt(MESSAGES, parallel_tool_calls=False)) == []
        assert speculator.statistics().num_malformed_calls == 1

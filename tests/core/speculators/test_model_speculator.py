"""The model speculator against real servers on loopback."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from spectool_core.calls import Prompt
from spectool_core.speculators import ModelSpeculator, SpeculatorStatistics
from spectool_core.testing import (
    Answer,
    ChatRequest,
    DroppedConnection,
    EmptyChoices,
    Fault,
    Hang,
    HttpError,
    Latch,
    LeakCheck,
    ModelServer,
    Quirks,
    ScriptedCall,
    ScriptedModel,
    TruncatedAnswer,
)
from tests.core.speculators.asking import EITHER, MESSAGES, PROMPT, TOOLS, Clock, of, predicted, speculator_at
from tests.core.speculators.canned import CannedServer, call, chunk, completion, http, sse

SEARCH = ScriptedCall("search", {"query": "tides"})
READ = ScriptedCall("read", {"path": "a"})
BOTH = Answer("Let me see.", [SEARCH, READ])

# What is asked


@EITHER
async def test_it_asks_what_the_main_model_was_asked(streaming: bool) -> None:
    prompt = Prompt(
        lambda: [MappingProxyType(MESSAGES[0])],
        tool_choice={"type": "function", "function": {"name": "search"}},
        parallel_tool_calls=False,
    )
    settings: dict[str, Any] = {
        "temperature": 0.5,
        "max_tokens": 64,
        "extra_body": {"reasoning_effort": "low"},
        "extra_headers": {"X-Team": "blue"},
    }
    async with (
        ModelServer({"s": BOTH}) as server,
        speculator_at(server.base_url, streaming=streaming, **settings) as speculator,
    ):
        calls = await predicted(speculator, prompt)

    assert of(calls) == [("search", {"query": "tides"})]
    (request,) = server.requests
    extra = {"stream": True, "stream_options": {"include_usage": True}} if streaming else {}
    assert request.body == {
        "model": "s",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "search"}},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "max_tokens": 64,
        "reasoning_effort": "low",
        **extra,
    }
    assert request.headers["authorization"] == "Bearer secret-key"
    assert request.headers["x-team"] == "blue"


async def test_it_sends_nothing_that_was_not_set() -> None:
    async with ModelServer({"s": BOTH}) as server, speculator_at(server.base_url, streaming=False) as speculator:
        await predicted(speculator)
    assert server.requests[0].body == {"model": "s", "messages": MESSAGES, "tools": TOOLS}


@pytest.mark.parametrize(("prompt", "tools"), [(PROMPT, []), (Prompt(MESSAGES, tool_choice="none"), TOOLS)])
async def test_it_asks_nothing_where_there_can_be_no_call(prompt: Prompt, tools: list[Any]) -> None:
    async with ModelServer({"s": BOTH}) as server, speculator_at(server.base_url) as speculator:
        assert await predicted(speculator, prompt, tools) == []
        assert server.statistics().num_requests == 0


async def test_text_that_is_no_unicode_is_sent_as_it_is() -> None:
    async with ModelServer({"s": BOTH}) as server, speculator_at(server.base_url) as speculator:
        await predicted(speculator, Prompt([{"role": "user", "content": "\ud800 ü"}]))
    assert server.requests[0].messages[0]["content"] == "\ud800 ü"


# What is yielded


@pytest.mark.parametrize("deltas", ["separate", "merged", "whole"])
@pytest.mark.parametrize("indices", ["given", "missing", "shared"])
async def test_it_reads_every_dialect(deltas: Any, indices: Any) -> None:
    answer = Answer(tool_calls=[SEARCH, ScriptedCall("search", {"query": "moon"}), READ])
    model = ScriptedModel(answer, quirks=Quirks(call_ids="missing", call_indices=indices, call_deltas=deltas))
    async with ModelServer({"s": model}) as server, speculator_at(server.base_url, streaming=True) as speculator:
        calls = await predicted(speculator)
    assert of(calls) == [("search", {"query": "tides"}), ("search", {"query": "moon"}), ("read", {"path": "a"})]


async def test_a_streamed_call_is_yielded_before_the_message_ends() -> None:
    answer = Answer(tool_calls=[SEARCH, ScriptedCall("read", {"path": "a" * 200})], fault=Hang("mid_body"))
    async with (
        ModelServer({"s": answer}) as server,
        speculator_at(server.base_url, streaming=True) as speculator,
        aclosing(speculator.predict(PROMPT, TOOLS)) as predictions,
    ):
        assert (await anext(predictions)).name == "search"
        assert server.statistics().num_active_requests == 1


@EITHER
async def test_malformed_calls_are_counted_and_the_others_yielded(streaming: bool) -> None:
    answer = Answer(tool_calls=[ScriptedCall("search", 'query = """x"""'), READ, ScriptedCall("search", '{"x": NaN}')])
    async with ModelServer({"s": answer}) as server, speculator_at(server.base_url, streaming=streaming) as speculator:
        assert of(await predicted(speculator)) == [("read", {"path": "a"})]
        assert speculator.statistics().num_malformed_calls == 2
        assert speculator.statistics().num_failed_requests == 0


async def test_it_reads_what_comes_whatever_was_asked_for() -> None:
    whole = http(completion([call("search", '{"x":1}')]))
    stream = http(sse(chunk(call("search", '{"x":1}', index=0)), chunk(finish="stop")), kind="text/event-stream")
    async with CannedServer(lambda body: whole if body.get("stream") else stream) as server:
        for streaming in (True, False):
            async with speculator_at(server.base_url, streaming=streaming) as speculator:
                assert of(await predicted(speculator)) == [("search", {"x": 1})]


@EITHER
async def test_tokens_are_counted(streaming: bool) -> None:
    answer = Answer(tool_calls=[SEARCH], completion_tokens=9)
    async with ModelServer({"s": answer}) as server, speculator_at(server.base_url, streaming=streaming) as speculator:
        await predicted(speculator)
        await predicted(speculator)
        counted = server.statistics()
        assert speculator.statistics() == SpeculatorStatistics(
            num_requests=2, num_prompt_tokens=counted.num_prompt_tokens, num_completion_tokens=18
        )


@pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream"])
async def test_an_odd_content_type_is_taken_for_what_was_asked_for(kind: str) -> None:
    def answers(body: dict[str, Any]) -> bytes:
        chunks = sse(chunk(call("search", '{"x":1}', index=0), finish="stop"))
        return http(chunks if body.get("stream") else completion([call("search", '{"x":1}')]), kind=kind)

    async with CannedServer(answers) as server:
        for streaming in (True, False):
            async with speculator_at(server.base_url, streaming=streaming) as speculator:
                assert of(await predicted(speculator)) == [("search", {"x": 1})]


# Samples


def by_choice(request: ChatRequest) -> Answer:
    query = ["tides", "moon", "tides"][request.choice]
    return Answer(tool_calls=[ScriptedCall("search", {"query": query, "limit": 1})])


@EITHER
async def test_samples_are_one_request_and_equal_calls_come_once(streaming: bool) -> None:
    async with (
        ModelServer({"s": by_choice}) as server,
        speculator_at(server.base_url, streaming=streaming, num_samples=3) as speculator,
    ):
        calls = await predicted(speculator)
    assert of(calls) == [("search", {"query": "tides", "limit": 1}), ("search", {"query": "moon", "limit": 1})]
    assert [request.n for request in server.requests] == [3]


@EITHER
@pytest.mark.parametrize("status", [400, 422])
async def test_where_n_is_refused_several_requests_are_sent_from_then_on(streaming: bool, status: int) -> None:
    def script(request: ChatRequest) -> Answer:
        return Answer(fault=HttpError(status)) if request.n > 1 else BOTH

    async with (
        ModelServer({"s": script}) as server,
        speculator_at(server.base_url, streaming=streaming, num_samples=3) as speculator,
    ):
        assert await predicted(speculator) == []
        assert len(await predicted(speculator)) == 2
        assert len(await predicted(speculator)) == 2
        assert speculator.statistics().num_failed_requests == 1
    assert [request.n for request in server.requests] == [3, 1, 1, 1, 1, 1, 1]


@EITHER
async def test_where_n_is_ignored_several_requests_are_sent_from_then_on(streaming: bool) -> None:
    def answers(body: dict[str, Any]) -> bytes:
        if body.get("stream"):
            return http(sse(chunk(call("a", '{"x":1}', index=0), finish="stop")), kind="text/event-stream")
        return http(completion([call("a", '{"x":1}')]))

    async with (
        CannedServer(answers) as server,
        speculator_at(server.base_url, streaming=streaming, num_samples=2) as speculator,
    ):
        assert [len(await predicted(speculator)) for _ in range(2)] == [1, 1]
    assert [body.get("n") for body in server.bodies] == [2, None, None]


async def test_a_refusal_of_something_else_keeps_n() -> None:
    refusal = http({"error": {"message": "too long", "param": "messages"}}, status=400)
    async with (
        CannedServer(lambda _body: refusal) as server,
        speculator_at(server.base_url, num_samples=2) as speculator,
    ):
        assert [await predicted(speculator) for _ in range(2)] == [[], []]
    assert [body.get("n") for body in server.bodies] == [2, 2]


async def test_where_stream_options_are_refused_they_are_left_out_from_then_on() -> None:
    def answers(body: dict[str, Any]) -> bytes:
        if "stream_options" in body:
            return http({"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options"]}]}, status=422)
        return http(sse(chunk(call("a", '{"x":1}', index=0), finish="stop")), kind="text/event-stream")

    async with CannedServer(answers) as server, speculator_at(server.base_url, streaming=True) as speculator:
        assert [len(await predicted(speculator)) for _ in range(3)] == [0, 1, 1]


async def test_samples_in_several_requests_come_in_order_of_arrival_and_end_together() -> None:
    first, second = Latch(), Latch()
    latches = iter([first, second])
    lock = threading.Lock()

    def script(request: ChatRequest) -> Answer:
        if request.n > 1:
            return Answer(fault=HttpError(400))
        with lock:
            latch = next(latches)
        return Answer(tool_calls=[ScriptedCall("search", {"query": "1" if latch is first else "2"})], latch=latch)

    async with ModelServer({"s": script}) as server, speculator_at(server.base_url, num_samples=2) as speculator:
        await predicted(speculator)
        async with aclosing(speculator.predict(PROMPT, TOOLS)) as predictions:
            waiting = asyncio.ensure_future(anext(predictions))
            await first.until_arrived(1)
            await second.until_arrived(1)
            second.open()
            assert (await waiting).arguments == {"query": "2"}
        await server.until(lambda counted: counted.num_cancelled_requests == 1)
        assert speculator.statistics().num_cancelled_requests == 1


# Streaming or not


async def test_auto_stops_streaming_where_it_gains_nothing() -> None:
    clock = Clock()

    def answers(body: dict[str, Any]) -> bytes:
        clock.now_s += 1
        if body.get("stream"):
            return http(sse(chunk(call("a", '{"x":1}', index=0), finish="stop")), kind="text/event-stream")
        return http(completion([call("a", '{"x":1}')]))

    async with CannedServer(answers) as server, speculator_at(server.base_url, clock=clock) as speculator:
        for _ in range(6):
            assert len(await predicted(speculator)) == 1
    assert [bool(body.get("stream")) for body in server.bodies] == [True] * 4 + [False] * 2


async def test_auto_stops_streaming_where_it_is_refused() -> None:
    def answers(body: dict[str, Any]) -> bytes:
        if body.get("stream"):
            return http({"error": {"message": "no streams", "param": "stream"}}, status=400)
        return http(completion([call("a", '{"x":1}')]))

    async with CannedServer(answers) as server, speculator_at(server.base_url) as speculator:
        assert [len(await predicted(speculator)) for _ in range(6)] == [0] * 4 + [1] * 2


async def test_auto_stops_streaming_where_streams_are_broken() -> None:
    def answers(body: dict[str, Any]) -> bytes:
        if body.get("stream"):
            return http(sse({"error": {"message": "no tools in streams"}}), kind="text/event-stream")
        return http(completion([call("a", '{"x":1}')]))

    async with CannedServer(answers) as server, speculator_at(server.base_url) as speculator:
        assert [len(await predicted(speculator)) for _ in range(6)] == [0] * 4 + [1] * 2


# Faults


FAULTS = [
    HttpError(400),
    HttpError(401),
    HttpError(404),
    HttpError(429),
    HttpError(500),
    HttpError(503),
    DroppedConnection("before_headers"),
    DroppedConnection("mid_body"),
    TruncatedAnswer(),
    EmptyChoices(),
]


@EITHER
@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_a_fault_is_no_prediction_and_no_error(fault: Fault, streaming: bool) -> None:
    """Half an answer may hold a whole call, but a stream must never yield what had not closed."""
    answer = Answer(tool_calls=[ScriptedCall("search", {"query": "tides" * 40})], fault=fault)
    async with ModelServer({"s": answer}) as server, speculator_at(server.base_url, streaming=streaming) as speculator:
        assert await predicted(speculator) == []
        assert speculator.statistics() == SpeculatorStatistics(
            num_requests=1,
            num_failed_requests=1,
            num_prompt_tokens=speculator.statistics().num_prompt_tokens,
            num_completion_tokens=speculator.statistics().num_completion_tokens,
        )
        assert server.statistics().num_requests == 1, "a request is never repeated"


@EITHER
@pytest.mark.parametrize("when", ["before_headers", "mid_body"])
async def test_a_hanging_server_times_out(when: Any, streaming: bool) -> None:
    answer = Answer(tool_calls=[SEARCH], fault=Hang(when))
    async with ModelServer({"s": answer}) as server:
        async with speculator_at(server.base_url, streaming=streaming, timeout_s=0.1) as speculator:
            await predicted(speculator)
            assert speculator.statistics().num_failed_requests == 1
        await server.until(lambda counted: counted.num_cancelled_requests == 1)


async def test_no_server_is_no_error() -> None:
    async with CannedServer(lambda _body: b"") as server:
        base_url = server.base_url
    async with speculator_at(base_url) as speculator:
        assert await predicted(speculator) == []
        assert speculator.statistics().num_failed_requests == 1


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"HELO\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: ;;;\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 302 Found\r\nLocation: http://[\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        http(b"\xff" * 10),
        http([1]),
        http({"error": {"message": "overloaded"}}),
        http(b"\n" * (9 * 2**20)),
        http(b"data: " + b"x" * (9 * 2**20), kind="text/event-stream"),
    ],
    ids=lambda response: repr(response[:60]),
)
async def test_garbage_is_no_prediction_and_no_error(response: bytes) -> None:
    async with (
        CannedServer(lambda _body: response, hangs_up=True) as server,
        speculator_at(server.base_url) as speculator,
    ):
        assert await predicted(speculator) == []
        assert speculator.statistics().num_failed_requests == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_obeyed_by_every_loop(status: int) -> None:
    clock = Clock()
    faults: Iterator[Fault | None] = iter([HttpError(status, retry_after_s=2.5), None])
    async with (
        ModelServer({"s": lambda _request: Answer(tool_calls=[SEARCH], fault=next(faults))}) as server,
        speculator_at(server.base_url, clock=clock) as speculator,
    ):
        assert await predicted(speculator) == []
        clock.now_s += 2.4
        assert await predicted(speculator) == []
        assert await asyncio.to_thread(lambda: asyncio.run(predicted(speculator))) == []
        assert server.statistics().num_requests == 1
        clock.now_s += 0.1
        assert len(await predicted(speculator)) == 1


async def test_an_error_of_the_prompt_is_not_hidden() -> None:
    async with ModelServer({"s": BOTH}) as server, speculator_at(server.base_url) as speculator:
        with pytest.raises(TypeError):
            await predicted(speculator, Prompt([{"role": "user", "content": object()}]))


async def test_neither_prompts_nor_arguments_nor_keys_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    answers = iter([HttpError(500, message="tides"), DroppedConnection()])
    async with (
        ModelServer({"s": lambda _request: Answer(tool_calls=[SEARCH], fault=next(answers))}) as server,
        speculator_at(server.base_url) as speculator,
    ):
        await predicted(speculator)
        await predicted(speculator)
    text = "\n".join(record.getMessage() for record in caplog.records if record.name == "spectool")
    assert len(text.splitlines()) == 2
    assert not any(secret in text for secret in ("secret-key", "tides", "which?"))


# Cancellation and connections


@EITHER
@pytest.mark.parametrize("when", ["before_headers", "mid_body"])
async def test_cancelling_closes_the_connection(when: Any, streaming: bool) -> None:
    answer = Answer(tool_calls=[ScriptedCall("search", {"query": "tides" * 40})], fault=Hang(when))
    async with (
        ModelServer({"s": answer}) as server,
        speculator_at(server.base_url, streaming=streaming) as speculator,
    ):
        async with LeakCheck():
            task = asyncio.create_task(predicted(speculator))
            await server.until(lambda counted: counted.num_active_requests == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await server.until(lambda counted: counted.num_cancelled_requests == 1)
        assert speculator.statistics() == SpeculatorStatistics(num_requests=1, num_cancelled_requests=1)


async def test_cancelling_before_the_connection_stands_leaves_nothing() -> None:
    models = {"s": Answer(fault=Hang()), "other": BOTH}
    async with ModelServer(models) as server, speculator_at(server.base_url) as speculator:
        for num_steps in range(12):
            async with LeakCheck():
                task = asyncio.create_task(predicted(speculator))
                for _ in range(num_steps):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await speculator.aclose()
        # The server accepts in order, so after this it knows of all that came and went before.
        async with speculator_at(server.base_url, "other") as other:
            assert len(await predicted(other)) == 2


async def test_closing_the_generator_closes_the_connection() -> None:
    answer = Answer(tool_calls=[SEARCH, ScriptedCall("read", {"path": "a" * 200})], fault=Hang("mid_body"))
    async with ModelServer({"s": answer}) as server, speculator_at(server.base_url, streaming=True) as speculator:
        async with aclosing(speculator.predict(PROMPT, TOOLS)) as predictions:
            await anext(predictions)
        await server.until(lambda counted: counted.num_cancelled_requests == 1)
        assert speculator.statistics().num_cancelled_requests == 1


async def test_a_reply_that_had_come_is_not_counted_as_cancelled() -> None:
    async with ModelServer({"s": BOTH}) as server, speculator_at(server.base_url, streaming=False) as speculator:
        async with aclosing(speculator.predict(PROMPT, TOOLS)) as predictions:
            await anext(predictions)
        assert speculator.statistics().num_cancelled_requests == 0
        assert speculator.statistics().num_completion_tokens > 0


@EITHER
async def test_connections_are_used_again(streaming: bool) -> None:
    def answers(body: dict[str, Any]) -> bytes:
        if body.get("stream"):
            return http(sse(chunk(call("a", '{"x":1}', index=0), finish="stop")), kind="text/event-stream")
        return http(completion([call("a", '{"x":1}')]))

    async with CannedServer(answers) as server, speculator_at(server.base_url, streaming=streaming) as speculator:
        for _ in range(5):
            assert len(await predicted(speculator)) == 1
        assert server.num_connections == 1


async def test_many_turns_at_once_do_not_queue() -> None:
    latch = Latch(num_parties=150)
    async with (
        ModelServer({"s": Answer(tool_calls=[SEARCH], latch=latch)}) as server,
        speculator_at(server.base_url) as speculator,
    ):
        found = await asyncio.gather(*(predicted(speculator) for _ in range(150)))
    assert all(len(calls) == 1 for calls in found)


async def test_the_loop_is_never_blocked() -> None:
    async with ModelServer({"s": BOTH}) as server, speculator_at(server.base_url) as speculator:
        with blockbuster_ctx():
            assert len(await predicted(speculator)) == 2


# Event loops


def test_fifty_event_loops_leave_no_socket() -> None:
    with ModelServer({"s": BOTH}) as server:
        speculator = ModelSpeculator("s", base_url=server.base_url, api_key="k")
        assert len(asyncio.run(predicted(speculator))) == 2
        for _ in range(50):
            with LeakCheck():
                assert len(asyncio.run(predicted(speculator))) == 2
        assert speculator.statistics().num_failed_requests == 0


def test_one_speculator_serves_many_threads_at_once() -> None:
    latch = Latch(num_parties=8)
    found: list[int] = []
    answer = Answer(tool_calls=[SEARCH], latch=latch)
    with ModelServer({"s": answer}) as server, LeakCheck():
        speculator = ModelSpeculator("s", base_url=server.base_url, api_key="k")

        async def several() -> None:
            found.extend([len(await predicted(speculator)) for _ in range(3)])

        threads = [threading.Thread(target=lambda: asyncio.run(several())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [1] * 24
    assert speculator.statistics().num_requests == 24


async def test_closing_lets_other_loops_close_theirs() -> None:
    async with ModelServer({"s": BOTH}) as server, LeakCheck():
        speculator = ModelSpeculator("s", base_url=server.base_url, api_key="k")
        await predicted(speculator)
        with running_loop() as run:
            run(predicted(speculator))
            await speculator.aclose()
            assert len(run(predicted(speculator))) == 2, "it opens new connections"
        assert len(await predicted(speculator)) == 2
        await speculator.aclose()


async def test_a_forgotten_speculator_closes_its_connections() -> None:
    async with ModelServer({"s": BOTH}) as server, LeakCheck():
        speculator = ModelSpeculator("s", base_url=server.base_url, api_key="k")
        await predicted(speculator)
        del speculator


class running_loop:  # noqa: N801 - used like a function
    """An event loop on another thread; gives a function that runs a coroutine there."""

    def __enter__(self) -> Callable[[Any], Any]:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def __exit__(self, *_exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_asyncgens(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


EXITING = """
import asyncio, sys, threading
from spectool_core.calls import Prompt
from spectool_core.speculators import ModelSpeculator

speculator = ModelSpeculator("s", base_url=sys.argv[1], api_key="k")
tools = [{"type": "function", "function": {"name": "search"}}]

async def predicted():
    return [call async for call in speculator.predict(Prompt([{"role": "user", "content": "which?"}]), tools)]

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
print(len(asyncio.run_coroutine_threadsafe(predicted(), loop).result()))
"""


def test_a_process_exits_without_a_word_while_a_loop_still_runs() -> None:
    with ModelServer({"s": BOTH}) as server:
        command = [sys.executable, "-X", "dev", "-W", "error", "-c", EXITING, server.base_url]
        exited = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (exited.stdout, exited.stderr, exited.returncode) == ("2\n", "", 0)


async def test_a_reply_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    long = http(completion([call("f", '{"x": 1}')], padding="x" * 5000))
    async with (
        CannedServer(lambda _body: long) as server,
        speculator_at(server.base_url, streaming=False) as speculator,
    ):
        assert of(await predicted(speculator)) == [("f", {"x": 1})]
        monkeypatch.setattr("spectool_core.speculators._reception._MAX_BYTES", 1024)
        assert await predicted(speculator) == []
        assert speculator.statistics().num_failed_requests == 1


async def test_the_first_failed_request_is_said_aloud_and_only_that(caplog: pytest.LogCaptureFixture) -> None:
    missing = http({"error": {"message": "no such model"}}, status=404)
    async with CannedServer(lambda _body: missing) as server, speculator_at(server.base_url, "smal") as speculator:
        for _ in range(3):
            assert await predicted(speculator) == []
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.name == "spectool"
    assert "smal" in warning.getMessage()
    assert "HTTP status 404" in warning.getMessage()

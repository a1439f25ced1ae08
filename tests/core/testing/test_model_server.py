"""The scripted server as its users see it: through the openai client, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import openai
import pytest
from blockbuster import blockbuster_ctx

from spectool_core.errors import ConfigurationError
from spectool_core.testing import (
    Answer,
    ChatRequest,
    Latch,
    LeakCheck,
    ModelServer,
    ModelStatistics,
    Quirks,
    ScriptedCall,
    ScriptedModel,
)

QUESTION = [{"role": "user", "content": "which?"}]
CALLS = Answer("Let me see.", [ScriptedCall("search", {"query": "tides"}), ScriptedCall("read", {"path": "a"})])
TURNS = [CALLS, Answer("High at noon.")]


@asynccontextmanager
async def client_of(server: ModelServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="unused", max_retries=0) as client:
        yield client


async def streamed(client: openai.AsyncOpenAI, model: str = "main", **parameters):
    async with await client.chat.completions.create(
        model=model, messages=QUESTION, stream=True, **parameters
    ) as stream:
        return [chunk async for chunk in stream]


def joined_calls(chunks) -> dict[int, tuple[str | None, str | None, str]]:
    """Join streamed calls by index, as OpenAI's documentation tells clients to do."""
    calls: dict[int, tuple[str | None, str | None, str]] = {}
    for delta in (chunk.choices[0].delta for chunk in chunks if chunk.choices):
        for call in delta.tool_calls or ():
            id_, name, arguments = calls.get(call.index, (None, None, ""))
            calls[call.index] = (
                call.id or id_,
                call.function.name or name,
                arguments + (call.function.arguments or ""),
            )
    return calls


def test_sync_client_gets_whole_answer():
    with ModelServer({"main": TURNS}) as server, openai.OpenAI(base_url=server.base_url, api_key="unused") as client:
        completion = client.chat.completions.create(model="main", messages=QUESTION)
        message = completion.choices[0].message

        assert message.content == "Let me see."
        assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
            ("search", {"query": "tides"}),
            ("read", {"path": "a"}),
        ]
        assert completion.choices[0].finish_reason == "tool_calls"
        assert [model.id for model in client.models.list()] == ["main"]


async def test_turn_is_the_number_of_assistant_messages():
    async with ModelServer({"main": TURNS}) as server, client_of(server) as client:
        first = await client.chat.completions.create(model="main", messages=QUESTION)
        history = [*QUESTION, first.choices[0].message.model_dump(exclude_none=True)]
        second = await client.chat.completions.create(model="main", messages=history)

        assert second.choices[0].message.content == "High at noon."
        assert second.choices[0].finish_reason == "stop"
        assert [request.turn for request in server.requests] == [0, 1]


async def test_stream_joins_to_the_whole_answer():
    async with ModelServer({"main": ScriptedModel(CALLS, reasoning_tokens=30)}) as server, client_of(server) as client:
        chunks = await streamed(client, stream_options={"include_usage": True})
        whole = await client.chat.completions.create(model="main", messages=QUESTION)

    message = whole.choices[0].message
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning_content
    assert list(joined_calls(chunks).values()) == [
        (call.id, call.function.name, call.function.arguments) for call in message.tool_calls
    ]
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens_details.reasoning_tokens == 30
    assert {chunk.id for chunk in chunks} == {whole.id}


async def test_text_is_streamed_in_pieces():
    model = ScriptedModel(Answer("Action: search\n" * 8), max_num_deltas=5)
    async with ModelServer({"main": model}) as server, client_of(server) as client:
        chunks = await streamed(client)
    pieces = [piece for chunk in chunks if (piece := chunk.choices[0].delta.content)]
    assert len(pieces) == 5
    assert "".join(pieces) == "Action: search\n" * 8


async def test_usage_is_streamed_only_on_request():
    async with ModelServer({"main": TURNS}) as server, client_of(server) as client:
        assert all(chunk.usage is None for chunk in await streamed(client))


async def test_usage_counts_four_characters_a_token_and_what_the_turn_before_held():
    answer = Answer("eight ch", completion_tokens=60)
    async with ModelServer({"main": [CALLS, answer]}) as server, client_of(server) as client:
        history = [*QUESTION, {"role": "assistant", "content": "A"}, {"role": "user", "content": "B"}]
        usage = (await client.chat.completions.create(model="main", messages=history)).usage

    assert usage.completion_tokens == 60
    assert usage.prompt_tokens == -(
        -(len(json.dumps(QUESTION, separators=(",", ":"))) + len(json.dumps(history[1:], separators=(",", ":")))) // 4
    )
    assert usage.prompt_tokens_details.cached_tokens == len(json.dumps(QUESTION, separators=(",", ":"))) // 4


async def test_choices_are_answered_side_by_side():
    def by_choice(request: ChatRequest) -> Answer:
        return Answer(f"choice {request.choice}")

    async with ModelServer({"main": by_choice}) as server, client_of(server) as client:
        whole = await client.chat.completions.create(model="main", messages=QUESTION, n=3)
        chunks = await streamed(client, n=3)

    assert [choice.message.content for choice in whole.choices] == ["choice 0", "choice 1", "choice 2"]
    texts = dict.fromkeys(range(3), "")
    for choice in (chunk.choices[0] for chunk in chunks if chunk.choices):
        texts[choice.index] += choice.delta.content or ""
    assert list(texts.values()) == ["choice 0", "choice 1", "choice 2"]


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_takes_its_time_and_no_less(stream):
    model = ScriptedModel(CALLS, time_to_first_token_s=0.03, seconds_per_token=0.001)
    async with ModelServer({"main": model}) as server, client_of(server) as client:
        started_s = time.perf_counter()
        if stream:
            await streamed(client)
        else:
            await client.chat.completions.create(model="main", messages=QUESTION)
        elapsed_s = time.perf_counter() - started_s
        num_tokens = server.statistics().num_completion_tokens

    # The upper side depends on the machine's load and is measured by the benchmarks.
    assert elapsed_s >= 0.03 + num_tokens * 0.001


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_is_noticed_and_its_tokens_are_counted(stream):
    async with ModelServer({"main": ScriptedModel(CALLS, generation_s=3600)}) as server, client_of(server) as client:
        asking = asyncio.ensure_future(
            streamed(client) if stream else client.chat.completions.create(model="main", messages=QUESTION)
        )
        await server.until(lambda statistics: statistics.num_active_requests == 1)
        asking.cancel()
        counts = await server.until(lambda statistics: statistics.num_cancelled_requests == 1)

    assert counts.num_active_requests == counts.num_completed_requests == counts.num_failed_requests == 0
    assert counts.num_prompt_tokens > 0
    assert counts.num_completion_tokens == 0


async def test_client_that_leaves_in_the_middle_of_a_stream_is_noticed():
    answer = Answer("word " * 100, time_to_first_token_s=0.0, generation_s=3600)
    async with ModelServer({"main": answer}) as server, client_of(server) as client:
        async with await client.chat.completions.create(model="main", messages=QUESTION, stream=True) as stream:
            await anext(aiter(stream))
        await server.until(lambda statistics: statistics.num_cancelled_requests == 1)


def test_client_that_closes_its_socket_is_noticed():
    with ModelServer({"main": ScriptedModel(CALLS, generation_s=3600)}) as server:
        body = json.dumps({"model": "main", "messages": QUESTION}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            raw.sendall(head.encode() + body)
            server.wait_until(lambda statistics: statistics.num_active_requests == 1)
        server.wait_until(lambda statistics: statistics.num_cancelled_requests == 1)


async def test_completed_answer_is_counted_when_the_client_has_it():
    async with ModelServer({"main": TURNS, "small": TURNS}) as server, client_of(server) as client:
        await client.chat.completions.create(model="main", messages=QUESTION)
        assert server.statistics().models["main"].num_completed_requests == 1
        await streamed(client)
        counts = server.statistics()

    assert counts.num_requests == counts.num_completed_requests == 2
    assert counts.num_tool_calls == 4
    assert counts.models["small"] == ModelStatistics()


async def test_concurrent_requests_are_counted_and_latches_hold_answers():
    latch = Latch()
    async with ModelServer({"main": Answer("ok", latch=latch)}) as server, client_of(server) as client:
        asked = [asyncio.ensure_future(streamed(client)) for _ in range(8)]
        await latch.until_arrived(8)
        assert server.statistics().num_active_requests == 8
        latch.open()
        await asyncio.gather(*asked)
        assert server.statistics().max_concurrent_requests == 8


async def test_client_that_leaves_at_a_latch_is_noticed():
    latch = Latch()
    async with ModelServer({"main": Answer("ok", latch=latch)}) as server, client_of(server) as client:
        asking = asyncio.ensure_future(streamed(client))
        await latch.until_arrived(1)
        asking.cancel()
        await server.until(lambda statistics: statistics.num_cancelled_requests == 1)


async def test_requests_are_logged_and_the_log_is_bounded():
    async with ModelServer({"main": Answer("ok")}, max_num_logged=2) as server, client_of(server) as client:
        for temperature in (0.1, 0.2, 0.3):
            await client.chat.completions.create(model="main", messages=QUESTION, temperature=temperature)

    assert [request.body["temperature"] for request in server.requests] == [0.2, 0.3]
    assert server.requests[0].headers["authorization"] == "Bearer unused"


@pytest.mark.parametrize(
    ("quirks", "ids"),
    [
        (Quirks(call_ids="repeating"), ["call_0", "call_1"]),
        (Quirks(call_ids="missing"), [None, None]),
    ],
)
async def test_call_ids_can_repeat_or_be_missing(quirks, ids):
    async with ModelServer({"main": ScriptedModel(CALLS, quirks=quirks)}) as server, client_of(server) as client:
        whole = await client.chat.completions.create(model="main", messages=QUESTION)
        chunks = await streamed(client)

    assert [call.id for call in whole.choices[0].message.tool_calls] == ids
    assert [id_ for id_, _, _ in joined_calls(chunks).values()] == ids


async def test_call_ids_are_stable_for_one_history_or_unique():
    models = {"stable": CALLS, "unique": ScriptedModel(CALLS, quirks=Quirks(call_ids="unique"))}
    async with ModelServer(models) as server, client_of(server) as client:

        async def ids(model: str) -> list[str]:
            whole = await client.chat.completions.create(model=model, messages=QUESTION)
            return [call.id for call in whole.choices[0].message.tool_calls]

        assert await ids("stable") == await ids("stable")
        assert len({*await ids("stable")}) == 2
        assert len({*await ids("unique"), *await ids("unique")}) == 4


async def test_unknown_model_and_ended_script_are_refused_with_a_reason():
    def failing(request: ChatRequest) -> Answer:
        raise ZeroDivisionError("in the script")

    models = {"main": {"another task": TURNS}, "failing": failing}
    async with ModelServer(models) as server, client_of(server) as client:
        with pytest.raises(openai.NotFoundError, match=r"no model 'absent'; there are \['failing', 'main'\]"):
            await client.chat.completions.create(model="absent", messages=QUESTION)
        with pytest.raises(openai.BadRequestError, match=r"no task 'which\?'; it holds \['another task'\]"):
            await client.chat.completions.create(model="main", messages=QUESTION)
        with pytest.raises(openai.BadRequestError, match=r"ZeroDivisionError\('in the script'\)"):
            await client.chat.completions.create(model="failing", messages=QUESTION)
        with pytest.raises(openai.BadRequestError, match="not a chat request"):
            await client.chat.completions.create(model="main", messages=QUESTION, n=1000)
        assert server.statistics().num_failed_requests == 3
        assert server.statistics().num_active_requests == 0


async def test_unmet_condition_says_what_was_reached():
    async with ModelServer({"main": TURNS}) as server:
        with pytest.raises(TimeoutError, match="num_requests=0"):
            await server.until(lambda statistics: statistics.num_requests == 1, timeout_s=0.001)
        with pytest.raises(TimeoutError, match="num_requests=0"):
            server.wait_until(lambda statistics: statistics.num_requests == 1, timeout_s=0.001)


async def test_nothing_is_left_over_even_with_requests_in_flight():
    async with LeakCheck():
        server = await ModelServer({"main": ScriptedModel(CALLS, generation_s=3600)}).__aenter__()
        async with aiohttp.ClientSession() as session:
            body = {"model": "main", "messages": QUESTION, "stream": True}
            async with session.post(f"{server.base_url}/chat/completions", json=body) as response:
                await server.__aexit__(None, None, None)
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()


def test_stopped_server_refuses_connections():
    with ModelServer({"main": TURNS}) as server:
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    assert not any(thread.name.startswith("spectool-model-server") for thread in threading.enumerate())


def test_server_without_models_is_refused():
    with pytest.raises(ConfigurationError, match="at least one model"):
        ModelServer({})


async def test_async_use_never_blocks_the_loop():
    models = {"main": ScriptedModel(CALLS, generation_s=0.01)}
    with blockbuster_ctx():
        async with ModelServer(models) as server, aiohttp.ClientSession() as session:
            body = {"model": "main", "messages": QUESTION}
            asking = asyncio.create_task(session.post(f"{server.base_url}/chat/completions", json=body))
            await server.until(lambda statistics: statistics.num_completed_requests == 1)
            (await asking).close()

"""Scripted faults as the openai client and a raw socket meet them."""

from __future__ import annotations

import json
import socket

import aiohttp
import openai
import pytest

from spectool_core.errors import ConfigurationError
from spectool_core.testing import (
    Answer,
    DroppedConnection,
    EmptyChoices,
    Flaky,
    Hang,
    HttpError,
    ModelServer,
    Quirks,
    ScriptedCall,
    ScriptedModel,
    TruncatedAnswer,
)

QUESTION = [{"role": "user", "content": "which?"}]


def asked(server: ModelServer, *, stream: bool = False, max_retries: int = 0):
    with openai.OpenAI(base_url=server.base_url, api_key="unused", max_retries=max_retries) as client:
        if not stream:
            return client.chat.completions.create(model="main", messages=QUESTION)
        with client.chat.completions.create(model="main", messages=QUESTION, stream=True) as chunks:
            return list(chunks)


def raw_answer(server: ModelServer, *, stream: bool) -> bytes:
    """Everything the server sends before it closes the connection."""
    body = json.dumps({"model": "main", "messages": QUESTION, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(head.encode() + body)
        return b"".join(iter(lambda: raw.recv(65536), b""))


@pytest.mark.parametrize("stream", [False, True])
def test_rate_limit_carries_retry_after(stream):
    with ModelServer({"main": Answer(fault=HttpError(429, retry_after_s=1.5))}) as server:
        with pytest.raises(openai.RateLimitError, match="scripted error") as caught:
            asked(server, stream=stream)
        assert caught.value.response.headers["retry-after"] == "2"
        assert caught.value.response.headers["retry-after-ms"] == "1500"
        assert server.statistics().num_failed_requests == 1
        assert server.statistics().num_prompt_tokens == 0


def test_flaky_script_is_retried_by_the_client():
    with ModelServer({"main": Flaky(Answer("ok"), HttpError(500, retry_after_s=0.001), num_times=2)}) as server:
        assert asked(server, max_retries=2).choices[0].message.content == "ok"
        assert server.statistics().num_failed_requests == 2
        assert server.statistics().num_completed_requests == 1


@pytest.mark.parametrize("stream", [False, True])
def test_connection_dropped_before_headers(stream):
    with ModelServer({"main": Answer("text", fault=DroppedConnection())}) as server:
        assert raw_answer(server, stream=stream) == b""
        with pytest.raises(openai.APIConnectionError):
            asked(server, stream=stream)
        assert server.statistics().num_failed_requests == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_connection_dropped_mid_body(stream):
    answer = Answer("text " * 50, fault=DroppedConnection("mid_body"))
    async with ModelServer({"main": answer}) as server, aiohttp.ClientSession() as session:
        body = {"model": "main", "messages": QUESTION, "stream": stream}
        async with session.post(f"{server.base_url}/chat/completions", json=body) as response:
            assert response.status == 200
            received = await response.content.readany()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        assert b"text" in received
        await server.until(lambda statistics: statistics.num_failed_requests == 1)


def test_truncated_stream_ends_in_good_order_without_an_end():
    with ModelServer({"main": Answer("text " * 50, fault=TruncatedAnswer())}) as server:
        chunks = asked(server, stream=True)
        assert chunks
        assert all(chunk.choices[0].finish_reason is None for chunk in chunks)
        received = raw_answer(server, stream=True)
        assert received.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in received


def test_truncated_whole_answer_is_half_a_json():
    with ModelServer({"main": Answer("text", fault=TruncatedAnswer())}) as server:
        _, _, body = raw_answer(server, stream=False).partition(b"\r\n\r\n")
        with pytest.raises(json.JSONDecodeError):
            json.loads(body)


@pytest.mark.parametrize("stream", [False, True])
def test_empty_choices(stream):
    with ModelServer({"main": Answer("text", fault=EmptyChoices())}) as server:
        answered = asked(server, stream=stream)
        assert [chunk.choices for chunk in answered] == [[]] if stream else answered.choices == []


@pytest.mark.parametrize("when", ["before_headers", "mid_body"])
@pytest.mark.parametrize("stream", [False, True])
async def test_hang_lasts_until_the_client_leaves(stream, when):
    async with ModelServer({"main": Answer("text " * 50, fault=Hang(when))}) as server:
        async with aiohttp.ClientSession() as session:
            body = {"model": "main", "messages": QUESTION, "stream": stream}
            if when == "mid_body":
                async with session.post(f"{server.base_url}/chat/completions", json=body) as response:
                    assert b"text" in await response.content.readany()
            else:
                with pytest.raises(TimeoutError):
                    await session.post(
                        f"{server.base_url}/chat/completions", json=body, timeout=aiohttp.ClientTimeout(0.01)
                    )
        counts = await server.until(lambda statistics: statistics.num_cancelled_requests == 1)
        assert counts.num_completed_requests == counts.num_failed_requests == 0


@pytest.mark.parametrize("text", ['query = """select 1"""', '{"x": 1', "", "[1]", '{"x": NaN}'])
@pytest.mark.parametrize("stream", [False, True])
def test_arguments_given_as_text_arrive_as_they_are(text, stream):
    with ModelServer({"main": Answer(tool_calls=[ScriptedCall("sql", text)])}) as server:
        answered = asked(server, stream=stream)
        if stream:
            deltas = [call for c in answered for call in c.choices[0].delta.tool_calls or ()]
            assert "".join(call.function.arguments for call in deltas) == text
        else:
            assert answered.choices[0].message.tool_calls[0].function.arguments == text


PIECES = ('{"sql":"INSERT INTO t VALUES (1);', "INSERT INTO t VALUES (1);", "INSERT INTO t VALUES (1);", '"}', "")


@pytest.mark.parametrize(
    ("quirks", "expected"),
    [
        (Quirks(), [(0, "a"), *[(0, piece) for piece in PIECES], (1, "b"), (1, "{}")]),
        (Quirks(call_indices="missing"), [(None, "a"), *[(None, p) for p in PIECES], (None, "b"), (None, "{}")]),
        (Quirks(call_indices="shared"), [(0, "a"), *[(0, piece) for piece in PIECES], (0, "b"), (0, "{}")]),
        (
            Quirks(call_deltas="merged"),
            [(0, "a" + PIECES[0]), *[(0, piece) for piece in PIECES[1:]], (1, "b{}")],
        ),
        (Quirks(call_deltas="whole"), [(0, "a" + "".join(PIECES)), (1, "b{}")]),
    ],
)
def test_calls_are_streamed_in_given_pieces_and_dialects(quirks, expected):
    calls = [ScriptedCall("a", PIECES, id="1"), ScriptedCall("b", {}, id="2")]
    with ModelServer({"main": ScriptedModel(Answer(tool_calls=calls), quirks=quirks)}) as server:
        _, _, body = raw_answer(server, stream=True).partition(b"\r\n\r\n")

    # Read from the bytes: a client's models would fill in what is missing.
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in body.splitlines() if line.startswith(b"data: {")]
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    received = [(call.get("index"), call["function"].get("name", "") + call["function"]["arguments"]) for call in calls]
    assert received == expected
    assert [call["id"] for call in calls if "id" in call] == ["1", "2"]


def test_status_that_is_no_error_is_refused():
    with pytest.raises(ConfigurationError, match="status=200"):
        HttpError(200)

"""Clients that leave, and clients that are many: the engine's sequences end, and memory stays bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.serving import Response, Server, Turn, client_path, request
from tests.engine.test_server_turns import ONE_LEVEL, STREAMED, later, weather

pytestmark = [pytest.mark.timeout(400), ONE_LEVEL]


async def running(client: httpx.AsyncClient) -> tuple[int, int]:
    """Sequences in the engine that run or wait, and responses that the plugin knows."""
    text = (await client.get("/metrics")).text
    totals = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
    ]
    return int(sum(totals)), (await client.get("/spectool/statistics")).json()["num_resident"]


async def all_gone(client: httpx.AsyncClient, within_s: float = 20.0) -> bool:
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        # The engine's counts are of its last step: a small request makes one.
        await client.post("/v1/completions", json={"model": "smollm2", "prompt": "a", "max_tokens": 1})
        if await running(client) == (0, 0):
            return True
        await asyncio.sleep(0.2)
    return False


@pytest.mark.parametrize("stage", ["at once", "in the first turn", "parked", "in the second turn"])
async def test_a_client_that_leaves_takes_its_sequence_along(client: httpx.AsyncClient, stage: str) -> None:
    response = Response(client, request("London", **STREAMED))

    async def leaves() -> None:
        posts: list[Any] = []
        if stage != "at once":
            entry = weather("London", pending=True) if stage == "parked" else weather("London")
            posts.append(asyncio.create_task(later(0.1, response.post(entry))))
        async for name, _ in response.events():
            num_chunks = len(response.turns[-1].chunks)
            if stage == "in the first turn" and num_chunks == 3:
                break
            if stage == "parked" and name == "spectool.turn":
                await asyncio.sleep(0.3)
                assert (await response.status())["state"] == "parked"
                break
            if stage == "in the second turn" and len(response.turns) == 2 and num_chunks == 3:
                break
        await asyncio.gather(*posts)

    if stage == "at once":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await leaves()
    else:
        await leaves()

    assert await all_gone(client)
    assert (await response.post(weather("London"))).status_code in (404, 409)


async def test_a_whole_answer_that_nobody_waits_for_ends(client: httpx.AsyncClient) -> None:
    response = Response(client, request("London"))
    with pytest.raises(httpx.ReadTimeout):
        await client.post("/v1/chat/completions", json=response.body, headers=response.all_headers, timeout=0.5)

    assert await all_gone(client)


async def test_the_rest_can_be_given_up(client: httpx.AsyncClient) -> None:
    response = Response(client, request("London", **STREAMED))
    posting = asyncio.create_task(later(0.1, response.post(weather("London", pending=True))))
    async for name, _ in response.events():
        if name == "spectool.turn":
            told = (await given_up(response)).json()
            assert told == {"response_id": f"chatcmpl-{response.request_id}", "state": "finished"}
    await posting

    assert len(response.turns) == 1
    assert await all_gone(client)


async def test_a_turn_that_is_being_written_when_the_rest_is_given_up_comes_whole(client: httpx.AsyncClient) -> None:
    response = Response(client, request("London", **STREAMED))
    plain = await client_path(client, response.body, [])
    posting = asyncio.create_task(response.post(weather("London")))
    await asyncio.sleep(0.05)

    async for _ in response.events():
        if len(response.turns[0].chunks) == 3:
            assert (await posting).json() == {"cached": 1}
            await given_up(response)

    (only,) = response.turns
    assert only.token_ids == plain.token_ids
    assert (only.finish_reason, only.calls, only.usage) == ("tool_calls", plain.calls, plain.usage)
    assert only.over == {"turn": 1, "finish_reason": "tool_calls"}
    await response.status_when(lambda status: {"turn": 1, "reason": "ended"} in status["refused"])
    assert await all_gone(client)


async def test_whenever_the_rest_is_given_up_every_turn_comes_whole(client: httpx.AsyncClient) -> None:
    body = request("London", **STREAMED)
    plain = await client_path(client, body, [])

    async def is_given_up(after_s: float, entry: dict[str, Any]) -> list[Turn]:
        response = Response(client, body)
        posting = asyncio.create_task(later(0.02, response.post(entry)))
        leaving = asyncio.create_task(later(after_s, given_up(response)))
        turns = await response.read()
        await asyncio.gather(posting, leaving)
        return turns

    moments_s = (0.05, 0.3, 0.8, 1.5)
    entries = (weather("London"), weather("London", pending=True))
    read_turns = await asyncio.gather(*(is_given_up(after_s, entry) for after_s in moments_s for entry in entries))

    for turns in read_turns:
        assert turns[0].token_ids == plain.token_ids
        assert [turn.finish_reason for turn in turns] in (["tool_calls"], ["tool_calls", "stop"])
    assert await all_gone(client)


async def given_up(response: Response) -> httpx.Response:
    """DELETE; 409 where the response has finished already."""
    reply = await response.client.delete(response.path, headers={"X-Spectool-Secret": response.secret})
    assert reply.status_code in (200, 409), reply.text
    return reply


async def test_of_outputs_that_race_one_is_taken_and_gone_on_from(client: httpx.AsyncClient) -> None:
    response = Response(client, request("London", **STREAMED))
    texts = ["11 C, fog", "12 C, fog", "13 C, fog"]
    posting = [asyncio.create_task(later(0.1, response.post(weather("London", text)))) for text in texts]

    first, second = await response.read()

    taken = [text for text, post in zip(texts, posting, strict=True) if (await post).json() == {"cached": 1}]
    assert len(taken) == 1
    assert json.loads((first.went_on or {})["messages"][-1]["content"])["weather"] == taken[0]
    assert taken[0] in second.text
    assert await all_gone(client)


async def test_requests_behind_each_other_on_one_connection_go_with_it(
    client: httpx.AsyncClient, server: Server
) -> None:
    url = httpx.URL(server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    for city in ("London", "Lima"):
        response = Response(client, request(city, **STREAMED))
        body = json.dumps(response.body).encode()
        headers = {**client.headers, **response.all_headers, "Content-Type": "application/json", "Host": url.host}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "Content-Length": len(body)}.items())
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + body)
    async with asyncio.timeout(30):
        assert b" 200 " in await reader.readline()
    writer.close()
    await writer.wait_closed()

    assert await all_gone(client)


async def test_posts_for_unknown_ids_cost_nothing(client: httpx.AsyncClient, server: Server) -> None:
    before = resident_bytes(server.process.pid)
    body = [{"name": "f", "output": "x" * 9_000}]
    limit = asyncio.Semaphore(100)

    async def post(number: int) -> int:
        async with limit:
            headers = {"X-Spectool-Secret": "s" * 32}
            reply = await client.post(f"/cache-tool-output/chatcmpl-{number}", json=body, headers=headers)
            return reply.status_code

    started_s = time.monotonic()
    statuses = await asyncio.gather(*map(post, range(1000)))

    assert set(statuses) == {404}
    assert time.monotonic() - started_s < 60
    assert resident_bytes(server.process.pid) - before < 50 << 20


async def test_requests_that_nobody_finishes_are_bounded(client: httpx.AsyncClient, server: Server) -> None:
    before = resident_bytes(server.process.pid)
    body = request("London", **STREAMED, max_tokens=3000, ignore_eos=False, tools=None, tool_choice=None)
    responses = [Response(client, body) for _ in range(200)]
    limits = httpx.Limits(max_connections=None)
    async with server.client(headers=client.headers, limits=limits) as many:

        async def starts(response: Response) -> str | None:
            async with many.stream("POST", "/v1/chat/completions", json=body, headers=response.all_headers) as reply:
                await asyncio.sleep(20)
                return reply.headers.get("X-Spectool")

        starting = [asyncio.create_task(starts(response)) for response in responses]
        await asyncio.sleep(5)
        counts = (await client.get("/spectool/statistics")).json()
        posted = await asyncio.gather(*(response.post(weather("London")) for response in responses[:40]))
        used = resident_bytes(server.process.pid) - before
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)

    assert counts["num_resident"] == 48  # max_responses; the others are plain stock
    assert {reply.status_code for reply in posted} <= {200, 404}
    assert used < 200 << 20
    assert await all_gone(client, 60)


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096

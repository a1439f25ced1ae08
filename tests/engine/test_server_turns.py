"""Turns over HTTP: what a client reads is what it would have read of stock vLLM, token for token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from examples.engine.smollm2 import EXAMPLES
from spectool_core.vllm.rendering import tool_message
from tests.engine.serving import Response, Server, Turn, client_path, request
from tests.vllm.models import call

pytestmark = pytest.mark.timeout(400)

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
ONE_LEVEL = pytest.mark.parametrize("server", ["o3"], indirect=True, scope="package")


def weather(city: str, text: str = "15 C, cloudy", **fields: Any) -> dict[str, Any]:
    output = {"output": json.dumps({"city": city, "weather": text})}
    return {
        "name": "get_weather",
        "params": {"city": city},
        **(fields if "pending" in fields else {**output, **fields}),
    }


async def later(delay_s: float, work: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    await asyncio.sleep(delay_s)
    return await work


async def read(response: Response, *entries: dict[str, Any], delay_s: float = 0.0) -> list[Turn]:
    """The turns of a response to which `entries` are posted as soon as it runs."""
    posting = asyncio.create_task(later(delay_s, response.post(*entries)))
    turns = await response.read()
    reply = await posting
    assert reply.status_code == 200, reply.text
    return turns


async def test_the_engine_goes_on_from_an_output_as_the_client_would(client: httpx.AsyncClient) -> None:
    await goes_on(client, STREAMED)


@ONE_LEVEL
async def test_turns_that_are_not_streamed_are_events_of_their_own(client: httpx.AsyncClient) -> None:
    await goes_on(client, {})


async def goes_on(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    response = Response(client, request("London", **fields))

    first, second = await read(response, weather("London"))

    assert first.calls == [("get_weather", {"city": "London"})]
    assert first.over == {"turn": 1, "finish_reason": "tool_calls"}
    assert second.over == {"turn": 2, "finish_reason": "stop"}
    assert second.text == "The weather in London is 15 C, cloudy."
    assert second.chunks[0]["id"] == f"chatcmpl-{response.request_id}-t2"
    assert first.went_on is not None
    (made,) = first.went_on["injected"]
    answer, tool = first.went_on["messages"]
    assert answer["tool_calls"][0]["id"] == made["tool_call_id"] == tool["tool_call_id"]
    assert (made["name"], made["params"], made["output"]) == ("get_weather", {"city": "London"}, tool["content"])
    stock = await client_path(client, response.body, first.went_on["messages"])
    assert second.token_ids == stock.token_ids
    assert (second.text, second.usage, second.finish_reason) == (stock.text, stock.usage, stock.finish_reason)
    plain = await client_path(client, response.body, [])
    assert first.token_ids == plain.token_ids
    assert (first.calls, first.usage, first.finish_reason) == (plain.calls, plain.usage, plain.finish_reason)


@ONE_LEVEL
async def test_chunks_are_shaped_as_stock_shapes_them(client: httpx.AsyncClient) -> None:
    response = Response(client, request("Tokyo", **STREAMED, logprobs=True, top_logprobs=2))

    first, second = await read(response, weather("Tokyo"))

    assert first.went_on is not None
    for turn, went_on in ((first, []), (second, first.went_on["messages"])):
        stock = await client_path(client, response.body, went_on)
        assert {tuple(sorted(chunk)) for chunk in turn.chunks} == {tuple(sorted(chunk)) for chunk in stock.chunks}
        assert turn.chunks[0]["choices"] == stock.chunks[0]["choices"]
        assert _told(turn) == _told(stock)


def _told(turn: Turn) -> Any:
    """All that the chunks tell of tokens, however vLLM merged them."""
    choices = [choice for chunk in turn.chunks for choice in chunk["choices"]]
    contents = [content for choice in choices for content in (choice.get("logprobs") or {}).get("content", ())]
    logprobs = [(content["token"], content["bytes"], round(content["logprob"], 2)) for content in contents]
    tops = [[top["token"] for top in content["top_logprobs"]] for content in contents]
    return turn.text, turn.calls, turn.token_ids, turn.finish_reason, turn.usage, logprobs, tops


@ONE_LEVEL
async def test_without_an_output_the_turn_ends_as_ever(client: httpx.AsyncClient) -> None:
    response = Response(client, request("Madrid", **STREAMED))

    (only,) = await read(response, weather("Lisbon"))

    assert only.over == {"turn": 1, "finish_reason": "tool_calls"}
    status = await response.status_when(lambda status: status["state"] == "finished" and bool(status["refused"]))
    assert (status["injected"], status["refused"]) == ([], [{"turn": 1, "reason": "not_cached"}])
    assert (await response.post(weather("Madrid"))).status_code == 409


async def test_a_tool_that_still_runs_is_waited_for(client: httpx.AsyncClient) -> None:
    response = Response(client, request("Lima", **STREAMED))
    posting = asyncio.create_task(later(0.1, response.post(weather("Lima", pending=True))))
    async for name, data in response.events():
        if name == "spectool.turn" and data["turn"] == 1:
            await asyncio.sleep(0.3)
            status = await response.status()
            assert (status["state"], status["entries"][0]["state"]) == ("parked", "pending")
            assert (await response.post(weather("Lima"))).json() == {"cached": 1}
    await posting

    assert response.turns[1].text == "The weather in Lima is 15 C, cloudy."
    stock = await client_path(client, response.body, (response.turns[0].went_on or {})["messages"])
    assert response.turns[1].token_ids == stock.token_ids


@ONE_LEVEL
@pytest.mark.parametrize("is_withdrawn", [True, False], ids=["withdrawn", "too slow"])
async def test_a_tool_that_does_not_come_ends_the_response(client: httpx.AsyncClient, *, is_withdrawn: bool) -> None:
    response = Response(client, request("Dublin", **STREAMED))
    posting = asyncio.create_task(later(0.1, response.post(weather("Dublin", pending=True))))
    over_s = 0.0
    loop = asyncio.get_running_loop()
    async for name, _ in response.events():
        if name == "spectool.turn":
            over_s = loop.time()
            if is_withdrawn:
                await response.post(weather("Dublin", pending=False))
    await posting

    assert len(response.turns) == 1
    waited_s = loop.time() - over_s
    assert waited_s < 1.9 if is_withdrawn else 1.9 < waited_s < 10
    status = await response.status_when(lambda status: bool(status["refused"]))
    assert status["refused"][-1]["reason"] == ("not_cached" if is_withdrawn else "held_too_long")


@ONE_LEVEL
async def test_other_clients_see_the_last_turn_and_what_was_injected(client: httpx.AsyncClient) -> None:
    response = Response(client, request("Berlin", **STREAMED), wants_turns=False)
    (streamed,) = await read(response, weather("Berlin"))
    whole = Response(client, request("Berlin"), wants_turns=False)
    asking = client.post("/v1/chat/completions", json=whole.body, headers=whole.all_headers)
    answered, posted = await asyncio.gather(asking, later(0.1, whole.post(weather("Berlin"))))

    assert posted.status_code == 200
    completion = answered.json()
    for injected in (completion["injected"], streamed.chunks[-1]["injected"]):
        assert [(made["name"], made["params"]) for made in injected] == [("get_weather", {"city": "Berlin"})]
    text = "The weather in Berlin is 15 C, cloudy."
    assert completion["choices"][0]["message"]["content"] == streamed.text == text
    assert completion["choices"][0]["message"].get("tool_calls") in (None, [])
    assert streamed.calls == []
    assert {chunk["id"] for chunk in streamed.chunks} == {f"chatcmpl-{response.request_id}"}
    assert sum(choice["delta"].get("role") is not None for chunk in streamed.chunks for choice in chunk["choices"]) == 1


@ONE_LEVEL
async def test_a_budget_that_ends_in_a_turn_ends_it_as_ever(client: httpx.AsyncClient) -> None:
    short = Response(client, request("London", **STREAMED, max_tokens=10))
    (only,) = await read(short, weather("London"))
    assert (only.finish_reason, len(only.token_ids)) == ("length", 10)

    one_budget = Response(client, request("London", **STREAMED, max_tokens=35), wants_turns=False)
    (last,) = await read(one_budget, weather("London"))
    assert (last.finish_reason, len(last.token_ids)) == ("length", 35 - 31)

    own = Response(client, request("London", **STREAMED, max_tokens=31))
    _, second = await read(own, weather("London"))
    assert second.finish_reason == "stop"


@ONE_LEVEL
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stop": ["zzz"]}, "stop"),
        ({"tool_choice": "none"}, "no_tools"),
        ({"n": 2, "temperature": 0.5}, "several_samples"),
        ({"ignore_eos": True}, "stop"),
        ({"seed": 1, "temperature": 0.5}, "seeded_sampling"),
    ],
)
async def test_some_requests_are_left_alone(client: httpx.AsyncClient, fields: dict[str, Any], reason: str) -> None:
    response = Response(client, request("London", **STREAMED, **fields))

    (only,) = await read(response, weather("London"))

    assert only.over is not None
    await response.status_when(lambda status: {"turn": 1, "reason": reason} in status["refused"])


PAIRS = (("Paris", "Rome"), ("Oslo", "Paris"), ("Rome", "Oslo"))


def asked_for_two(*cities: str, at_once: bool) -> list[dict[str, Any]]:
    """A question for two cities' weather, after three examples of two calls in one turn, or in two."""
    known = dict(EXAMPLES)
    conversation: list[dict[str, Any]] = [{"role": "system", "content": "You are a helpful assistant."}]
    for pair in PAIRS:
        made = [call("get_weather", f"call_{city}", city=city) for city in pair]
        told = [tool_message(f"call_{city}", json.dumps({"city": city, "weather": known[city]})) for city in pair]
        conversation.append({"role": "user", "content": f"What is the weather in {pair[0]} and {pair[1]}?"})
        if at_once:
            conversation += [{"role": "assistant", "content": "", "tool_calls": made}, *told]
        else:
            for one, output in zip(made, told, strict=True):
                conversation += [{"role": "assistant", "content": "", "tool_calls": [one]}, output]
        text = " ".join(f"{city}: {known[city]}." for city in pair)
        conversation.append({"role": "assistant", "content": text})
    return [*conversation, {"role": "user", "content": f"What is the weather in {cities[0]} and {cities[1]}?"}]


@ONE_LEVEL
async def test_two_calls_of_one_turn_go_on_together(client: httpx.AsyncClient) -> None:
    body = request("", **STREAMED, max_tokens=90) | {"messages": asked_for_two("Lima", "Madrid", at_once=True)}
    response = Response(client, body)

    first, second = await read(response, weather("Lima"), weather("Madrid", "21 C, clear"))

    assert [params["city"] for _, params in first.calls] == ["Lima", "Madrid"]
    assert second.text == "Lima: 15 C, cloudy. Madrid: 21 C, clear."
    stock = await client_path(client, body, (first.went_on or {})["messages"])
    assert (second.token_ids, second.usage) == (stock.token_ids, stock.usage)


@ONE_LEVEL
async def test_two_calls_of_one_turn_wait_for_both(client: httpx.AsyncClient) -> None:
    body = request("", **STREAMED, max_tokens=90) | {"messages": asked_for_two("Lima", "Madrid", at_once=True)}
    response = Response(client, body)
    pending = response.post(weather("Lima"), weather("Madrid", pending=True))
    posting = asyncio.create_task(later(0.1, pending))
    async for name, _ in response.events():
        if name == "spectool.turn" and len(response.turns) == 1:
            await response.post(weather("Madrid", "21 C, clear"))
    await posting
    assert response.turns[1].text == "Lima: 15 C, cloudy. Madrid: 21 C, clear."

    half = Response(client, body)
    (only,) = await read(half, weather("Lima"))
    assert len(only.calls) == 2


@ONE_LEVEL
async def test_each_turn_goes_on_from_its_own_outputs(client: httpx.AsyncClient) -> None:
    body = request("", **STREAMED) | {"messages": asked_for_two("Berlin", "Dublin", at_once=False)}
    response = Response(client, body)

    turns = await read(response, weather("Berlin"), weather("Oslo", "4 C, snow", turn=2), weather("Oslo", "no", turn=1))

    assert [turn.calls for turn in turns[:2]] == [[("get_weather", {"city": city})] for city in ("Berlin", "Oslo")]
    assert len(turns) == 3
    went_on: list[dict[str, Any]] = []
    for turn in turns:
        stock = await client_path(client, body, went_on)
        assert (turn.token_ids, turn.usage, turn.text) == (stock.token_ids, stock.usage, stock.text)
        went_on += (turn.went_on or {}).get("messages", [])
    assert "4 C, snow" in went_on[-1]["content"]


@ONE_LEVEL
async def test_concurrent_responses_do_not_meet(client: httpx.AsyncClient) -> None:
    cities = ["London", "Tokyo", "Lima", "Madrid"]
    asked = [(city, Response(client, request(city, **STREAMED))) for city in cities]

    read_turns = await asyncio.gather(
        *(read(response, weather(city, f"{10 + number} C")) for number, (city, response) in enumerate(asked))
    )

    for number, (city, turns) in enumerate(zip(cities, read_turns, strict=True)):
        assert [turn.text for turn in turns[1:]] == [f"The weather in {city} is {number + 10} C."]


@ONE_LEVEL
async def test_posts_may_come_before_the_request(client: httpx.AsyncClient) -> None:
    response = Response(client, request("Tokyo", **STREAMED))
    posting = asyncio.create_task(response.post(weather("Tokyo")))
    await asyncio.sleep(0.2)

    turns = await response.read()

    assert (await posting).json() == {"cached": 1}
    assert len(turns) == 2


async def test_what_the_engine_counts_is_told(client: httpx.AsyncClient, server: Server) -> None:
    before = (await client.get("/spectool/statistics")).json()
    response = Response(client, request("London", **STREAMED))
    await read(response, weather("London"))
    await response.status_when(lambda status: status["state"] == "finished")

    counts = (await client.get("/spectool/statistics")).json()

    assert (counts["level"], counts["num_resident"], counts["num_cached_bytes"]) == (server.level, 0, 0)
    if server.level != "sessions":
        assert counts["num_injections"] - before["num_injections"] == 1

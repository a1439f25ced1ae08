"""A tool turn on vLLM itself: the client path beside engine mode, interleaved, over HTTP.

    python -m benchmarks.engine MODEL_FOLDER    (in the environment of make test-engine)

The tool takes no time, and its output is there while the model still writes its call: what is measured is the engine's
side alone. Outputs differ in each repeat, so that no prefix cache flatters the client path.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeAlias

import httpx

from examples.engine.server import MODEL, serving
from examples.engine.smollm2 import TOOLS, messages
from spectool_core.vllm.settings import EngineSettings, Level
from spectool_core.vllm.wire import ID_PREFIX, OUTPUTS_PATH, REQUEST_ID_HEADER, SECRET_HEADER, TURNS_HEADER

__all__ = ["main"]

CITIES = ("London", "Tokyo", "Lima", "Madrid")
LEVELS: tuple[Level, ...] = ("sessions", "o3", "o2+o3")

Ask: TypeAlias = Callable[..., Awaitable[None]]
"""Asks one `Question` through an HTTP client."""


@dataclass(frozen=True, slots=True)
class Question:
    """One agent's question in one repeat.

    Args:
        city: asked for.
        repeat: makes the tool's output unique.
        padding: words that make the output long.
        tool_s: how long the tool takes, from the moment the model is asked.
    """

    city: str
    repeat: str
    padding: int = 0
    tool_s: float = 0.0

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "messages": messages(self.city),
            "tools": TOOLS,
            "temperature": 0,
            "max_tokens": 60,
        }

    @property
    def output(self) -> str:
        detail = " ".join(f"h{number}={number * 37 % 41}" for number in range(self.padding))
        return json.dumps({"city": self.city, "weather": f"{len(self.city) * 3} C", "seen": self.repeat + detail})


async def client_path(client: httpx.AsyncClient, question: Question) -> None:
    """The first request, the tool (which an early run may have begun at once), the second."""
    tool = asyncio.create_task(asyncio.sleep(question.tool_s))
    first = await _chat(client, question.body)
    message = first["choices"][0]["message"]
    await tool
    call = _the_call(message, question)
    answered = [
        *question.body["messages"],
        {"role": "assistant", "content": message["content"] or "", "tool_calls": message["tool_calls"]},
        {"role": "tool", "tool_call_id": call["id"], "content": question.output},
    ]
    await _chat(client, {**question.body, "messages": answered})


async def engine_path(client: httpx.AsyncClient, question: Question) -> None:
    """One request whose sequence goes on inside the engine."""
    request_id, secret = uuid.uuid4().hex, uuid.uuid4().hex
    headers = {REQUEST_ID_HEADER: request_id, SECRET_HEADER: secret, TURNS_HEADER: "1"}
    entry = {"name": "get_weather", "params": {"city": question.city}}

    async def post(more: Mapping[str, Any]) -> None:
        path = f"{OUTPUTS_PATH}{ID_PREFIX}{request_id}"
        reply = await client.post(path, json=[{**entry, **more}], headers={SECRET_HEADER: secret})
        reply.raise_for_status()

    async def run_tool() -> None:
        if question.tool_s:
            await post({"pending": True})
            await asyncio.sleep(question.tool_s)
        await post({"output": question.output})

    tool = asyncio.create_task(run_tool())
    async with client.stream("POST", "/v1/chat/completions", json=question.body, headers=headers) as reply:
        reply.raise_for_status()
        events = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line.startswith("data: {")]
    await tool
    turns = [turn for turn in map(json.loads, events) if turn.get("object") == "chat.completion"]
    if len(turns) != 2:
        raise AssertionError(f"{question.city}: {len(turns)} turns")
    _the_call(turns[0]["choices"][0]["message"], question)


async def one_turn(client: httpx.AsyncClient, question: Question, *, announced: bool) -> None:
    """The first request alone, with or without a tool cache that stays empty."""
    headers = {REQUEST_ID_HEADER: uuid.uuid4().hex, SECRET_HEADER: uuid.uuid4().hex} if announced else {}
    message = (await _chat(client, question.body, headers))["choices"][0]["message"]
    _the_call(message, question)


async def _chat(client: httpx.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
    reply = await client.post("/v1/chat/completions", json=body, headers=headers)
    return reply.raise_for_status().json()


def _the_call(message: Mapping[str, Any], question: Question) -> Any:
    """The one call of a turn, which is the one that the question is about."""
    (call,) = message["tool_calls"]
    function = call["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("get_weather", {"city": question.city}), call
    return call


async def timed(ask: Ask, client: httpx.AsyncClient, questions: Sequence[Question], **more: Any) -> float:
    """Seconds until all questions, asked at once, are answered."""
    started_s = time.perf_counter()
    await asyncio.gather(*(ask(client, question, **more) for question in questions))
    return time.perf_counter() - started_s


async def steps(client: httpx.AsyncClient, level: Level) -> dict[str, int]:
    """The engine core's counts; none at the level without a scheduler of ours."""
    if level == "sessions":
        return {}
    return dict((await client.get("/spectool/statistics", params={"reset": "1"})).raise_for_status().json())


async def measure(
    client: httpx.AsyncClient, level: Level, num_requests: int, padding: int, tool_s: float, num_repeats: int
) -> None:
    """Print one row."""
    times: dict[Ask, list[float]] = {client_path: [], engine_path: []}
    counts: dict[Ask, dict[str, int]] = {client_path: {}, engine_path: {}}
    for number in range(-1, num_repeats):  # the first warms up
        for path in (client_path, engine_path)[:: 1 if number % 2 else -1]:
            repeat = uuid.uuid4().hex[:8]
            questions = [Question(city, repeat, padding, tool_s) for city in CITIES[:num_requests]]
            await steps(client, level)
            seconds = await timed(path, client, questions)
            if number >= 0:
                times[path].append(seconds)
                counts[path] = await steps(client, level)
    ratios = [ours / theirs for ours, theirs in zip(times[engine_path], times[client_path], strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    shown = " ".join(
        f"{counts[path].get('num_steps', 0):5d} {counts[path].get('num_scheduled_tokens', 0):7d}" for path in times
    )
    print(
        f"{level:9s} {num_requests:8d} {padding:7d} {tool_s:5.1f} {median(times[client_path]):8.2f}"
        f" {median(times[engine_path]):8.2f} {middle:6.3f} ({low:.3f} to {high:.3f})   {shown}",
        flush=True,
    )


async def overhead(client: httpx.AsyncClient, level: Level, num_repeats: int) -> None:
    """Print what an empty tool cache costs beside the spread of stock against stock."""
    times: dict[str, list[float]] = {"stock": [], "stock again": [], "announced": []}
    for number in range(-1, num_repeats):  # the first warms up
        for name in list(times)[:: 1 if number % 2 else -1]:
            questions = [Question("London", f"{number} {name}")]
            seconds = await timed(one_turn, client, questions, announced=name == "announced")
            if number >= 0:
                times[name].append(seconds)
    base = median(times["stock"])
    print(
        f"{level}: a turn with an empty tool cache {median(times['announced']) / base:.4f} of stock,"
        f" stock beside stock {median(times['stock again']) / base:.4f} (stock {base:.3f} s)",
        flush=True,
    )


async def _all(url: str, level: Level, given: argparse.Namespace) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        for tool_s, padding in [(0.0, 0), *([(0.0, 90)] if given.long else []), *((tool, 0) for tool in given.tool_s)]:
            for num_requests in given.requests:
                await measure(client, level, num_requests, padding, tool_s, given.repeats)
        await overhead(client, level, given.repeats * 2)


def _several(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{number}: at least 2, which quartiles need")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, each level with a server of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="see examples/engine/smollm2.py")
    parser.add_argument("--level", choices=LEVELS, action="append", help="default: all")
    parser.add_argument("--repeats", type=_several, default=7)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tool-s", type=float, nargs="*", default=[], help="also with tools that take so long (join)")
    parser.add_argument("--long", action="store_true", help="also with long outputs")
    given = parser.parse_args(arguments)
    print("level     requests padding    T client s engine s  ratio (quartiles)    client's steps, tokens; engine's")
    for level in given.level or LEVELS:
        hold_s = max([2.0, *(2 * tool_s for tool_s in given.tool_s)])
        with serving(given.model, EngineSettings(level=level, hold_s=hold_s)) as server:
            asyncio.run(_all(server.url, level, given))


if __name__ == "__main__":
    main()

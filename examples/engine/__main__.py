"""Real agents on a real model, without a GPU: stock, client mode and engine mode, one after the other.

    python -m examples.engine MODEL_FOLDER        (or: make engine)

A server of SmolLM2-135M is started with `spectool serve`'s flags; a LangGraph agent and a LlamaIndex agent ask it for
the weather, and its tool takes a while. The speculator is a rule that reads the city out of the question: a second
model beside the first would take its time from it on a CPU. What is called is decided by the model alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, get_args

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai.utils import from_openai_message_dicts
from llama_index.llms.openai_like import OpenAILike

from examples.engine.server import MODEL, serving
from examples.engine.smollm2 import messages
from spectool_core import Prompt, Speculation, ToolCall, ToolSchema, speculatable
from spectool_core.vllm.settings import EngineSettings, Level
from spectool_langgraph import SpeculationMiddleware
from spectool_llamaindex import SpeculativeFunctionAgent

CITIES = ("London", "Tokyo", "Lima", "Madrid", "Berlin", "Dublin", "Athens", "Vienna")
KINDS = ("stock", "client mode", "engine mode")

Ask = Callable[[str], Awaitable[str]]


class AskedCity:
    """Predicts a call for the city that the last message asks about."""

    name = "asked city"
    uses_model = False

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        """See `Speculator`."""
        last = prompt.messages[-1]
        asked = re.search(r"weather in (\w+)\?", str(last["content"])) if last["role"] == "user" else None
        if asked is not None and tools:
            yield ToolCall("get_weather", {"city": asked[1]})


@dataclass
class Weather:
    """The tool; `tool_s` is its network's delay, and `runs` what it was asked."""

    tool_s: float
    runs: list[str] = field(default_factory=list)

    async def get_weather(self, city: str) -> str:
        """Get weather"""
        self.runs.append(city)
        await asyncio.sleep(self.tool_s)
        return json.dumps({"city": city, "weather": f"{len(city) * 3} C, cloudy"})


def speculation_of(kind: str, url: str) -> Speculation | None:
    if kind == "stock":
        return None
    engine: dict[str, Any] = {"engine": "vllm", "engine_url": f"{url}/v1"} if kind == "engine mode" else {}
    # Without the gate, which would first learn, so that few questions show what each kind does.
    return Speculation([AskedCity()], adaptive=False, **engine)


def langgraph_agent(url: str, weather: Weather, speculation: Speculation | None) -> Ask:
    @langchain_tool
    @speculatable
    async def get_weather(city: str) -> str:
        """Get weather"""
        return await weather.get_weather(city)

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="unused", temperature=0, max_completion_tokens=60)
    middleware = [] if speculation is None else [SpeculationMiddleware(speculation)]
    agent: Any = create_agent(model, [get_weather], middleware=middleware)

    async def ask(city: str) -> str:
        state = await agent.ainvoke({"messages": messages(city)}, {"recursion_limit": 8})
        answer = state["messages"][-1]
        return str(answer.content) if isinstance(answer, AIMessage) else ""

    return ask


def llamaindex_agent(url: str, weather: Weather, speculation: Speculation | None) -> Ask:
    llm = OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key="unused",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=60,
    )
    tools = [FunctionTool.from_defaults(async_fn=speculatable(weather.get_weather), description="Get weather")]
    agent: Any = (
        FunctionAgent(tools=tools, llm=llm)
        if speculation is None
        else SpeculativeFunctionAgent(tools=tools, llm=llm, speculation=speculation)
    )

    async def ask(city: str) -> str:
        history: list[ChatMessage] = from_openai_message_dicts([dict(message) for message in messages(city)])
        answer = await agent.run(
            user_msg=history[-1].content,
            chat_history=history[:-1],
            memory=ChatMemoryBuffer.from_defaults(),
            max_iterations=6,
        )
        return str(answer.response.content)

    return ask


AGENTS = {"LangGraph": langgraph_agent, "LlamaIndex": llamaindex_agent}


async def compare(url: str, framework: str, cities: Sequence[str], tool_s: float) -> bool:
    """Ask each city of each kind in turn; print the medians; whether all answers are equal."""
    weathers = {kind: Weather(tool_s) for kind in KINDS}
    speculations = {kind: speculation_of(kind, url) for kind in KINDS}
    agents = {kind: AGENTS[framework](url, weathers[kind], speculations[kind]) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    answers: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for number, city in enumerate(("Paris", *cities)):  # the first warms up
        for kind in KINDS[:: 1 if number % 2 else -1]:
            started_s = time.perf_counter()
            answer = await agents[kind](city)
            if number:
                seconds[kind].append(time.perf_counter() - started_s)
                answers[kind].append(answer)
    base = median(seconds["stock"])
    for kind in KINDS:
        speculation, told = speculations[kind], ""
        if speculation is not None:
            statistics = speculation.statistics()
            hits = sum(tool.num_hits + tool.num_joins for tool in statistics.tools.values())
            told = (
                f", {hits} hits, {statistics.engine.num_injected} injected, {statistics.engine.num_attached} attached"
            )
        print(
            f"{framework:10s} {kind:12s} {median(seconds[kind]):6.2f} s a question, {median(seconds[kind]) / base:5.3f}"
            f" of stock, {len(weathers[kind].runs)} runs of the tool{told}",
            flush=True,
        )
    different = [
        f"{kind}: {city}: {ours!r}, stock: {stock!r}"
        for kind in KINDS
        for city, ours, stock in zip(cities, answers[kind], answers["stock"], strict=True)
        if ours != stock
    ]
    print(
        f"{framework:10s} the answers are {'NOT EQUAL' if different else 'equal'}", *different, sep="\n  ", flush=True
    )
    return not different


async def _all(url: str, given: argparse.Namespace) -> int:
    equal = [await compare(url, framework, CITIES[: given.questions], given.tool_s) for framework in AGENTS]
    return 0 if all(equal) else 1


def main() -> int:
    """Start the server, run the agents; 1 if any answer differs from stock's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--level", choices=get_args(Level), default="o2+o3")
    parser.add_argument("--tool-s", type=float, default=1.0)
    parser.add_argument("--questions", type=int, default=len(CITIES))
    given = parser.parse_args()
    print(f"starting vLLM with {given.model} at level {given.level}, about half a minute ...", flush=True)
    with serving(given.model, EngineSettings(level=given.level, hold_s=max(2.0, 2 * given.tool_s))) as server:
        print(f"asking {given.questions} questions, each of stock, client mode and engine mode ...", flush=True)
        return asyncio.run(_all(server.url, given))


if __name__ == "__main__":
    raise SystemExit(main())

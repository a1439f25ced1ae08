"""Agents of both frameworks on a real server: the run is stock's, also where the server changes under it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai.utils import from_openai_message_dicts
from llama_index.llms.openai_like import OpenAILike

from examples.engine.__main__ import AskedCity
from examples.engine.smollm2 import messages
from spectool_core import Speculation, speculatable
from spectool_core.events import EngineUnavailable, Event, TurnAnswered
from spectool_core.statistics import EngineStatistics
from spectool_langgraph import SpeculationMiddleware
from spectool_llamaindex import SpeculativeFunctionAgent
from tests.engine.serving import Server, serving
from tests.engine.test_server_turns import ONE_LEVEL

pytestmark = pytest.mark.timeout(400)

Tool = Callable[[str], Awaitable[str]]


class LangGraphAgent:
    """An agent whose runs give its messages; `answer` asks its model alone."""

    def __init__(self, url: str, get_weather: Tool, speculation: Speculation | None, *, streaming: bool) -> None:
        model = ChatOpenAI(
            model="smollm2",
            base_url=f"{url}/v1",
            api_key="the-key",
            temperature=0,
            max_completion_tokens=60,
            streaming=streaming,
            stream_usage=True,
            http_async_client=httpx.AsyncClient(),  # by default all models share one, across tests' event loops
        )
        tools = [langchain_tool(speculatable(get_weather))]
        middleware = [] if speculation is None else [SpeculationMiddleware(speculation)]
        self._agent: Any = create_agent(model, tools, middleware=middleware)
        self._model = model.bind_tools(tools)

    async def ask(self, city: str) -> list[Any]:
        state = await self._agent.ainvoke({"messages": messages(city)}, {"recursion_limit": 8})
        return [message.model_copy(update={"id": None}) for message in state["messages"]]

    async def answer(self, after: list[Any]) -> str:
        return str((await self._model.ainvoke(after)).content)


class LlamaIndexAgent:
    """See `LangGraphAgent`."""

    def __init__(self, url: str, get_weather: Tool, speculation: Speculation | None, *, streaming: bool) -> None:
        self._llm = OpenAILike(
            model="smollm2",
            api_base=f"{url}/v1",
            api_key="the-key",
            is_chat_model=True,
            is_function_calling_model=True,
            temperature=0,
            max_tokens=60,
        )
        self._tools = [FunctionTool.from_defaults(async_fn=speculatable(get_weather), description="Get weather")]
        settings: dict[str, Any] = {"tools": self._tools, "llm": self._llm, "streaming": streaming}
        self._agent: Any = (
            FunctionAgent(**settings)
            if speculation is None
            else SpeculativeFunctionAgent(**settings, speculation=speculation)
        )

    async def ask(self, city: str) -> list[Any]:
        history: list[ChatMessage] = from_openai_message_dicts([dict(message) for message in messages(city)])
        memory = ChatMemoryBuffer.from_defaults()
        given = {"user_msg": history[-1].content, "chat_history": history[:-1]}
        await self._agent.run(**given, memory=memory, max_iterations=6)
        return memory.get_all()

    async def answer(self, after: list[Any]) -> str:
        return str((await self._llm.achat_with_tools(self._tools, chat_history=after)).message.content)


AGENTS = pytest.mark.parametrize("build", [LangGraphAgent, LlamaIndexAgent])
Build = type[LangGraphAgent] | type[LlamaIndexAgent]


def named(seen: list[Any]) -> str:
    """Without the ids that servers draw, but with which is which."""
    names: dict[str, str] = {}
    return re.sub(
        r"chatcmpl-(tool-)?[0-9a-f]+(-t\d+)?", lambda found: names.setdefault(found[0], f"id {len(names)}"), repr(seen)
    )


@dataclass
class Weather:
    """The tool, and what it was asked."""

    runs: list[str] = field(default_factory=list)

    async def get_weather(self, city: str) -> str:
        """Get weather"""
        self.runs.append(city)
        return json.dumps({"city": city, "weather": f"{len(city) * 3} C, cloudy"})


def engine_of(url: str, *hooks: Callable[[Event], None]) -> Speculation:
    return Speculation([AskedCity()], adaptive=False, engine="vllm", engine_url=f"{url}/v1", hooks=hooks)


async def num_generated(server: Server) -> int:
    """Chat completions that the engine has begun; a response is one, however many its turns."""
    async with server.client() as client:
        text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


@ONE_LEVEL
@AGENTS
@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
async def test_a_run_is_stocks_in_half_the_requests(build: Build, server: Server, streaming: bool) -> None:
    stock_weather, our_weather = Weather(), Weather()
    stock = build(server.url, stock_weather.get_weather, None, streaming=streaming)
    with contextlib.closing(engine_of(server.url)) as speculation:
        ours = build(server.url, our_weather.get_weather, speculation, streaming=streaming)
        await ours.ask("Paris")  # of a server that is not known, one that is not streamed is told too late
        before = speculation.statistics().engine
        for city in ("Lima", "Vienna"):
            expected = await stock.ask(city)
            num_before = await num_generated(server)
            assert named(await ours.ask(city)) == named(expected)
            assert await num_generated(server) - num_before == 1
        engine = speculation.statistics().engine

    assert our_weather.runs[1:] == stock_weather.runs == ["Lima", "Vienna"]
    assert engine.num_injected - before.num_injected == engine.num_attached - before.num_attached == 2
    assert engine.num_aborted == engine.num_unavailable == 0


async def test_a_server_that_is_replaced_by_another_models(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes down while the tools run and the sequences wait in it: the runs go on as stock's would."""
    with contextlib.ExitStack() as servers:

        def start(name: str, *flags: str, port: int | None = None) -> Server:
            log = tmp_path / f"{name}.log"
            return servers.enter_context(serving(model_folder, log, "o3", *flags, port=port, hold_s=60.0))

        def replace(server: Server) -> None:
            servers.close()
            start("other", "--load-format", "dummy", port=urlsplit(server.url).port)

        server = await asyncio.to_thread(start, "first")
        runs = [Interrupted(kind, server.url) for kind in (LangGraphAgent, LlamaIndexAgent)]
        with caplog.at_level(logging.WARNING, "spectool"):
            asking = [asyncio.create_task(run.ask()) for run in runs]
            await asyncio.gather(*(run.has_answered.wait() for run in runs))
            await asyncio.to_thread(replace, server)
            for run in runs:
                run.may_return.set()
            seen = await asyncio.gather(*asking)

        for run, messages_seen in zip(runs, seen, strict=True):
            assert messages_seen[-1].content == await run.stock.answer(messages_seen[:-1])
            assert messages_seen[-2].content == '{"city": "Lima", "weather": "rain"}'
            assert (run.engine.num_injected, run.engine.num_attached) == (0, 0)
            assert [event.reason for event in run.events if isinstance(event, EngineUnavailable)] == ["cut"]
    assert [record.levelname for record in caplog.records if record.name == "spectool"] == ["WARNING"] * len(runs)


class Interrupted:
    """A run whose tool returns when it may; `has_answered` is set when the model has asked for it."""

    def __init__(self, kind: Build, url: str) -> None:
        self.events: list[Event] = []
        self.has_answered, self.may_return = asyncio.Event(), asyncio.Event()
        self.stock = kind(url, self.get_weather, None, streaming=True)
        self._speculation = engine_of(url, self._hear)
        self._agent = kind(url, self.get_weather, self._speculation, streaming=True)

    async def ask(self) -> list[Any]:
        with contextlib.closing(self._speculation):
            return await self._agent.ask("Lima")

    @property
    def engine(self) -> EngineStatistics:
        return self._speculation.statistics().engine

    async def get_weather(self, city: str) -> str:
        """Get weather"""
        await self.may_return.wait()
        return json.dumps({"city": city, "weather": "rain"})

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, TurnAnswered):
            self.has_answered.set()

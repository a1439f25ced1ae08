"""Agents of both frameworks on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
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
from spectool_core.events import Event, TurnAnswered
from spectool_core.statistics import EngineStatistics
from spectool_langgraph import SpeculationMiddleware
from spectool_llamaindex import SpeculativeFunctionAgent

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


Agent = LangGraphAgent | LlamaIndexAgent


def engine_of(url: str, *hooks: Callable[[Event], None]) -> Speculation:
    return Speculation([AskedCity()], adaptive=False, engine="vllm", engine_url=f"{url}/v1", hooks=hooks)


class Interrupted:
    """A run whose tool returns when it may; `has_answered` is set when the model has asked for it."""

    def __init__(self, kind: type[Agent], url: str) -> None:
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

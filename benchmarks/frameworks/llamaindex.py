"""FunctionAgents of LlamaIndex, streaming and not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.tools import BaseTool, FunctionTool
from llama_index.llms.openai import OpenAI
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import Dispatcher

from benchmarks.frameworks import Framework
from benchmarks.playback import MAIN
from benchmarks.timing import microseconds
from spectool_core import Speculation, ToolCall, speculatable
from spectool_core.annotation import ToolPolicy, policy_of
from spectool_core.runs import Scope
from spectool_llamaindex import LLMSpeculator, SpeculativeFunctionAgent
from spectool_llamaindex._binding import ToolBinding
from spectool_llamaindex._isolation import Recorded
from spectool_llamaindex._messages import in_openai_format

__all__ = ["FRAMEWORK"]


class _LlamaIndex(Framework):
    name = "llamaindex"
    ways = ("streaming", "not streaming")
    timed_ways = ways

    def tool(self, function: Callable[..., Coroutine[Any, Any, str]]) -> BaseTool:
        return FunctionTool.from_defaults(function)

    def agent(self, way: str, base_url: str, tools: Sequence[BaseTool], speculation: Speculation | None) -> Any:
        settings: dict[str, Any] = {
            "tools": [*tools],
            "llm": _llm(MAIN, base_url),
            "streaming": way == "streaming",
        }
        if speculation is None:
            return FunctionAgent(**settings)
        return SpeculativeFunctionAgent(**settings, speculation=speculation)

    def speculator(self, model: str, base_url: str) -> LLMSpeculator:
        return LLMSpeculator(_llm(model, base_url))

    async def run(self, agent: Any, text: str) -> tuple[str, ...]:
        handler = agent.run(user_msg=text)
        async for _ in handler.stream_events():
            pass
        await handler
        memory = await handler.ctx.store.get("memory")
        return tuple(str(message.content) for message in await memory.aget_all())

    def parts(self) -> Sequence[tuple[str, float]]:
        tool = FunctionTool.from_defaults(_search)
        agent = self.agent("streaming", "", [tool], Speculation())
        binding = ToolBinding(tool, policy_of(_search) or ToolPolicy())
        recorded = Recorded("the result", ())
        call, scope = ToolCall("search", {"query": "tides"}), Scope("this run", 1)
        history = [
            ChatMessage("go"),
            *(
                ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_name="search", tool_kwargs={})]),
                ChatMessage("so"),
            )
            * 3,
        ]
        dispatcher, stock_span_exit = get_dispatcher(__name__), inspect.unwrap(Dispatcher.span_exit)
        bound = inspect.signature(_search).bind("tides")
        return [
            ("a call made ready to run early", microseconds(lambda: binding.prepare(call, scope, None), 2000)),
            ("a history of seven messages in OpenAI's format", microseconds(lambda: in_openai_format(history), 500)),
            ("a stand-in for a hit", microseconds(lambda: binding.stand_in(recorded), 2000)),
            ("a hit, executed", microseconds(lambda: _done(_stand_in(binding, recorded).acall(query="tides")), 500)),
            ("a tool that does nothing, executed", microseconds(lambda: _done(tool.acall(query="tides")), 500)),
            ("the end of a span, as observers hear it", microseconds(lambda: dispatcher.span_exit("1", bound), 5000)),
            ("the same without spectool", microseconds(lambda: stock_span_exit(dispatcher, "1", bound), 5000)),
            ("the steps of an agent, which LlamaIndex looks up", microseconds(agent._get_steps, 100)),
            ("the same of a stock agent", microseconds(self.agent("streaming", "", [tool], None)._get_steps, 100)),
        ]


FRAMEWORK = _LlamaIndex()


@speculatable
async def _search(query: str) -> str:
    """Search the archive."""
    return query


def _stand_in(binding: ToolBinding, recorded: Recorded) -> Any:
    stand_in = binding.stand_in(recorded)
    assert stand_in is not None
    return stand_in


def _done(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine that waits for nothing, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for something")


def _llm(name: str, base_url: str) -> OpenAI:
    # It looks the model up among OpenAI's; what it asks the server for may have any name.
    return OpenAI(
        model=MAIN,
        api_base=base_url,
        api_key="unused",
        max_retries=0,
        reuse_client=True,
        additional_kwargs={"model": name},
    )

"""A FunctionAgent whose search is a query engine. Stock and speculative differ in the agent's class alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from llama_index.core.agent.workflow import AgentInput, AgentOutput, FunctionAgent, ToolCallResult
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage, LLMMetadata, MessageRole
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.tools import BaseTool, FunctionTool, QueryEngineTool, ToolSelection
from llama_index.core.workflow import WorkflowRuntimeError
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai.utils import ALL_AVAILABLE_MODELS
from openai import DefaultAsyncHttpxClient

from examples.demo.frameworks import INSTRUCTIONS, Conversation, Framework
from examples.demo.models import Endpoint
from examples.demo.tools import Tool, received
from examples.demo.turns import Call, TurnLog
from spectool_core import Speculation, speculatable
from spectool_core.testing import ScriptedCall
from spectool_llamaindex import SpeculativeFunctionAgent

__all__ = ["FRAMEWORK"]

_SEARCH = "search"
_CONTEXT_WINDOW = 128_000


class _LlamaIndex(Framework):
    title = "LlamaIndex FunctionAgent, whose search is a query engine,"
    compared = (
        "messages, calls, tool outputs and notes, and their order, save that of results within a turn, which stock "
        "appends as its parallel calls end"
    )
    endless_error = WorkflowRuntimeError

    def model(self, endpoint: Endpoint, http: DefaultAsyncHttpxClient) -> OpenAI:
        kind: type[OpenAI] = OpenAI if endpoint.model in ALL_AVAILABLE_MODELS else _OtherModel
        return kind(model=endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key, async_http_client=http)

    async def ask(self, model: OpenAI, text: str) -> None:
        await model.achat([ChatMessage(text)])

    def tools(self, functions: Sequence[Tool]) -> list[BaseTool]:
        return [
            _query_engine_tool(function) if function.__name__ == _SEARCH else FunctionTool.from_defaults(function)
            for function in functions
        ]

    def spelled(self, call: ScriptedCall) -> ScriptedCall:
        """A query engine takes one argument, `input`."""
        if call.name != _SEARCH or not isinstance(call.arguments, Mapping):
            return call
        return replace(call, arguments={"input": call.arguments["query"]})

    async def run(
        self, question: str, model: OpenAI, functions: Sequence[Tool], turns: TurnLog, speculation: Speculation | None
    ) -> Conversation:
        agent = _agent(self.tools(functions), model, speculation)
        handler = agent.run(user_msg=question)
        asked, results = list[ToolSelection](), list[ToolCallResult]()
        async for event in handler.stream_events():
            match event:
                case AgentInput():
                    turns.begin()
                case AgentOutput():
                    # The last answer's list is later given all results of the run.
                    calls = [call for call in event.tool_calls if isinstance(call, ToolSelection)]
                    asked += calls
                    turns.answer([_received(call, functions) for call in calls])
                case ToolCallResult():
                    results.append(event)
                    if len(results) == len(asked):
                        turns.end()
        output = await handler
        messages = await (await handler.ctx.store.get("memory")).aget_all()
        numbers = {call.tool_id: number for number, call in enumerate(asked)}
        return Conversation(str(output), [*_messages(messages, numbers), *_results(results, numbers)])


FRAMEWORK = _LlamaIndex()


class _OtherModel(OpenAI):
    """`OpenAI` for models of other names than OpenAI's."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            model_name=self.model,
            context_window=_CONTEXT_WINDOW,
            is_chat_model=True,
            is_function_calling_model=True,
        )


class _SearchEngine(CustomQueryEngine):
    search: Tool

    def custom_query(self, query_str: str) -> str:
        raise NotImplementedError("the agent asks without blocking: acustom_query")

    async def acustom_query(self, query_str: str) -> str:
        return await self.search(query_str)


def _query_engine_tool(search: Tool) -> BaseTool:
    # The engine is not marked, though its search is: it might do more than search. So the tool made of it is.
    engine = _SearchEngine(search=search)
    return speculatable(QueryEngineTool.from_defaults(engine, name=_SEARCH, description=search.__doc__))


def _agent(tools: Sequence[BaseTool], model: OpenAI, speculation: Speculation | None) -> FunctionAgent:
    if speculation is None:
        return FunctionAgent(tools=[*tools], llm=model, system_prompt=INSTRUCTIONS)
    return SpeculativeFunctionAgent(tools=[*tools], llm=model, system_prompt=INSTRUCTIONS, speculation=speculation)


def _received(call: ToolSelection, functions: Sequence[Tool]) -> Call:
    """The call as its function receives it; as it is where there is no such tool, or it would refuse it."""
    name, arguments = call.tool_name, call.tool_kwargs
    if name == _SEARCH and "input" in arguments:
        arguments = {"query": arguments["input"]}
    try:
        return name, next(received(each, **arguments) for each in functions if each.__name__ == name)
    except (StopIteration, TypeError):
        return name, arguments


def _messages(messages: Sequence[ChatMessage], numbers: Mapping[str, int]) -> Iterator[Mapping[str, Any]]:
    """What the models see of the messages; results of one answer in the order of its calls.

    Ids become numbers: the played-back server makes them of what it reads, order included.
    """

    def number(message: ChatMessage) -> int:
        return numbers.get(message.additional_kwargs.get("tool_call_id", ""), -1)

    for is_results, group in groupby(messages, key=lambda message: message.role == MessageRole.TOOL):
        for message in sorted(group, key=number) if is_results else group:
            calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
            yield {
                "role": message.role,
                "blocks": [block for block in message.blocks if block not in calls],
                "calls": [(numbers.get(call.tool_call_id or ""), call.tool_name, call.tool_kwargs) for call in calls],
                "answers": number(message),
            }


def _results(results: Sequence[ToolCallResult], numbers: Mapping[str, int]) -> Iterator[Mapping[str, Any]]:
    """What the tools gave, with what the messages leave out."""
    for result in sorted(results, key=lambda result: numbers[result.tool_id]):
        output = result.tool_output
        yield {
            "call": (numbers[result.tool_id], result.tool_name, result.tool_kwargs),
            "blocks": output.blocks,
            "raw": (output.raw_input, output.raw_output),
            "is_error": output.is_error,
        }

"""A graph of one chat model and one tool node. Stock and speculative differ in that node alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import DefaultAsyncHttpxClient
from pydantic import BaseModel, SecretStr, ValidationError

from examples.demo.frameworks import INSTRUCTIONS, Conversation, Framework
from examples.demo.models import Endpoint
from examples.demo.tools import Tool
from examples.demo.turns import Call, TurnLog
from spectool_core import Speculation
from spectool_core.testing import ScriptedCall
from spectool_langgraph import SpeculativeToolNode

__all__ = ["FRAMEWORK"]


class _LangGraph(Framework):
    title = "LangGraph agent"
    compared = "messages, calls, ids, order and notes"
    endless_error = GraphRecursionError

    def model(self, endpoint: Endpoint, http: DefaultAsyncHttpxClient) -> ChatOpenAI:
        key = SecretStr(endpoint.api_key)
        return ChatOpenAI(model=endpoint.model, base_url=endpoint.base_url, api_key=key, http_async_client=http)

    async def ask(self, model: ChatOpenAI, text: str) -> None:
        await model.ainvoke(text)

    def tools(self, functions: Sequence[Tool]) -> list[BaseTool]:
        return [tool(function) for function in functions]

    def spelled(self, call: ScriptedCall) -> ScriptedCall:
        return call

    async def run(
        self,
        question: str,
        model: ChatOpenAI,
        functions: Sequence[Tool],
        turns: TurnLog,
        speculation: Speculation | None,
    ) -> Conversation:
        tools = self.tools(functions)
        node = ToolNode(tools) if speculation is None else SpeculativeToolNode(tools, speculation)
        messages: Sequence[AnyMessage] = ()
        start = MessagesState(messages=[SystemMessage(INSTRUCTIONS), HumanMessage(question)])
        async for state in _graph(model, tools, node, turns).compile().astream(start, stream_mode="values"):
            messages = state["messages"]
            if isinstance(messages[-1], ToolMessage):
                turns.end()
        return Conversation(messages[-1].text, [_essence(message) for message in messages])


FRAMEWORK = _LangGraph()


def _graph(
    model: BaseChatModel, tools: Sequence[BaseTool], node: ToolNode, turns: TurnLog
) -> StateGraph[MessagesState, None, MessagesState, MessagesState]:
    bound, by_name = model.bind_tools(tools), {tool.name: tool for tool in tools}

    async def ask(state: MessagesState) -> MessagesState:
        turns.begin()
        message = await bound.ainvoke(state["messages"])
        turns.answer([_received(by_name.get(call["name"]), call["name"], call["args"]) for call in message.tool_calls])
        return MessagesState(messages=[message])

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", node)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph


def _received(tool: BaseTool | None, name: str, arguments: Mapping[str, Any]) -> Call:
    """The call as its tool receives it; as it is where the tool would refuse it."""
    schema = tool.get_input_schema() if tool else None
    if schema is None or not issubclass(schema, BaseModel):
        return name, arguments
    try:
        return name, schema.model_validate(arguments).model_dump()
    except ValidationError:
        return name, arguments


def _essence(message: AnyMessage) -> dict[str, Any]:
    """What the models see of a message; not its own id, nor how long it took."""
    essence: dict[str, Any] = {"type": message.type, "content": message.content, "name": message.name}
    if isinstance(message, AIMessage):
        essence |= {"tool_calls": message.tool_calls, "invalid_tool_calls": message.invalid_tool_calls}
    if isinstance(message, ToolMessage):
        essence |= {"tool_call_id": message.tool_call_id, "status": message.status, "artifact": message.artifact}
    return essence

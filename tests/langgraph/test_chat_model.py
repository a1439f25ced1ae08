"""`speculative_model` and `SpeculationCallback`: graphs that call the model in their own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool
from langgraph.graph import START, MessagesState, StateGraph

from spectool_core import ConfigurationError, Speculation
from spectool_core.testing import run_virtual
from spectool_langgraph import SpeculationCallback, SpeculativeToolNode, speculative_model
from tests.guessing import Call, Reply, outcomes, predicting, prompts_of
from tests.langgraph.agents import Seen, build, in_order, make_tools, run, tool_node
from tests.langgraph.scripted import ScriptedChatModel, StreamingChatModel
from tests.tool_log import ToolLog

REPLIES = [
    Reply(calls=(Call("lookup", {"q": "a"}, "call_0"),), text="let me see"),
    Reply(calls=(Call("announce", {"q": "b"}, "call_0"),)),
    Reply(text="done"),
]


def tools_of(log: ToolLog | None = None) -> list[BaseTool]:
    return make_tools(log or ToolLog(lambda *_: 0.4))


def own_loop(
    speculation: Speculation | None,
    log: ToolLog,
    *,
    told: str,
    model_class: type[ScriptedChatModel] = StreamingChatModel,
) -> Any:
    """One node that calls the model and the tool node by itself, so that no graph shows the tool node."""
    tools = tools_of(log)
    node = tool_node(tools, speculation)
    model: Any = model_class(replies=REPLIES)
    config: Any = None
    if isinstance(node, SpeculativeToolNode):
        match told:
            case "model":
                model = speculative_model(model, node).bind_tools(tools)
            case "binding":
                model = speculative_model(model.bind_tools(tools), node)
            case "call":
                model = model.bind_tools(tools)
                config = {"callbacks": [SpeculationCallback(node)]}
            case "configured":
                model = model.bind_tools(tools).with_config(callbacks=[SpeculationCallback(node)])
            case "constructor":
                model = model_class(replies=REPLIES, callbacks=[SpeculationCallback(node)]).bind_tools(tools)
    else:
        model = model.bind_tools(tools)

    async def loop(state: MessagesState) -> Any:
        messages = list(state["messages"])
        while True:
            answer = await model.ainvoke(messages, config)
            messages.append(answer)
            if not answer.tool_calls:
                return {"messages": messages}
            messages.extend((await node.ainvoke({"messages": messages}))["messages"])

    graph = StateGraph(MessagesState)
    graph.add_node("loop", loop)
    graph.add_edge(START, "loop")
    return graph.compile()


@pytest.mark.parametrize("model_class", [ScriptedChatModel, StreamingChatModel])
@pytest.mark.parametrize("told", ["model", "binding", "constructor"])
def test_a_node_that_calls_model_and_tools_itself(told: str, model_class: type[ScriptedChatModel]) -> None:
    speculation, log = predicting(REPLIES), ToolLog(lambda *_: 0.4)
    ours = run_virtual(lambda: run(own_loop(speculation, log, told=told, model_class=model_class)))
    stock_log = ToolLog(lambda *_: 0.4)
    stock = run_virtual(lambda: run(own_loop(None, stock_log, told=told, model_class=model_class)))
    assert stock.error is None
    assert ours.messages == stock.messages
    assert ours.stream == stock.stream  # tokens once
    assert in_order(ours.callbacks) == in_order(stock.callbacks)
    assert outcomes(speculation) == (2, 0, 0)
    assert log.counts("started") == stock_log.counts("started")


@pytest.mark.parametrize("told", ["call", "configured"])
def test_a_callback_given_to_the_call(told: str) -> None:
    speculation, log = predicting(REPLIES), ToolLog(lambda *_: 0.4)
    ours = run_virtual(lambda: run(own_loop(speculation, log, told=told)))
    stock = run_virtual(lambda: run(own_loop(None, ToolLog(lambda *_: 0.4), told=told)))
    assert ours.messages == stock.messages
    assert outcomes(speculation) == (2, 0, 0)
    assert len(prompts_of(speculation)) == 3


def test_nobody_told_it_so_it_stays_stock() -> None:
    """So that the tests above could fail."""
    speculation = predicting(REPLIES)
    run_virtual(lambda: run(own_loop(speculation, ToolLog(lambda *_: 0.4), told="nobody")))
    assert speculation.statistics().num_turns == 0


def test_a_model_told_of_a_node_in_the_same_graph_starts_one_turn() -> None:
    speculation, log = predicting(REPLIES), ToolLog(lambda *_: 0.4)
    tools = tools_of(log)
    node = SpeculativeToolNode(tools, speculation)
    model = speculative_model(ScriptedChatModel(replies=REPLIES).bind_tools(tools), node)

    async def main() -> Seen:
        from langgraph.prebuilt import tools_condition

        async def agent(state: MessagesState) -> Any:
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("agent", agent)
        graph.add_node("tools", node)
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", tools_condition)
        graph.add_edge("tools", "agent")
        return await run(graph.compile())

    assert run_virtual(main).error is None
    assert speculation.statistics().num_turns == 3
    assert len(prompts_of(speculation)) == 3
    assert outcomes(speculation) == (2, 0, 0)


def test_outside_of_a_graph_it_is_the_model_it_was() -> None:
    speculation = predicting(REPLIES)
    tools = tools_of()
    model = ScriptedChatModel(replies=REPLIES).bind_tools(tools)
    wrapped = speculative_model(model, SpeculativeToolNode(tools, speculation))
    assert wrapped.invoke([HumanMessage("go")]) == model.invoke([HumanMessage("go")])
    assert speculation.statistics().num_turns == 0


class Handler(BaseCallbackHandler):
    pass


@pytest.mark.parametrize("present", [None, [Handler()], CallbackManager([Handler()])], ids=["none", "list", "manager"])
def test_the_copy_differs_in_its_callbacks_only(present: Any) -> None:
    node = SpeculativeToolNode(tools_of(), Speculation())
    model = ScriptedChatModel(replies=REPLIES, callbacks=present)
    given = model.callbacks
    copy = speculative_model(model, node)
    assert type(copy) is ScriptedChatModel
    assert copy.model_copy(update={"callbacks": given}) == model
    assert model.callbacks is given
    assert handlers_in(model.callbacks) == handlers_in(present)
    assert [type(handler) for handler in handlers_in(copy.callbacks)][-1] is SpeculationCallback
    assert handlers_in(copy.callbacks)[:-1] == handlers_in(present)


def handlers_in(callbacks: Any) -> Sequence[Any]:
    return list(getattr(callbacks, "handlers", callbacks) or [])


@pytest.mark.parametrize(
    "model",
    ["gpt", None, RunnableLambda(lambda x: x), object(), StrOutputParser()],
    ids=lambda given: type(given).__name__,
)
def test_what_is_not_a_chat_model(model: Any) -> None:
    node = SpeculativeToolNode(tools_of(), Speculation())
    with pytest.raises(ConfigurationError, match="allowed: a chat model"):
        speculative_model(model, node)


def test_what_is_not_a_node() -> None:
    from langgraph.prebuilt import ToolNode

    for wrong in (ToolNode(tools_of()), None, Speculation()):
        with pytest.raises(ConfigurationError, match="a SpeculativeToolNode"):
            speculative_model(ScriptedChatModel(replies=[]), wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="a SpeculativeToolNode"):
            SpeculationCallback(wrong)  # type: ignore[arg-type]


# The model inside a chain, which needs no telling


def test_a_model_in_a_chain_in_a_node_of_the_same_graph() -> None:
    def agent(speculation: Speculation | None) -> Any:
        tools = tools_of()
        prompt = ChatPromptTemplate.from_messages([("system", "be brief"), MessagesPlaceholder("messages")])
        chain = prompt | StreamingChatModel(replies=REPLIES).bind_tools(tools)

        class Chain:
            async def ainvoke(self, messages: Any) -> Any:
                return await chain.ainvoke({"messages": messages})

        return build([], tools, speculation, model=Chain()).compile()

    speculation = predicting(REPLIES)
    stock, ours = run_virtual(lambda: run(agent(None))), run_virtual(lambda: run(agent(speculation)))
    assert ours.stream == stock.stream
    assert in_order(ours.callbacks) == in_order(stock.callbacks)
    assert outcomes(speculation) == (2, 0, 0)
    assert prompts_of(speculation)[0] == [("system", "be brief"), ("user", "go")]
    assert len(prompts_of(speculation)) == 3


def test_a_model_that_is_streamed_by_the_node() -> None:
    def agent(speculation: Speculation | None) -> Any:
        tools = tools_of()
        model = StreamingChatModel(replies=REPLIES).bind_tools(tools)

        class Streamed:
            async def ainvoke(self, messages: Any) -> Any:
                whole: Any = None
                async for chunk in model.astream(messages):
                    whole = chunk if whole is None else whole + chunk
                return whole

        return build([], tools, speculation, model=Streamed()).compile()

    speculation = predicting(REPLIES)
    stock, ours = run_virtual(lambda: run(agent(None))), run_virtual(lambda: run(agent(speculation)))
    assert stock.error is None
    assert ours.stream == stock.stream
    assert in_order(ours.callbacks) == in_order(stock.callbacks)
    assert outcomes(speculation) == (2, 0, 0)


def test_a_model_whose_stream_is_left_half_way() -> None:
    """No answer, so no calls; the turn is settled with the run."""
    tools = tools_of()
    model = StreamingChatModel(replies=REPLIES).bind_tools(tools)

    class HalfWay:
        async def ainvoke(self, messages: Any) -> Any:
            stream = model.astream(messages)
            async for chunk in stream:
                await stream.aclose()
                return chunk
            return None

    speculation = predicting(REPLIES)
    seen = run_virtual(lambda: run(build([], tools, speculation, model=HalfWay()).compile()))
    assert seen.error is None
    assert seen.num_tasks_left == 0
    assert speculation.statistics().num_settled_turns == 1

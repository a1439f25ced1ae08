"""Where the model's node and the tool node stand: Send, subgraphs, parallel branches, prebuilt agents, many runs."""

from __future__ import annotations

import asyncio
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import pytest
from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import Send
from typing_extensions import TypedDict

from spectool_core import Speculation, speculatable
from spectool_core.testing import run_virtual
from spectool_langgraph import SpeculativeToolNode, speculative_model
from tests.guessing import Call, Reply, outcomes, predicting, prompts_of
from tests.langgraph.agents import QUESTION, Seen, build, in_order, make_tools, per_run, run, tool_node
from tests.langgraph.scripted import ScriptedChatModel
from tests.tool_log import ToolLog

TWO = Reply(calls=(Call("lookup", {"q": "a"}, "call_0"), Call("weigh", {"q": "b"}, "call_1")))
LOOK = Reply(calls=(Call("lookup", {"q": "c"}, "call_0"),))
DONE = Reply(text="done")
REPLIES = [TWO, LOOK, DONE]


def new_log(latency_s: float = 0.4) -> ToolLog:
    return ToolLog(lambda _name, _argument: latency_s)


def model_node(model: Any) -> Any:
    async def agent(state: Any) -> dict[str, list[AnyMessage]]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    return agent


def assert_same(ours: Seen, stock: Seen) -> None:
    assert stock.error is None
    assert ours.error is None
    assert ours.messages == stock.messages
    assert Counter(map(repr, ours.stream)) == Counter(map(repr, stock.stream))
    assert per_run(ours.callbacks) == per_run(stock.callbacks)
    assert ours.num_tasks_left == 0


# Prebuilt agents and Send


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.filterwarnings("ignore::langgraph.warnings.LangGraphDeprecatedSinceV10")
def test_create_react_agent(version: Any) -> None:
    def agent(speculation: Speculation | None) -> tuple[Any, ToolLog]:
        log = new_log()
        node = tool_node(make_tools(log), speculation)
        return create_react_agent(ScriptedChatModel(replies=REPLIES), node, version=version, prompt="be brief"), log

    speculation = predicting(REPLIES)
    (stock, _), (ours, log) = agent(None), agent(speculation)
    assert_same(run_virtual(lambda: run(ours)), run_virtual(lambda: run(stock)))
    assert outcomes(speculation) == (3, 0, 0)
    assert sum(log.counts("started").values()) == 3
    assert prompts_of(speculation)[0] == [("system", "be brief"), ("user", "go")]


@pytest.mark.parametrize("with_context", [True, False])
def test_each_call_sent_to_a_tool_node_of_its_own(with_context: bool) -> None:
    def graph(speculation: Speculation | None, tools: Sequence[BaseTool]) -> Any:
        def route(state: MessagesState) -> Any:
            calls = getattr(state["messages"][-1], "tool_calls", [])
            if with_context:
                return [
                    Send("tools", {"__type": "tool_call_with_context", "tool_call": call, "state": state})
                    for call in calls
                ] or END
            return [Send("tools", [call]) for call in calls] or END

        built = StateGraph(MessagesState)
        built.add_node("agent", model_node(ScriptedChatModel(replies=REPLIES).bind_tools(tools)))
        built.add_node("tools", tool_node(tools, speculation))
        built.add_edge(START, "agent")
        built.add_conditional_edges("agent", route, ["tools", END])
        built.add_edge("tools", "agent")
        return built.compile()

    speculation, log = predicting(REPLIES), new_log()
    stock, ours = graph(None, make_tools(new_log())), graph(speculation, make_tools(log))
    assert_same(run_virtual(lambda: run(ours)), run_virtual(lambda: run(stock)))
    assert outcomes(speculation) == (3, 0, 0)
    assert sum(log.counts("started").values()) == 3


def test_another_messages_key() -> None:
    class State(TypedDict):
        talk: Annotated[list[AnyMessage], operator.add]

    def graph(speculation: Speculation | None) -> Any:
        tools = make_tools(new_log())
        model = ScriptedChatModel(replies=REPLIES).bind_tools(tools)

        async def agent(state: State) -> Any:
            return {"talk": [await model.ainvoke(state["talk"])]}

        built = StateGraph(State)
        built.add_node("agent", agent)
        built.add_node("tools", tool_node(tools, speculation, messages_key="talk"))
        built.add_edge(START, "agent")
        built.add_conditional_edges("agent", lambda state: tools_condition(state["talk"]), ["tools", END])
        built.add_edge("tools", "agent")
        return built.compile()

    async def play(speculation: Speculation | None) -> list[Any]:
        result = await graph(speculation).ainvoke({"talk": [HumanMessage("go")]})
        return [(message.content, getattr(message, "tool_call_id", None)) for message in result["talk"]]

    speculation = predicting(REPLIES)
    assert run_virtual(lambda: play(speculation)) == run_virtual(lambda: play(None))
    assert outcomes(speculation) == (3, 0, 0)


# Subgraphs


def test_a_read_before_a_write_of_another_agent_of_the_run_is_not_served_while_it_writes() -> None:
    """Two agents of one run: one writes for a while from 1 s on, the other asks at 2 s for what was read at 0.25 s."""
    writing = [Reply(calls=(Call("note", {"text": "n"}, "w"),), generation_s=1.0), DONE]
    reading = [Reply(calls=(Call("lookup", {"q": "a"}, "r"),), generation_s=2.0), DONE]
    latencies = {"note": 5.0, "lookup": 0.4}

    def played(speculations: Sequence[Speculation | None]) -> Seen:
        tools = make_tools(ToolLog(lambda name, _argument: latencies[name]))
        outer = StateGraph(MessagesState)
        for name, replies, speculation in zip("wr", [writing, reading], speculations, strict=True):
            outer.add_node(name, build(replies, tools, speculation).compile())
            outer.add_edge(START, name)
        return run_virtual(lambda: run(outer.compile()))

    shared = predicting(reading)
    ours = played([shared, shared])
    assert sorted(map(repr, ours.messages)) == sorted(map(repr, played([None, None]).messages))
    assert shared.statistics().tools["lookup"].num_runs_succeeded >= 1
    assert outcomes(shared, "lookup") == (0, 0, 1)


def test_an_agent_as_a_node_of_another_graph() -> None:
    def graph(speculation: Speculation | None) -> Any:
        inner = build(REPLIES, make_tools(new_log()), speculation).compile()
        outer = StateGraph(MessagesState)
        outer.add_node("agent", inner)
        outer.add_node("called", lambda state: {"messages": []})
        outer.add_edge(START, "called")
        outer.add_edge("called", "agent")
        return outer.compile()

    speculation = predicting(REPLIES)
    stock = run_virtual(lambda: run(graph(None), subgraphs=True))
    assert_same(run_virtual(lambda: run(graph(speculation), subgraphs=True)), stock)
    assert outcomes(speculation) == (3, 0, 0)


@pytest.mark.parametrize("inner_tools", [False, True])
def test_the_model_in_a_subgraph_and_the_tools_in_its_parent(inner_tools: bool) -> None:
    """A tool node of the subgraph itself, here never reached, would be the one to get calls of its tools."""

    def graph(speculation: Speculation | None) -> Any:
        tools = make_tools(new_log())
        inner = StateGraph(MessagesState)
        inner.add_node("model", model_node(ScriptedChatModel(replies=REPLIES).bind_tools(tools)))
        inner.add_edge(START, "model")
        if inner_tools:
            inner.add_node("inner tools", ToolNode(make_tools(new_log())))
            inner.add_conditional_edges("model", lambda _: END, ["inner tools", END])
        outer = StateGraph(MessagesState)
        outer.add_node("agent", inner.compile())
        outer.add_node("tools", tool_node(tools, speculation))
        outer.add_edge(START, "agent")
        outer.add_conditional_edges("agent", tools_condition, ["tools", END])
        outer.add_edge("tools", "agent")
        return outer.compile()

    speculation = predicting(REPLIES)
    assert_same(run_virtual(lambda: run(graph(speculation))), run_virtual(lambda: run(graph(None))))
    assert outcomes(speculation) == ((0, 0, 0) if inner_tools else (3, 0, 0))
    assert speculation.statistics().num_launched == (0 if inner_tools else 3)


def test_a_stock_agent_inside_a_tool_of_a_speculative_one_stays_stock() -> None:
    """Both know tools of the same names; only the outer one's model is a main model."""
    asks = [Reply(calls=(Call("delegate", {"q": "a"}, "call_0"),)), DONE]

    def graph(speculation: Speculation | None, log: ToolLog) -> Any:
        tools = make_tools(log)

        @tool
        async def delegate(q: str) -> str:
            """Ask another agent."""
            agent = build(REPLIES, tools, None).compile()
            return str((await agent.ainvoke({"messages": [HumanMessage(q)]}))["messages"][-1].content)

        return build(asks, [*tools, delegate], speculation).compile()

    speculation, log, stock_log = predicting(REPLIES), new_log(), new_log()
    ours, stock = graph(speculation, log), graph(None, stock_log)
    assert_same(run_virtual(lambda: run(ours)), run_virtual(lambda: run(stock)))
    assert len(prompts_of(speculation)) == 2
    assert speculation.statistics().num_turns == 2


def test_a_stock_agent_as_a_node_beside_a_speculative_tool_node_stays_stock() -> None:
    def graph(speculation: Speculation | None, log: ToolLog) -> Any:
        tools = make_tools(log)
        outer = StateGraph(MessagesState)
        outer.add_node("agent", build(REPLIES, tools, None).compile())
        outer.add_node("tools", tool_node(tools, speculation))
        outer.add_edge(START, "agent")
        outer.add_conditional_edges("agent", tools_condition, ["tools", END])
        return outer.compile()

    speculation, log, stock_log = predicting(REPLIES), new_log(), new_log()
    ours, stock = graph(speculation, log), graph(None, stock_log)
    assert_same(run_virtual(lambda: run(ours)), run_virtual(lambda: run(stock)))
    assert speculation.statistics().num_turns == 0
    assert log.events == stock_log.events


def test_a_speculative_agent_inside_a_tool_of_a_speculative_one() -> None:
    asks = [Reply(calls=(Call("delegate", {"q": "a"}, "call_0"),)), DONE]
    inner_speculation, outer_speculation = predicting(REPLIES), predicting(asks)
    inner_log, stock_log = new_log(), new_log()

    def graph(inner: Speculation | None, outer: Speculation | None, log: ToolLog) -> Any:
        tools = make_tools(log)

        @tool
        async def delegate(q: str) -> str:
            """Ask another agent."""
            agent = build(REPLIES, tools, inner).compile()
            return str((await agent.ainvoke({"messages": [HumanMessage(q)]}))["messages"][-1].content)

        return build(asks, [*tools, delegate], outer).compile()

    ours, stock = graph(inner_speculation, outer_speculation, inner_log), graph(None, None, stock_log)
    assert_same(run_virtual(lambda: run(ours)), run_virtual(lambda: run(stock)))
    assert outcomes(inner_speculation) == (3, 0, 0)
    assert outer_speculation.statistics().num_turns == 2
    assert inner_log.counts("started") == stock_log.counts("started")


def test_a_marked_tool_that_is_an_agent_is_never_run_early_again() -> None:
    """What its model and tools emit cannot be replayed, so its result is not used."""
    asks = [Reply(calls=(Call("delegate", {"q": each}, "call_0"),)) for each in "ab"] + [DONE]

    def graph(speculation: Speculation | None, log: ToolLog) -> Any:
        @tool
        @speculatable
        async def delegate(q: str) -> str:
            """Ask another agent."""
            agent = build(REPLIES, make_tools(log), None).compile()
            return str((await agent.ainvoke({"messages": [HumanMessage(q)]}))["messages"][-1].content)

        return build(asks, [delegate], speculation).compile()

    speculation, log, stock_log = predicting(asks), new_log(), new_log()
    ours, stock = graph(speculation, log), graph(None, stock_log)
    assert_same(run_virtual(lambda: run(ours)), run_virtual(lambda: run(stock)))
    assert outcomes(speculation) == (0, 0, 2)
    assert speculation.statistics().tools["delegate"].num_runs_not_replayable == 1
    assert speculation.statistics().num_turns == 3


# Several nodes in one graph


def branches(
    speculations: Sequence[Speculation | None], tools: Sequence[Sequence[BaseTool]], replies: Sequence[Sequence[Reply]]
) -> Any:
    """Two agents side by side in one graph, each with a model node and a tool node of its own."""
    from langgraph.graph.message import add_messages

    state = TypedDict("state", dict.fromkeys("ab", Annotated[list[AnyMessage], add_messages]))  # type: ignore[misc]
    graph = StateGraph(state)

    def add(name: str, index: int) -> None:
        model = ScriptedChatModel(replies=list(replies[index])).bind_tools(tools[index])

        async def agent(state: Any) -> Any:
            return {name: [await model.ainvoke([HumanMessage("go"), *state[name]])]}

        graph.add_node(f"agent {name}", agent)
        graph.add_node(f"tools {name}", tool_node(tools[index], speculations[index], messages_key=name))
        graph.add_edge(START, f"agent {name}")
        to = {"tools": f"tools {name}", "__end__": END}
        graph.add_conditional_edges(f"agent {name}", lambda state: tools_condition(state[name]), to)
        graph.add_edge(f"tools {name}", f"agent {name}")

    add("a", 0)
    add("b", 1)
    return graph.compile()


async def values_of(graph: Any, given: Any) -> dict[str, list[tuple[Any, ...]]]:
    result = await graph.ainvoke(given)
    return {
        name: [(message.type, message.content, getattr(message, "tool_call_id", None)) for message in messages]
        for name, messages in result.items()
    }


def test_two_agents_side_by_side_with_different_tools() -> None:
    replies = [
        [Reply(calls=(Call("lookup", {"q": "a"}, "call_0"),)), DONE],
        [Reply(calls=(Call("weigh", {"q": "a"}, "call_0"),)), DONE],
    ]
    speculations = [predicting(each) for each in replies]
    logs = [new_log(), new_log()]
    ours = branches(speculations, [make_tools(logs[0])[:1], make_tools(logs[1])[1:2]], replies)
    stock = branches([None, None], [make_tools(new_log())[:1], make_tools(new_log())[1:2]], replies)
    given = {"a": [], "b": []}
    assert run_virtual(lambda: values_of(ours, given)) == run_virtual(lambda: values_of(stock, given))
    for speculation, log in zip(speculations, logs, strict=True):
        assert outcomes(speculation) == (1, 0, 0)
        assert sum(log.counts("started").values()) == 1


def test_two_tools_of_one_name_in_one_graph_are_not_run_early() -> None:
    """Which of the two the model means is not known before its answer is routed."""
    replies = [[LOOK, DONE], [LOOK, DONE]]
    speculation = predicting([LOOK, DONE])
    logs = [new_log(), new_log()]
    ours = branches([speculation, speculation], [make_tools(logs[0]), make_tools(logs[1])], replies)
    stock = branches([None, None], [make_tools(new_log()), make_tools(new_log())], replies)
    given = {"a": [], "b": []}
    assert run_virtual(lambda: values_of(ours, given)) == run_virtual(lambda: values_of(stock, given))
    assert speculation.statistics().num_launched == 0
    assert [log.counts("started") for log in logs] == [{("lookup", "c1"): 1}] * 2


def test_a_stock_node_with_another_tool_of_that_name_in_one_graph() -> None:
    replies = [[LOOK, DONE], [LOOK, DONE]]
    speculation = predicting([LOOK, DONE])
    logs = [new_log(), new_log()]
    ours = branches([speculation, None], [make_tools(logs[0]), make_tools(logs[1])], replies)
    run_virtual(lambda: values_of(ours, {"a": [], "b": []}))
    assert speculation.statistics().num_launched == 0
    assert [log.counts("started") for log in logs] == [{("lookup", "c1"): 1}] * 2


@pytest.mark.parametrize(("ids", "hits"), [(("1", "2"), 2), (("call_0", "call_0"), 1)])
def test_two_agents_side_by_side_share_their_tools_but_no_results(ids: Sequence[str], hits: int) -> None:
    """Where a server gives both the same id for the same call, they cannot be told apart: one result, one miss."""
    replies = [[Reply(calls=(Call("lookup", {"q": "c"}, each),)), DONE] for each in ids]
    speculation, log = predicting([LOOK, DONE], after_s=0.25), new_log()
    tools = make_tools(log)
    ours = branches([speculation, speculation], [tools, tools], replies)
    stock = branches([None, None], [make_tools(new_log()), make_tools(new_log())], replies)
    given = {"a": [], "b": []}
    assert run_virtual(lambda: values_of(ours, given)) == run_virtual(lambda: values_of(stock, given))
    assert outcomes(speculation) == (hits, 0, 2 - hits)
    assert log.counts("started") == {("lookup", "c1"): 4 - hits}
    assert speculation.statistics().num_turns == 4


def test_forty_branches_at_once() -> None:
    """Each of the many model calls in flight keeps its turn."""

    class State(TypedDict):
        found: Annotated[list[str], operator.add]

    def graph(speculation: Speculation | None, log: ToolLog) -> Any:
        tools = make_tools(log)
        node = tool_node(tools, speculation, handle_tool_errors=False)

        async def branch(state: Any) -> Any:
            reply = Reply(calls=(Call("lookup", {"q": state["q"]}, "call_0"),))
            model: Any = ScriptedChatModel(replies=[reply]).bind_tools(tools)
            if speculation is not None:
                model = speculative_model(model, node)
            answer = await model.ainvoke([HumanMessage(state["q"])])
            result = await node.ainvoke([answer])
            return {"found": [result[0].content]}

        built = StateGraph(State)
        built.add_node("branch", branch)
        built.add_conditional_edges(START, lambda _: [Send("branch", {"q": f"q{n}"}) for n in range(40)], ["branch"])
        return built.compile()

    class Echo:
        name = "echo"

        async def predict(self, prompt: Any, tools: Any) -> Any:
            from spectool_core.calls import ToolCall

            yield ToolCall("lookup", {"q": prompt.messages[-1]["content"]})

    log = new_log()
    speculation = Speculation([Echo()], max_concurrency=64, max_concurrency_per_tool=64)

    async def main() -> list[str]:
        return list((await graph(speculation, log).ainvoke({"found": []}))["found"])

    assert run_virtual(main) == [f"lookup of q{n}1" for n in range(40)]
    hits, joins, misses = outcomes(speculation)
    assert (hits + joins, misses) == (40, 0)
    assert speculation.statistics().num_settled_turns == 40


# The functional API


def test_an_entrypoint_with_a_model_told_of_its_tools() -> None:
    def workflow(speculation: Speculation | None, log: ToolLog) -> Any:
        tools = make_tools(log)
        node = tool_node(tools, speculation)
        model: Any = ScriptedChatModel(replies=REPLIES).bind_tools(tools)
        if isinstance(node, SpeculativeToolNode):
            model = speculative_model(model, node)

        @task
        async def call_tools(message: Any) -> Any:
            return await node.ainvoke([message])

        @entrypoint()
        async def agent(messages: list[Any]) -> list[Any]:
            while True:
                answer = await model.ainvoke(messages)
                messages = [*messages, answer]
                if not answer.tool_calls:
                    return messages
                messages = [*messages, *await call_tools(answer)]

        return agent

    async def play(speculation: Speculation | None, log: ToolLog) -> list[Any]:
        messages = await workflow(speculation, log).ainvoke([HumanMessage("go")])
        return [(message.content, getattr(message, "tool_call_id", None)) for message in messages]

    speculation, log = predicting(REPLIES), new_log()
    assert run_virtual(lambda: play(speculation, log)) == run_virtual(lambda: play(None, new_log()))
    assert outcomes(speculation) == (3, 0, 0)
    assert sum(log.counts("started").values()) == 3


# Many runs of one graph


def numbered(speculation: Speculation | None, log: ToolLog) -> Any:
    """An agent that looks up its own question, under the id `call_0` in every run."""
    tools = make_tools(log)

    async def agent(state: MessagesState) -> Any:
        question = str(state["messages"][0].content)
        asked = Reply(calls=(Call("lookup", {"q": "shared"}, "call_0"), Call("weigh", {"q": question}, "call_1")))
        model = ScriptedChatModel(replies=[asked, DONE]).bind_tools(tools)
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", tool_node(tools, speculation))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    return graph.compile()


class Questioning:
    """Predicts what `numbered` asks."""

    name = "questioning"

    async def predict(self, prompt: Any, tools: Any) -> Any:
        from spectool_core.calls import ToolCall

        await asyncio.sleep(0.1)
        if len(prompt.messages) == 1:
            yield ToolCall("lookup", {"q": "shared"})
            yield ToolCall("weigh", {"q": prompt.messages[0]["content"]})


@pytest.mark.parametrize("threads", ["different", "same", "none"])
def test_twenty_runs_of_one_graph_share_nothing(threads: str) -> None:
    speculation = Speculation([Questioning()], max_concurrency=64, max_concurrency_per_tool=64)
    log = new_log()
    graph = numbered(speculation, log)

    def config(n: int) -> Any:
        return {} if threads == "none" else {"configurable": {"thread_id": f"t{n if threads == 'different' else 0}"}}

    async def main() -> list[Any]:
        runs = [graph.ainvoke({"messages": [HumanMessage(f"q{n}")]}, config(n)) for n in range(20)]
        return [result["messages"] for result in await asyncio.gather(*runs)]

    for n, messages in enumerate(run_virtual(main)):
        contents = [message.content for message in messages if isinstance(message, ToolMessage)]
        assert contents == ["lookup of shared1", f"weigh of q{n}"]
    assert outcomes(speculation) == (40, 0, 0)
    assert log.counts("started")["lookup", "shared1"] == 20  # one of its own for each run, though the calls are equal
    assert sum(log.counts("started").values()) == 40


def test_batches() -> None:
    speculation = Speculation([Questioning()], max_concurrency=64, max_concurrency_per_tool=64)
    log = new_log()
    graph = numbered(speculation, log)
    given = [{"messages": [HumanMessage(f"q{n}")]} for n in range(5)]

    async def main() -> list[Any]:
        return [result["messages"][3].content for result in await graph.abatch(given)]

    assert run_virtual(main) == [f"weigh of q{n}" for n in range(5)]
    assert outcomes(speculation) == (10, 0, 0)


def test_order_is_stock_s_order_for_one_call_at_a_time() -> None:
    replies = [LOOK, Reply(calls=(Call("weigh", {"q": "a"}, "1"),)), DONE]
    speculation = predicting(replies)
    stock = run_virtual(lambda: run(build(replies, make_tools(new_log()), None).compile()))
    ours = run_virtual(lambda: run(build(replies, make_tools(new_log()), speculation).compile()))
    assert in_order(ours.callbacks) == in_order(stock.callbacks)
    assert QUESTION["messages"][0].content in repr(ours.messages[0])

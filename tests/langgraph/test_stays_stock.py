"""A graph without a speculative node stays what it was, whatever else lives in the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.tools import BaseTool
from langchain_core.tracers.context import _configure_hooks

from spectool_core import speculatable
from spectool_core.testing import run_virtual
from spectool_langgraph import _callback
from tests.guessing import Call, Reply, outcomes, predicting
from tests.langgraph.agents import QUESTION, Seen, build, in_order, make_tools, run
from tests.langgraph.scripted import ScriptedChatModel, StreamingChatModel
from tests.tool_log import ToolLog

LOOK = Reply(calls=(Call("lookup", {"q": "a"}, "call_0"),))
DONE = Reply(text="done")
REPLIES = [LOOK, DONE]


@pytest.fixture
def without_hook() -> Any:
    """Call it for LangChain as it is without this library."""
    hooks = [hook for hook in _configure_hooks if hook[0].name == "spectool_callback"]
    assert len(hooks) == 1

    def remove() -> None:
        _configure_hooks.remove(hooks[0])

    yield remove
    if hooks[0] not in _configure_hooks:
        _configure_hooks.append(hooks[0])


def test_a_stock_graph_with_the_same_tools_beside_a_speculative_one() -> None:
    speculation, log = predicting(REPLIES), ToolLog(lambda *_: 0.4)
    tools = make_tools(log)

    async def main() -> list[Seen]:
        ours, stock = build(REPLIES, tools, speculation).compile(), build(REPLIES, tools, None).compile()
        return await asyncio.gather(*(run(graph) for graph in (stock, ours, stock, ours, stock)))

    seen = run_virtual(main)
    assert len({repr(each.messages) for each in seen}) == 1
    assert speculation.statistics().num_turns == 4
    assert outcomes(speculation) == (2, 0, 0)
    assert log.counts("started") == {("lookup", "a1"): 5}
    assert [each.duration_s > 2.39 for each in seen] == [True, False, True, False, True]


def test_two_graphs_with_tools_of_one_name_do_not_mix() -> None:
    speculation = predicting(REPLIES)
    logs = [ToolLog(lambda *_: 0.4) for _ in range(2)]

    def graph(log: ToolLog, suffix: str) -> Any:
        lookup, *others = make_tools(log)
        given = lookup.coroutine  # type: ignore[attr-defined]

        async def suffixed(q: str, n: int = 1) -> str:
            return f"{await given(q, n)} {suffix}"

        copy = speculatable(lookup.model_copy(update={"coroutine": suffixed}))
        return build(REPLIES, [copy, *others], speculation)

    async def main() -> list[Any]:
        graphs = [graph(log, suffix).compile() for log, suffix in zip(logs, "xy", strict=True)]
        results = await asyncio.gather(*(each.ainvoke(QUESTION) for each in graphs))
        return [result["messages"][2].content for result in results]

    assert run_virtual(main) == ["lookup of a1 x", "lookup of a1 y"]
    assert outcomes(speculation) == (2, 0, 0)
    assert [log.counts("started") for log in logs] == [{("lookup", "a1"): 1}] * 2


def test_a_stock_graph_called_from_a_node_of_a_speculative_one() -> None:
    """Not in a tool: in the node that calls the model."""
    speculation, log = predicting(REPLIES), ToolLog(lambda *_: 0.4)
    tools = make_tools(log)
    stock_model = ScriptedChatModel(replies=REPLIES).bind_tools(tools)

    class AsksStockAgentFirst:
        async def ainvoke(self, messages: Any) -> Any:
            if len(messages) == 1:
                await build(REPLIES, tools, None).compile().ainvoke(QUESTION)
            return await stock_model.ainvoke(messages)

    async def main() -> Seen:
        return await run(build([], tools, speculation, model=AsksStockAgentFirst()).compile())

    assert run_virtual(main).error is None
    assert speculation.statistics().num_turns == 2
    assert log.counts("started") == {("lookup", "a1"): 2}


def test_a_model_outside_of_any_graph_starts_nothing() -> None:
    speculation, tools = predicting(REPLIES), make_tools(ToolLog(lambda *_: 0.0))
    build(REPLIES, tools, speculation).compile()
    model = ScriptedChatModel(replies=[Reply(text="hello", generation_s=0.0)]).bind_tools(tools)
    model.invoke([HumanMessage("hi")])
    asyncio.run(model.ainvoke([HumanMessage("hi")]))
    assert speculation.statistics().num_turns == 0


def test_nothing_but_chat_models_is_followed(without_hook: Callable[[], None]) -> None:
    """The process-wide handler is called for models only, so that chains, tools and retrievers cost what they did."""
    heard: list[str] = []

    class Listening(_callback.TurnCallback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                heard.append(name)
            return super().__getattribute__(name)

    token = next(hook[0] for hook in _configure_hooks if hook[0].name == "spectool_callback").set(Listening())  # type: ignore[func-returns-value]
    try:
        run_virtual(lambda: run(build(REPLIES, make_tools(ToolLog(lambda *_: 0.0)), None).compile()))
    finally:
        next(hook[0] for hook in _configure_hooks if hook[0].name == "spectool_callback").reset(token)  # type: ignore[arg-type]
    assert set(heard) <= {"on_chat_model_start", "on_llm_new_token", "on_llm_end", "on_llm_error"}
    assert heard.count("on_chat_model_start") == 2


@pytest.mark.parametrize("model_class", [ScriptedChatModel, StreamingChatModel])
def test_a_stock_run_is_the_same_with_and_without_the_hook(
    model_class: type[ScriptedChatModel], without_hook: Callable[[], None]
) -> None:
    def play() -> Seen:
        graph = build(REPLIES, make_tools(ToolLog(lambda *_: 0.4)), None, model_class=model_class)
        return run_virtual(lambda: run(graph.compile()))

    hooked = play()
    without_hook()
    plain = play()
    assert hooked.stream == plain.stream
    assert in_order(hooked.callbacks) == in_order(plain.callbacks)


def test_no_model_call_leaves_anything_with_the_hook() -> None:
    """Answered, failed, cancelled and abandoned calls: nothing is kept for any of them."""
    failing = [Reply(error=ConnectionError("down")), DONE]
    for replies in (REPLIES, failing):
        for model_class in (ScriptedChatModel, StreamingChatModel):
            for cancel_after_s in (None, 0.1, 0.7):
                graph = build(
                    replies, make_tools(ToolLog(lambda *_: 0.4)), predicting(REPLIES), model_class=model_class
                )
                compiled = graph.compile()
                run_virtual(lambda: run(compiled, cancel_after_s=cancel_after_s))  # noqa: B023
    assert _callback.FOLLOWER._answering == {}
    assert [run._turns for run in _callback.RUNS._runs.values()] == [[]] * len(_callback.RUNS._runs)


def test_a_stock_sync_graph_starts_no_thread() -> None:
    speculation = predicting(REPLIES)
    tools: list[BaseTool] = make_tools(ToolLog(lambda *_: 0.0))
    build(REPLIES, tools, speculation).compile()
    before = {thread.name for thread in threading.enumerate()}
    graph = build([DONE], tools, None).compile()
    graph.invoke(QUESTION)
    started = {thread.name for thread in threading.enumerate()} - before
    assert not [name for name in started if name.startswith("spectool")]


def test_a_handler_that_is_not_ours_keeps_its_place() -> None:
    """User handlers come before the process-wide one, and inherit nothing of it."""
    seen: list[Any] = []

    class Looking(BaseCallbackHandler):
        run_inline = True

        def on_chat_model_start(self, *_: Any, **__: Any) -> None:
            seen.append("model")

    async def main() -> Any:
        graph = build(REPLIES, make_tools(ToolLog(lambda *_: 0.0)), None).compile()
        return await graph.ainvoke(QUESTION, {"callbacks": [Looking()]})

    run_virtual(main)
    assert seen == ["model", "model"]

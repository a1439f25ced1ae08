"""What a user can watch of a run, in every way that LangGraph offers: the same with early runs as without."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk
from langgraph.checkpoint.memory import InMemorySaver

from spectool_core import Speculation
from spectool_core.testing import run_virtual
from tests.guessing import Call, Reply, outcomes, predicting
from tests.langgraph.agents import QUESTION, build, in_order, make_tools, plain, run
from tests.langgraph.scripted import ScriptedChatModel, StreamingChatModel
from tests.tool_log import ToolLog

REPLIES = [
    Reply(calls=(Call("announce", {"q": "a"}, "call_0"),), text="let me see"),
    Reply(calls=(Call("weigh", {"q": "b"}, "call_0"), Call("lookup", {"q": "b"}, "call_1"))),
    Reply(calls=(Call("unknown", {}, "call_0"),)),
    Reply(calls=(Call("note", {"text": "c"}, "call_0"),)),
    Reply(calls=(Call("lookup", {"n": "many"}, "call_0"),)),
    Reply(text="done"),
]
ALL_MODES = ["values", "updates", "messages", "custom", "debug", "tasks", "checkpoints", "tools"]


def agent(speculation: Speculation | None, model_class: type[ScriptedChatModel] = StreamingChatModel) -> Any:
    log = ToolLog(lambda name, argument: 0.4)
    return build(REPLIES, make_tools(log), speculation, model_class=model_class, handle_tool_errors=True)


@pytest.mark.parametrize("model_class", [ScriptedChatModel, StreamingChatModel])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_each_stream_mode(mode: str, model_class: type[ScriptedChatModel]) -> None:
    async def play(speculation: Speculation | None) -> Any:
        graph = agent(speculation, model_class).compile(checkpointer=InMemorySaver())
        return await run(graph, config={"configurable": {"thread_id": "t"}}, stream_mode=[mode], subgraphs=True)

    speculation = predicting(REPLIES)
    stock, ours = run_virtual(lambda: play(None)), run_virtual(lambda: play(speculation))
    assert stock.error is None
    assert stock.stream
    assert ours.stream == stock.stream
    assert in_order(ours.callbacks) == in_order(stock.callbacks)
    assert outcomes(speculation) == (3, 0, 1)


@pytest.mark.parametrize("model_class", [ScriptedChatModel, StreamingChatModel])
@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")
@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_astream_events(version: Any, model_class: type[ScriptedChatModel]) -> None:
    async def play(speculation: Speculation | None) -> list[Any]:
        events = agent(speculation, model_class).compile().astream_events(QUESTION, version=version)
        return [plain(event) async for event in (await events if version == "v3" else events)]

    speculation = predicting(REPLIES)
    stock = run_virtual(lambda: play(None))
    ours = run_virtual(lambda: play(speculation))
    assert len(stock) > 15
    if version == "v1":  # stock orders what parallel calls emit differently from run to run
        assert sorted(map(repr, ours)) == sorted(map(repr, stock))
    else:
        assert ours == stock
    assert outcomes(speculation) == (3, 0, 1)


def test_tokens_arrive_when_they_would_have_and_once() -> None:
    async def play(speculation: Speculation | None) -> list[tuple[float, Any]]:
        loop = asyncio.get_running_loop()
        graph = agent(speculation).compile()
        return [
            (round(loop.time(), 6), token.content)
            async for token, _ in graph.astream(QUESTION, stream_mode="messages")
            if isinstance(token, AIMessageChunk)
        ]

    speculation = predicting(REPLIES)
    stock, ours = run_virtual(lambda: play(None)), run_virtual(lambda: play(speculation))
    assert [token for _, token in ours] == [token for _, token in stock]
    assert [when for when, _ in ours[:3]] == [when for when, _ in stock[:3]]
    assert ours[-1][0] == pytest.approx(stock[-1][0] - 0.8)  # two hits of a tool of 0.4 s


def test_a_stream_that_the_user_leaves_early() -> None:
    async def play(speculation: Speculation | None) -> list[Any]:
        chunks = []
        stream = agent(speculation).compile().astream(QUESTION, stream_mode="updates")
        async for chunk in stream:
            chunks.append(plain(chunk))
            if len(chunks) == 2:
                break
        await stream.aclose()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return chunks

    speculation = predicting(REPLIES)
    assert run_virtual(lambda: play(speculation)) == run_virtual(lambda: play(None))
    assert speculation.statistics().num_settled_turns == speculation.statistics().num_turns > 0


def test_a_hit_is_streamed_as_the_tool_would_have_streamed() -> None:
    """Not only equal to stock: what the tool emits is there, once, between its start and its end."""

    async def play() -> Any:
        graph = agent(speculation).compile()
        return await run(graph, stream_mode=["custom", "tools"])

    speculation = predicting(REPLIES)
    seen = run_virtual(play)
    kinds = [chunk.get("event", chunk) for _, _, chunk in seen.stream][:4]
    assert kinds == ["'tool-started'", {"begun": "'a'"}, {"ended": "'a'"}, "'tool-finished'"]
    assert [event[3] for event in seen.callbacks if event[0] == "custom_event"] == ["('announced', {'q': 'a'})"]
    assert outcomes(speculation, "announce") == (1, 0, 0)

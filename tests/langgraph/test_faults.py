"""Over real HTTP, whatever goes wrong with a speculator or an early run, the run is what it would have been."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import BaseTool, StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import DefaultAsyncHttpxClient, DefaultHttpxClient
from pydantic import SecretStr

from spectool_core import ModelSpeculator, Speculation, ToolCall, speculatable
from spectool_core.testing import (
    Answer,
    DroppedConnection,
    EmptyChoices,
    FakeTool,
    Fault,
    Hang,
    HttpError,
    Latch,
    LeakCheck,
    ModelServer,
    ScriptedCall,
    ScriptedModel,
    TruncatedAnswer,
)
from spectool_langgraph import SpeculativeToolNode
from tests.guessing import Guess, GuessingSpeculator

CALL = ScriptedCall("search", {"query": "tides"})
TURNS = [Answer(tool_calls=[CALL]), Answer("High at noon.")]
UNUSED = SecretStr("unused")


@contextmanager
def chat_model(server: ModelServer) -> Iterator[ChatOpenAI]:
    """A chat model whose connections are closed: its default client is shared by the whole process."""
    with DefaultHttpxClient() as client:
        yield ChatOpenAI(
            model="main",
            base_url=server.base_url,
            api_key=UNUSED,
            max_retries=0,
            http_client=client,
            http_async_client=DefaultAsyncHttpxClient(),
        )


def agent(model: ChatOpenAI, tools: Sequence[BaseTool], speculation: Speculation | None) -> Any:
    bound = model.bind_tools(tools)

    async def call_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", call_model)
    graph.add_node("tools", ToolNode(tools) if speculation is None else SpeculativeToolNode(tools, speculation))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition, ["tools", END])
    graph.add_edge("tools", "agent")
    return graph.compile()


def search_tool(fake: FakeTool, **policy: Any) -> BaseTool:
    tool = StructuredTool.from_function(coroutine=fake.coroutine, name="search", description="Search.")
    return speculatable(tool, **policy)


async def transcript(graph: Any) -> list[tuple[str, Any, Any]]:
    state = await graph.ainvoke({"messages": [HumanMessage("When is high tide?")]})
    return [
        (message.type, message.content, getattr(message, "tool_calls", None) or getattr(message, "tool_call_id", None))
        for message in state["messages"]
    ]


async def both(server: ModelServer, speculators: Sequence[Any], fake: FakeTool) -> Speculation:
    """Run the agent stock and speculative, compare the transcripts, and close everything."""
    with chat_model(server) as model:
        stock = await transcript(agent(model, [search_tool(fake)], None))
        assert fake.statistics().num_finished == 1
        speculation = Speculation(speculators)
        ours = await transcript(agent(model, [search_tool(fake)], speculation))
        assert ours == stock
        await model.root_async_client.close()
    for speculator in speculators:
        if isinstance(speculator, ModelSpeculator):
            await speculator.aclose()
    return speculation


FAULTS: dict[str, tuple[Fault | None, Answer | None]] = {
    "server error": (HttpError(500), None),
    "rate limit": (HttpError(429, retry_after_s=60), None),
    "no headers": (DroppedConnection("before_headers"), None),
    "dropped half way": (DroppedConnection("mid_body"), None),
    "truncated": (TruncatedAnswer(), None),
    "no choices": (EmptyChoices(), None),
    "never answers": (Hang("before_headers"), None),
    "stops half way": (Hang("mid_body"), None),
    "arguments that are no JSON": (None, Answer(tool_calls=[ScriptedCall("search", '{"query": "ti')])),
    "arguments that are no object": (None, Answer(tool_calls=[ScriptedCall("search", '["tides"]')])),
    "a tool that is not there": (None, Answer(tool_calls=[ScriptedCall("destroy", {})])),
    "arguments that the tool refuses": (None, Answer(tool_calls=[ScriptedCall("search", {"query": {"a": [1]}})])),
    "text": (None, Answer("I think that one should search.")),
}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_speculator_changes_nothing(name: str, streaming: bool) -> None:
    fault, answer = FAULTS[name]
    says = answer or Answer(tool_calls=[CALL], fault=fault)
    models = {"main": ScriptedModel(TURNS, generation_s=0.05), "small": ScriptedModel([says, Answer("")])}
    fake = FakeTool("search", result="12:04")
    with LeakCheck(), ModelServer(models) as server:
        small = ModelSpeculator("small", base_url=server.base_url, api_key="unused", streaming=streaming)
        speculation = asyncio.run(both(server, [small], fake))
        server.wait_until(lambda statistics: statistics.num_active_requests == 0)
        speculation.close()
    total = speculation.statistics().total
    assert (total.num_hits, total.num_joins, total.num_misses) == (0, 0, 1)
    assert fake.statistics().num_started == 2  # once stock, once ours
    assert server.statistics().models["small"].num_requests >= 1


def test_a_speculator_that_is_down_changes_nothing() -> None:
    fake = FakeTool("search", result="12:04")
    with LeakCheck(), ModelServer({"main": ScriptedModel(TURNS, generation_s=0.05)}) as server:
        with ModelServer({"small": TURNS}) as gone:
            nobody = ModelSpeculator("small", base_url=gone.base_url, api_key="unused")
        speculation = asyncio.run(both(server, [nobody], fake))
        speculation.close()
    assert nobody.statistics().num_failed_requests == 2
    assert speculation.statistics().total.num_misses == 1


def test_a_late_speculator_is_closed_when_the_main_model_has_answered() -> None:
    models = {"main": ScriptedModel(TURNS, generation_s=0.05), "small": ScriptedModel(TURNS, generation_s=30.0)}
    fake = FakeTool("search", result="12:04")
    with LeakCheck(), ModelServer(models) as server:
        small = ModelSpeculator("small", base_url=server.base_url, api_key="unused")
        speculation = asyncio.run(both(server, [small], fake))
        server.wait_until(lambda statistics: statistics.models["small"].num_cancelled_requests == 2)
        speculation.close()
    assert speculation.statistics().num_speculators_cancelled == 2
    assert speculation.statistics().total.num_misses == 1


def test_a_right_guess_is_served_over_http() -> None:
    models = {"main": ScriptedModel(TURNS, generation_s=0.3), "small": ScriptedModel(TURNS, generation_s=0.01)}
    fake = FakeTool("search", result="12:04")
    with LeakCheck(), ModelServer(models) as server:
        small = ModelSpeculator("small", base_url=server.base_url, api_key="unused")
        speculation = asyncio.run(both(server, [small], fake))
        speculation.close()
    total = speculation.statistics().total
    assert (total.num_hits + total.num_joins, total.num_misses, total.num_real_runs) == (1, 0, 0)
    assert fake.statistics().num_started == 2


def test_the_main_models_cancellation_cancels_speculators_and_runs() -> None:
    hold = Latch()
    models = {
        "main": ScriptedModel([Answer(tool_calls=[CALL], latch=hold), Answer("")]),
        "small": ScriptedModel(TURNS, generation_s=0.01),
        "slow": ScriptedModel(TURNS, generation_s=30.0),
    }
    fake = FakeTool("search", latency_s=30.0)

    async def main(server: ModelServer, speculators: Sequence[ModelSpeculator]) -> Speculation:
        speculation = Speculation(speculators)
        with chat_model(server) as model:
            running = asyncio.ensure_future(transcript(agent(model, [search_tool(fake)], speculation)))
            await fake.until(lambda counts: counts.num_started == 1)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await fake.until(lambda counts: counts.num_cancelled == 1)
            await model.root_async_client.close()
        for speculator in speculators:
            await speculator.aclose()
        assert {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("spectool")} == set()
        return speculation

    with LeakCheck(), ModelServer(models) as server:
        speculators = [ModelSpeculator(name, base_url=server.base_url, api_key="unused") for name in ("small", "slow")]
        speculation = asyncio.run(main(server, speculators))
        server.wait_until(lambda statistics: statistics.models["slow"].num_cancelled_requests == 1)
        hold.open()
        speculation.close()
    statistics = speculation.statistics()
    assert statistics.num_settled_turns == statistics.num_turns == 1
    assert statistics.total.num_runs_cancelled == 1


def test_a_hanging_early_run_is_cancelled_after_timeout_s() -> None:
    hold = Latch()
    models = {"main": ScriptedModel([Answer(tool_calls=[CALL], latch=hold), Answer("High at noon.")])}
    latencies = iter([30.0, 0.0])
    fake = FakeTool("search", latency_s=lambda _arguments: next(latencies), result="12:04")
    guessing = GuessingSpeculator([Guess((ToolCall("search", {"query": "tides"}),), after_s=0)])

    async def main(server: ModelServer) -> Speculation:
        speculation = Speculation([guessing])
        with chat_model(server) as model:
            running = asyncio.ensure_future(transcript(agent(model, [search_tool(fake, timeout_s=0.05)], speculation)))
            await fake.until(lambda counts: counts.num_cancelled == 1)
            hold.open()
            assert (await running)[-1][1] == "High at noon."
            await model.root_async_client.close()
        return speculation

    with LeakCheck(), ModelServer(models) as server:
        total = asyncio.run(main(server)).statistics().total
    assert (total.num_runs_timed_out, total.num_misses, total.num_real_runs) == (1, 1, 1)


def test_ten_thousand_predictions_are_bounded() -> None:
    class Talkative:
        num_yielded = 0

        async def predict(self, prompt: Any, tools: Any) -> Any:
            for number in range(10_000):
                self.num_yielded += 1
                yield ToolCall("search", {"query": f"guess {number}"})

    models = {"main": ScriptedModel(TURNS, generation_s=0.05)}
    fake, talkative = FakeTool("search", result="12:04"), Talkative()
    with LeakCheck(), ModelServer(models) as server:
        speculation = asyncio.run(both(server, [talkative], fake))
    statistics = speculation.statistics()
    assert statistics.num_launched == speculation.config.max_runs_per_tool * 2  # M has two turns
    assert talkative.num_yielded <= 2 * 4 * speculation.config.max_runs_per_turn
    assert fake.statistics().num_started <= 2 + statistics.num_launched


def test_nothing_is_left_on_threads_after_many_runs() -> None:
    models = {"main": ScriptedModel(TURNS), "small": ScriptedModel(TURNS)}
    fake = FakeTool("search", result="12:04")
    with ModelServer(models) as server, LeakCheck():
        small = ModelSpeculator("small", base_url=server.base_url, api_key="unused")
        speculation = Speculation([small])

        async def main() -> None:
            with chat_model(server) as model:
                graph = agent(model, [search_tool(fake)], speculation)
                await asyncio.gather(*(transcript(graph) for _ in range(20)))
                await model.root_async_client.close()
            await small.aclose()

        for _ in range(3):
            asyncio.run(main())
        speculation.close()
        server.wait_until(lambda statistics: statistics.num_active_requests == 0)
    statistics = speculation.statistics()
    assert statistics.num_turns == statistics.num_settled_turns == 120
    assert threading.active_count() < 20


EXIT = """
import asyncio, sys, threading
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from spectool_core import Speculation, ToolCall, speculatable
from spectool_langgraph import SpeculativeToolNode
from tests.guessing import Call, Guess, GuessingSpeculator, Reply
from tests.langgraph.scripted import ScriptedChatModel

begun = threading.Event()

@tool
@speculatable
def search(query: str) -> str:
    "Search."
    begun.set()
    threading.Event().wait(3600)
    return query

class Impatient(Exception): ...

def give_up(turn: int) -> None:
    assert begun.wait(30)
    raise Impatient

model = ScriptedChatModel(replies=[Reply((Call("search", {"query": "q"}, "1"),))], before_answer=give_up)
speculation = Speculation([GuessingSpeculator([Guess((ToolCall("search", {"query": "q"}),), 0)])])
graph = StateGraph(MessagesState)
graph.add_node("agent", lambda state: {"messages": [model.bind_tools([search]).invoke(state["messages"])]})
graph.add_node("tools", SpeculativeToolNode([search], speculation))
graph.add_edge(START, "agent")
try:
    graph.compile().invoke({"messages": [HumanMessage("go")]})
except Impatient:
    print("gave up")
"""


def test_a_process_ends_while_an_early_run_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("gave up\n", "", 0)

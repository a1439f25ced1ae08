"""Sync graphs: early runs on the library's own threads while the model generates, ordered by latches, no sleeps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.callbacks import dispatch_custom_event
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import tools_condition
from langgraph.types import Command, interrupt

from spectool_core import Speculation, speculatable
from spectool_core.calls import ToolCall
from spectool_core.testing import FakeTool, Latch, LeakCheck
from tests.guessing import Call, Guess, GuessingSpeculator, Reply, outcomes, predicting, prompts_of
from tests.langgraph.agents import QUESTION, STREAM_MODES, build, in_order, plain, tool_node
from tests.langgraph.scripted import CallbackLog, ScriptedChatModel, StreamingChatModel, wait_for

LOOK = Reply(calls=(Call("lookup", {"query": "a"}, "call_0"),))
DONE = Reply(text="done")
REPLIES = [LOOK, DONE]


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """No thread, task or descriptor outlives a test: each closes what it made (see `closed_after`)."""
    with LeakCheck(allowed_threads=("asyncio_", "ThreadPoolExecutor")):
        yield


@pytest.fixture
def closed_after() -> Iterator[Callable[[Speculation], Speculation]]:
    opened: list[Speculation] = []

    def remember(speculation: Speculation) -> Speculation:
        opened.append(speculation)
        return speculation

    yield remember
    for speculation in opened:
        speculation.close()


def lookup_of(fake: FakeTool) -> BaseTool:
    return speculatable(tool(fake.function))


def agent(
    fake: FakeTool,
    speculation: Speculation | None,
    *,
    replies: list[Reply] = REPLIES,
    before_answer: Callable[[int], None] | None = None,
    model_class: type[ScriptedChatModel] = ScriptedChatModel,
    **arguments: Any,
) -> Any:
    tools = [lookup_of(fake)]
    model = model_class(replies=replies, before_answer=before_answer).bind_tools(tools)
    return build([], tools, speculation, model=model, **arguments)


def result_of(graph: Any, config: Any = None) -> list[Any]:
    return [plain(message) for message in graph.invoke(QUESTION, config)["messages"]]


def first_turn(action: Callable[[], Any]) -> Callable[[int], None]:
    return lambda turn: action() if turn == 0 else None


def early_run_of(speculation: Speculation, num_runs: int = 1) -> Callable[[int], None]:
    """The model answers its first prompt only once an early run has succeeded: without one it never would."""
    return first_turn(lambda: wait_for(lambda: speculation.statistics().total.num_runs_succeeded == num_runs))


Closing = Callable[[Speculation], Speculation]


def test_a_hit(closed_after: Closing) -> None:
    fake = FakeTool("lookup", result=lambda _: threading.current_thread().name)
    speculation = closed_after(predicting(REPLIES, after_s=0.0))
    finished = early_run_of(speculation)
    result = agent(fake, speculation, before_answer=finished).compile().invoke(QUESTION)
    threads = [message.content for message in result["messages"] if isinstance(message, ToolMessage)]
    assert threads == ["spectool-worker"]
    assert outcomes(speculation) == (1, 0, 0)
    assert fake.statistics().num_started == 1


def test_a_join(closed_after: Closing) -> None:
    """The model answers while the tool runs; the tool goes on only once its call waits for it."""
    fake = FakeTool("lookup", latch=Latch())
    latch = fake._latch
    assert latch is not None
    speculation = closed_after(predicting(REPLIES, after_s=0.0))

    def wrap(request: Any, execute: Any) -> Any:
        opener = threading.Timer(0.05, latch.open)
        opener.start()
        try:
            return execute(request)
        finally:
            opener.join()

    started = first_turn(lambda: latch.wait_until_arrived(1))
    graph = agent(fake, speculation, before_answer=started, wrap_tool_call=wrap).compile()
    graph.invoke(QUESTION)
    assert outcomes(speculation) == (0, 1, 0)
    assert fake.statistics().num_started == 1


def test_a_miss_while_a_wrong_run_hangs_on_a_library_thread(closed_after: Closing) -> None:
    latch = Latch()
    fake = FakeTool("lookup", latch=latch)
    wrong = GuessingSpeculator([Guess((ToolCall("lookup", {"query": "wrong"}),), 0.0)])
    speculation = closed_after(Speculation([wrong]))

    def wrap(request: Any, execute: Any) -> Any:
        latch.open()
        return execute(request)

    started = first_turn(lambda: latch.wait_until_arrived(1))
    stock = result_of(agent(FakeTool("lookup"), None).compile())
    assert result_of(agent(fake, speculation, before_answer=started, wrap_tool_call=wrap).compile()) == stock
    assert outcomes(speculation) == (0, 0, 1)
    assert [call["query"] for call in fake.calls] == ["wrong", "a"]
    assert speculation.statistics().num_wasted == 1


def test_a_hung_early_run_does_not_hold_up_the_real_call(closed_after: Closing) -> None:
    """It is for other arguments; the run ends while it still hangs."""
    latch = Latch()

    def hang_if_wrong(arguments: Any) -> str:
        if arguments["query"] == "wrong":
            latch.wait()
        return "ok"

    fake = FakeTool("lookup", result=hang_if_wrong)
    wrong = GuessingSpeculator([Guess((ToolCall("lookup", {"query": "wrong"}),), 0.0)])
    speculation = closed_after(Speculation([wrong]))
    started = first_turn(lambda: latch.wait_until_arrived(1))
    agent(fake, speculation, before_answer=started).compile().invoke(QUESTION)
    assert fake.statistics().num_running == 1
    latch.open()
    fake.wait_until(lambda counts: counts.num_running == 0)


def test_a_speculator_that_never_ends_is_cancelled(closed_after: Closing) -> None:
    never = GuessingSpeculator([Guess(after_s=None)] * 2)
    speculation = closed_after(Speculation([never]))
    asked = first_turn(lambda: wait_for(lambda: len(never.prompts) == 1))
    agent(FakeTool("lookup"), speculation, before_answer=asked).compile().invoke(QUESTION)
    wait_for(lambda: never.num_cancelled >= 1)
    assert outcomes(speculation) == (0, 0, 1)


@pytest.mark.parametrize("error", [ConnectionError("down"), KeyboardInterrupt()], ids=repr)
def test_the_model_fails_while_a_tool_runs(error: BaseException, closed_after: Closing) -> None:
    latch = Latch()
    fake = FakeTool("lookup", latch=latch)
    speculation = closed_after(predicting(REPLIES, after_s=0.0))

    def fail() -> None:
        latch.wait_until_arrived(1)
        raise error

    graph = agent(fake, speculation, before_answer=first_turn(fail)).compile()
    with pytest.raises(type(error)):
        graph.invoke(QUESTION)
    wait_for(lambda: speculation.statistics().num_settled_turns == 1)
    latch.open()
    fake.wait_until(lambda counts: counts.num_running == 0)
    # The next run is as good as ever.
    agent(fake, speculation, before_answer=early_run_of(speculation)).compile().invoke(QUESTION)
    assert outcomes(speculation) == (1, 0, 0)


def emitting(finished: list[str]) -> BaseTool:
    @tool
    @speculatable
    def lookup(query: str) -> str:
        """Look something up, telling about it."""
        get_stream_writer()({"begun": query})
        dispatch_custom_event("looked", {"query": query})
        finished.append(query)
        return query

    return lookup


@pytest.mark.parametrize("model_class", [ScriptedChatModel, StreamingChatModel])
@pytest.mark.parametrize("with_events", [False, True])
def test_streams_and_callbacks_are_equal(
    model_class: type[ScriptedChatModel], with_events: bool, closed_after: Closing
) -> None:
    def play(speculation: Speculation | None) -> Any:
        finished: list[str] = []
        wait = early_run_of(speculation) if speculation is not None else None
        tools = [emitting(finished)]
        model = model_class(replies=REPLIES, before_answer=wait).bind_tools(tools)
        graph = build([], tools, speculation, model=model).compile(checkpointer=InMemorySaver())
        log = CallbackLog()
        modes = ["debug", "checkpoints", "tasks", "tools"] if with_events else STREAM_MODES
        config: Any = {"callbacks": [log], "configurable": {"thread_id": "t"}}
        chunks = [plain(chunk) for chunk in graph.stream(QUESTION, config, stream_mode=modes)]
        assert finished == ["a"]
        return chunks, in_order(log.events)

    speculation = closed_after(predicting(REPLIES, after_s=0.0))
    stock, ours = play(None), play(speculation)
    assert ours == stock
    assert outcomes(speculation) == (1, 0, 0)


@pytest.mark.parametrize("handler", [True, False, "it failed", ConnectionError, (ValueError,)], ids=repr)
def test_errors(handler: Any, closed_after: Closing) -> None:
    def play(speculation: Speculation | None) -> Any:
        fake = FakeTool("lookup", error=ConnectionError("unreachable"))

        def failed() -> None:
            if speculation is not None:
                wait_for(lambda: speculation.statistics().total.num_runs_failed == 1)

        graph = agent(fake, speculation, before_answer=first_turn(failed), handle_tool_errors=handler).compile()
        try:
            return result_of(graph)
        except ConnectionError as error:
            return repr(error)

    speculation = closed_after(predicting(REPLIES, after_s=0.0))
    assert play(speculation) == play(None)
    assert outcomes(speculation) == (0, 0, 1)
    assert speculation.statistics().total.num_runs_failed == 1


def test_an_async_only_tool_behaves_as_in_stock(closed_after: Closing) -> None:
    def play(speculation: Speculation | None) -> Any:
        def considered() -> None:
            if speculation is not None:
                wait_for(lambda: speculation.statistics().total.num_skipped == 1)

        fake = FakeTool("lookup")
        tools = [speculatable(tool(fake.coroutine))]
        model = ScriptedChatModel(replies=REPLIES, before_answer=first_turn(considered)).bind_tools(tools)
        result = result_of(build([], tools, speculation, model=model, handle_tool_errors=True).compile())
        assert fake.statistics().num_started == 0
        return result

    speculation = closed_after(predicting(REPLIES, after_s=0.0))
    assert play(speculation) == play(None)
    assert speculation.statistics().num_launched == 0


def test_a_tool_with_both_paths_runs_its_sync_one(closed_after: Closing) -> None:
    from langchain_core.tools import StructuredTool

    fake = FakeTool("lookup")
    both = speculatable(
        StructuredTool.from_function(fake.function, coroutine=fake.coroutine, name="lookup", description="d")
    )
    speculation = closed_after(predicting(REPLIES, after_s=0.0))
    finished = early_run_of(speculation)
    model = ScriptedChatModel(replies=REPLIES, before_answer=finished).bind_tools([both])
    build([], [both], speculation, model=model).compile().invoke(QUESTION)
    assert outcomes(speculation) == (1, 0, 0)


def test_inside_a_running_event_loop(closed_after: Closing) -> None:
    """As in a notebook: `invoke` blocks the loop's thread, and must not need that loop."""
    fake = FakeTool("lookup")
    speculation = closed_after(predicting(REPLIES, after_s=0.0))
    finished = early_run_of(speculation)
    graph = agent(fake, speculation, before_answer=finished).compile()

    async def notebook() -> int:
        return len(graph.invoke(QUESTION)["messages"])

    assert asyncio.run(notebook()) == 4
    assert outcomes(speculation) == (1, 0, 0)


def test_a_sync_graph_inside_a_node_of_an_async_one(closed_after: Closing) -> None:
    fake = FakeTool("lookup")
    speculation = closed_after(predicting(REPLIES, after_s=0.0))
    finished = early_run_of(speculation)
    inner = agent(fake, speculation, before_answer=finished).compile()

    async def call(state: MessagesState) -> Any:
        return inner.invoke(state)

    outer = StateGraph(MessagesState)
    outer.add_node("call", call)
    outer.add_edge(START, "call")
    assert len(asyncio.run(outer.compile().ainvoke(QUESTION))["messages"]) == 4
    assert outcomes(speculation) == (1, 0, 0)


def test_an_async_graph_inside_a_node_of_a_sync_one(closed_after: Closing) -> None:
    """The inner loop is gone before the outer run ends."""
    replies = [Reply(calls=LOOK.calls, generation_s=0.05), Reply(text="done", generation_s=0.0)]
    fake = FakeTool("lookup")
    speculation = closed_after(predicting(replies, after_s=0.0))
    inner = agent(fake, speculation, replies=replies).compile()

    def call(state: MessagesState) -> Any:
        return asyncio.run(inner.ainvoke(state))

    outer = StateGraph(MessagesState)
    outer.add_node("call", call)
    outer.add_edge(START, "call")
    assert len(outer.compile().invoke(QUESTION)["messages"]) == 4
    assert outcomes(speculation) == (1, 0, 0)


def test_a_sync_node_in_an_async_graph(closed_after: Closing) -> None:
    """The model is called on an executor's thread; the turn and its tools are at home on the graph's loop."""
    fake = FakeTool("lookup")
    speculation = closed_after(predicting(REPLIES, after_s=0.0))
    finished = early_run_of(speculation)
    tools = [speculatable(tool(fake.coroutine))]
    model = ScriptedChatModel(replies=REPLIES, before_answer=finished).bind_tools(tools)

    def call(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", call)
    graph.add_node("tools", tool_node(tools, speculation))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    assert len(asyncio.run(graph.compile().ainvoke(QUESTION))["messages"]) == 4
    assert outcomes(speculation) == (1, 0, 0)
    assert fake.statistics().num_started == 1


def test_a_sync_tool_in_an_async_graph_runs_on_library_threads(closed_after: Closing) -> None:
    """A coroutine waits for the tool while the model generates: neither blocks the loop."""
    fake = FakeTool("lookup", result=lambda _: threading.current_thread().name)

    class Waiting(ScriptedChatModel):
        async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> Any:
            if len(messages) == 1:
                while speculation.statistics().total.num_runs_succeeded == 0:
                    await asyncio.sleep(0)
            return self._generate(messages)

    speculation = closed_after(predicting(REPLIES, after_s=0.0))
    result = asyncio.run(agent(fake, speculation, model_class=Waiting).compile().ainvoke(QUESTION))
    assert result["messages"][2].content == "spectool-worker"
    assert outcomes(speculation) == (1, 0, 0)


def test_many_threads_at_once_share_nothing(closed_after: Closing) -> None:
    fake = FakeTool("lookup", result=lambda arguments: f"about {arguments['query']}")

    class Echo:
        name = "echo"
        prompts: list[Any] = []  # noqa: RUF012

        async def predict(self, prompt: Any, tools: Any) -> Any:
            if len(prompt.messages) == 1:
                yield ToolCall("lookup", {"query": prompt.messages[0]["content"]})

    class Asking(ScriptedChatModel):
        def _reply(self, messages: Any) -> tuple[int, Reply]:
            if len(messages) > 1:
                return 1, DONE
            query = messages[0].content
            wait_for(lambda: any(call["query"] == query for call in fake.calls))
            return 0, Reply(calls=(Call("lookup", {"query": query}, "call_0"),))

    speculation = closed_after(Speculation([Echo()], max_concurrency=4, max_concurrency_per_tool=4, adaptive=False))
    graph = agent(fake, speculation, model_class=Asking).compile(checkpointer=InMemorySaver())
    before = threading.active_count()

    def ask(n: int) -> str:
        config: Any = {"configurable": {"thread_id": f"t{n % 3}-{n}"}}
        messages = graph.invoke({"messages": [HumanMessage(f"q{n}")]}, config)["messages"]
        return str(messages[2].content)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(32))) == [f"about q{n}" for n in range(32)]
    hits, joins, misses = outcomes(speculation)
    assert (hits + joins, misses) == (32, 0)
    assert fake.statistics().num_started == 32
    ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("spectool")]
    assert len(ours) <= 5  # four workers and the loop, whatever the number of runs
    assert threading.active_count() - before <= 5
    wait_for(lambda: len(tasks_on(speculation)) == 0)
    assert speculation.statistics().num_settled_turns == 64


def tasks_on(speculation: Speculation) -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks(speculation.background.loop)


def test_batch(closed_after: Closing) -> None:
    fake = FakeTool("lookup")
    speculation = closed_after(predicting(REPLIES, after_s=0.0))
    graph = agent(fake, speculation).compile()
    assert [len(result["messages"]) for result in graph.batch([QUESTION] * 5)] == [4] * 5
    assert sum(outcomes(speculation)) == 5
    wait_for(lambda: not tasks_on(speculation))


def test_a_human_s_answer_reaches_the_tool_that_asked(closed_after: Closing) -> None:
    asked: list[str] = []

    @tool
    @speculatable
    def lookup(query: str) -> str:
        """Ask the human."""
        asked.append(query)
        return f"{query} is {interrupt(query)}"

    speculation = closed_after(predicting(REPLIES, after_s=0.0))
    early = first_turn(lambda: wait_for(lambda: asked == ["a"]))
    model = ScriptedChatModel(replies=REPLIES, before_answer=early).bind_tools([lookup])
    graph = build([], [lookup], speculation, model=model).compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    assert graph.invoke(QUESTION, config)["__interrupt__"][0].value == "a"
    assert graph.invoke(Command(resume="fine"), config)["messages"][2].content == "a is fine"
    assert asked == ["a"] * 3
    assert speculation.statistics().tools["lookup"].num_runs_failed == 1


def test_retries_are_one_turn(closed_after: Closing) -> None:
    fake = FakeTool("lookup")
    replies = [Reply(calls=LOOK.calls, error=ConnectionError("busy")), DONE]
    speculation = closed_after(predicting(replies, after_s=0.0))
    tools = [lookup_of(fake)]
    finished = early_run_of(speculation)
    model = ScriptedChatModel(replies=replies, before_answer=finished).bind_tools(tools)
    retried = model.with_retry(wait_exponential_jitter=False)
    build([], tools, speculation, model=retried).compile().invoke(QUESTION)
    wait_for(lambda: speculation.statistics().num_settled_turns == 2)
    assert [len(prompt) for prompt in prompts_of(speculation)].count(1) == 1
    assert speculation.statistics().num_turns == 2
    assert outcomes(speculation) == (1, 0, 0)
    assert fake.statistics().num_started == 1


def test_the_background_loop_starts_again_after_a_close(closed_after: Closing) -> None:
    fake = FakeTool("lookup")
    speculation = closed_after(predicting(REPLIES, after_s=0.0))
    for num_runs in (1, 2):
        agent(fake, speculation, before_answer=early_run_of(speculation, num_runs)).compile().invoke(QUESTION)
        speculation.close()
    assert outcomes(speculation) == (2, 0, 0)


def test_closing_in_the_middle_of_a_run_is_a_miss(closed_after: Closing) -> None:
    fake = FakeTool("lookup")
    speculation = closed_after(predicting(REPLIES, after_s=0.0))

    def close() -> None:
        early_run_of(speculation)(0)
        speculation.close()

    stock = result_of(agent(FakeTool("lookup"), None).compile())
    assert result_of(agent(fake, speculation, before_answer=first_turn(close)).compile()) == stock
    assert fake.statistics().num_started == 2

"""Engine mode: the run is stock's, with fewer chat requests, against a fake of vLLM with the plugin over real HTTP."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelCallLimitMiddleware
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from langgraph._internal._runnable import RunnableCallable
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import tools_condition
from langgraph.types import Command

from spectool_core import Speculation, speculatable
from spectool_core.events import EngineUnavailable, StreamAborted
from spectool_core.testing import (
    Answer,
    DroppedConnection,
    EngineBehaviour,
    EngineServer,
    Hang,
    HttpError,
    Latch,
    LeakCheck,
    ScriptedCall,
)
from spectool_langgraph import SpeculationMiddleware, SpeculativeToolNode, speculative_model
from spectool_langgraph._engine import content_of
from spectool_langgraph._recording import Recorded
from tests.langgraph.agents import QUESTION, Seen, per_run, plain, run, tool_node
from tests.langgraph.scripted import CallbackLog
from tests.pacing import ANSWERS, FINAL, GUESSES, Pace, asks, named, quiet, speculation_of

SERVER = "m"


@dataclass
class Tools:
    """One marked tool and one that is not; how often each ran."""

    latch: Latch | None = None
    runs: list[str] = field(default_factory=list)
    broken: frozenset[str] = frozenset()

    def made(self) -> list[BaseTool]:
        @tool
        @speculatable
        async def lookup(q: str) -> str:
            """Look something up."""
            self.runs.append(q)
            if self.latch is not None:
                await self.latch.pass_through()
            if q in self.broken:
                raise ConnectionError(q)
            return f"found {q}"

        @tool
        async def note(q: str) -> str:
            """Write something down: not marked."""
            self.runs.append(f"note {q}")
            return "noted"

        return [lookup, note]


Build = Callable[[ChatOpenAI, list[BaseTool], Speculation | None], Any]


def graph(model: ChatOpenAI, tools: list[BaseTool], speculation: Speculation | None) -> Any:
    node = tool_node(tools, speculation)
    bound: Any = model.bind_tools(tools)
    if isinstance(node, SpeculativeToolNode):
        bound = speculative_model(bound, node)

    async def acall(state: MessagesState) -> dict[str, list[BaseMessage]]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    def call(state: MessagesState) -> dict[str, list[BaseMessage]]:
        return {"messages": [bound.invoke(state["messages"])]}

    made = StateGraph(MessagesState)
    made.add_node("agent", RunnableCallable(call, acall))
    made.add_node("tools", node)
    made.add_edge(START, "agent")
    made.add_conditional_edges("agent", tools_condition, ["tools", END])
    made.add_edge("tools", "agent")
    return made.compile()


def agent(
    model: ChatOpenAI, tools: list[BaseTool], speculation: Speculation | None, *further: AgentMiddleware[Any, Any]
) -> Any:
    middleware: list[Any] = [*further]
    if speculation is not None:
        middleware.append(SpeculationMiddleware(speculation))
    return create_agent(model, tools, middleware=middleware)


def counted(stream: list[Any]) -> Counter[str]:
    """What is in a stream, but for the whole states, in which messages of one step stand in order already."""
    return Counter(named(each) for each in stream if "values" not in each)


@dataclass
class Outcome:
    """All of one run."""

    seen: Seen
    runs: list[str]
    num_requests: int
    server: EngineServer
    speculation: Speculation | None
    pace: Pace

    def assert_same_as(self, stock: Outcome, *, in_order: bool = True) -> None:
        """Equal; without `in_order`, which is not stock's either where tools run at once, per event of the stream."""
        assert self.seen.error == stock.seen.error
        assert named(self.seen.messages) == named(stock.seen.messages)
        streams = [named(each.seen.stream) if in_order else counted(each.seen.stream) for each in (self, stock)]
        assert streams[0] == streams[1]
        assert named(sorted(map(repr, per_run(self.seen.callbacks)))) == named(
            sorted(map(repr, per_run(stock.seen.callbacks)))
        )


@asynccontextmanager
async def chat_model(server: EngineServer, **settings: Any) -> AsyncIterator[ChatOpenAI]:
    import httpx

    async with httpx.AsyncClient() as http_async_client:
        with httpx.Client() as http_client:
            yield ChatOpenAI(
                model=SERVER,
                base_url=server.base_url,
                api_key="key",
                http_async_client=http_async_client,
                http_client=http_client,
                stream_usage=True,
                stream_chunk_timeout=None,  # its `wait_for` loses cancellations in Python 3.11
                **{"max_retries": 0, **settings},
            )


async def outcome(
    build: Build,
    answers: Sequence[Answer],
    guesses: Sequence[Sequence[str]] | None,
    *,
    behaviour: EngineBehaviour | None = None,
    tools: Tools | None = None,
    model: dict[str, Any] | None = None,
    is_held: bool = True,
    speculation_settings: dict[str, Any] | None = None,
    during: Callable[[EngineServer, Pace], Any] | None = None,
    script: Callable[[Pace], Any] | None = None,
    **options: Any,
) -> Outcome:
    """Run one agent; stock where there are no guesses."""
    tools = tools or Tools()
    pace = Pace(answers, guesses or [], is_held=is_held and guesses is not None)
    script_of_server = pace.script if script is None else script(pace)
    async with LeakCheck(), EngineServer({SERVER: script_of_server}, behaviour) as server:
        speculation = None
        if guesses is not None:
            speculation = speculation_of(server, guesses, pace, **(speculation_settings or {}))
        async with chat_model(server, **(model or {})) as chat:
            built = build(chat, tools.made(), speculation)
            tasks = asyncio.create_task(during(server, pace)) if during is not None else None
            seen = await run(built, **options)
            if tasks is not None:
                await tasks
            if speculation is not None:
                await quiet(speculation)
            await server.until(lambda counts: counts.num_active_requests == 0)
        num_requests = server.statistics().num_requests
    return Outcome(seen, tools.runs, num_requests, server, speculation, pace)


def engine_of(outcome: Outcome) -> Any:
    assert outcome.speculation is not None
    return outcome.speculation.statistics().engine


BUILDS = pytest.mark.parametrize("build", [graph, agent])
STREAMED = pytest.mark.parametrize(
    "stream_mode", [["values", "updates", "messages", "custom"], ["values", "updates"]], ids=["streamed", "whole"]
)


@BUILDS
@STREAMED
async def test_a_run_whose_calls_all_hit_makes_one_request(build: Build, stream_mode: list[str]) -> None:
    stock = await outcome(build, ANSWERS, None, stream_mode=stream_mode)
    ours = await outcome(build, ANSWERS, GUESSES, stream_mode=stream_mode)
    ours.assert_same_as(stock)
    assert stock.num_requests == 3
    assert ours.num_requests == 1
    assert ours.runs == stock.runs == ["a", "b"]
    engine = engine_of(ours)
    assert (engine.num_outputs_posted, engine.num_injected, engine.num_attached) == (2, 2, 2)
    assert (engine.num_aborted, engine.num_unavailable) == (0, 0)
    assert ours.server.engine_statistics().num_refused_posts == 0


@BUILDS
async def test_turns_after_a_miss_are_speculated(build: Build) -> None:
    answers = [asks("a"), asks("b"), asks("c"), FINAL]
    stock = await outcome(build, answers, None)
    ours = await outcome(build, answers, [["a"], ["x"], ["c"]])
    ours.assert_same_as(stock)
    assert ours.num_requests == 2
    assert sorted(ours.runs) == ["a", "b", "c", "x"]
    assert engine_of(ours).num_attached == 2


@BUILDS
async def test_parallel_calls_are_injected_when_all_hit(build: Build) -> None:
    answers = [asks("a", "b"), asks("c", "d"), FINAL]
    stock = await outcome(build, answers, None)
    ours = await outcome(build, answers, [["a", "b"], ["c", "x"]])
    ours.assert_same_as(stock, in_order=build is graph)
    assert ours.num_requests == 2
    assert engine_of(ours).num_attached == 1


@BUILDS
async def test_a_tool_that_is_still_running_is_joined_inside_the_engine(build: Build) -> None:
    """The turn ends while the tool runs: its sequence waits, and goes on with the output."""
    answers = [asks("a"), FINAL]

    async def during(server: EngineServer, pace: Pace) -> None:
        await server.until_engine(lambda counts: counts.num_pending == 1)
        pace.latches[0].open()
        if tools.latch is not None:
            await server.until_engine(lambda counts: counts.num_parked == 1)
            tools.latch.open()
            await server.until_engine(lambda counts: counts.num_outputs == 1)
        pace.open()

    stock = await outcome(build, answers, None)
    tools = Tools(latch=Latch())
    ours = await outcome(build, answers, [["a"]], tools=tools, during=during, behaviour=EngineBehaviour(hold_s=30.0))
    ours.assert_same_as(stock)
    assert ours.num_requests == 1
    assert tools.runs == ["a"]
    assert engine_of(ours).num_attached == 1


@BUILDS
async def test_a_joined_tool_that_fails_is_withdrawn_and_run_as_usual(build: Build) -> None:
    answers = [asks("a"), FINAL]
    tools = Tools(latch=Latch(), broken=frozenset("a"))

    async def during(server: EngineServer, pace: Pace) -> None:
        await server.until_engine(lambda counts: counts.num_pending == 1)
        pace.open()
        await server.until_engine(lambda counts: counts.num_parked == 1)
        assert tools.latch is not None
        tools.latch.open()

    stock = await outcome(build, answers, None, tools=Tools(broken=frozenset("a")))
    ours = await outcome(build, answers, [["a"]], tools=tools, during=during, behaviour=EngineBehaviour(hold_s=30.0))
    ours.assert_same_as(stock)
    assert ours.seen.error == "ConnectionError('a')"
    assert ours.server.engine_statistics().num_withdrawn == 1
    assert engine_of(ours).num_injected == 0


@dataclass(frozen=True)
class Said:
    """A turn of a generated run: what the model asks for, and what was guessed."""

    calls: tuple[tuple[str, str], ...]
    guesses: tuple[str, ...]
    text: str

    @property
    def is_injected(self) -> bool:
        return all(name == "lookup" and query in self.guesses for name, query in self.calls)

    def answer(self, turn: int) -> Answer:
        calls = [
            ScriptedCall(name, {"q": query}, f"call_{turn}_{number}") for number, (name, query) in enumerate(self.calls)
        ]
        return Answer(text=self.text, tool_calls=calls)


QUERIES = st.sampled_from(["a", "b", "c"])
SAID = st.builds(
    Said,
    calls=st.lists(
        st.one_of(*[st.tuples(st.just("lookup"), QUERIES)] * 4, st.just(("note", "n"))), min_size=1, max_size=3
    ).map(tuple),
    guesses=st.lists(QUERIES, max_size=3, unique=True).map(tuple),
    text=st.sampled_from(["", "let me see: ünï"]),
)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(SAID, min_size=1, max_size=4), st.sampled_from([graph, agent]), st.booleans())
def test_generated_runs(said: list[Said], build: Build, is_streamed: bool) -> None:
    answers = [*(each.answer(turn) for turn, each in enumerate(said)), FINAL]
    modes = ["values", "updates", "messages", "custom"] if is_streamed else ["values", "updates"]

    async def check() -> None:
        stock = await outcome(build, answers, None, stream_mode=modes)
        ours = await outcome(build, answers, [each.guesses for each in said], stream_mode=modes)
        ours.assert_same_as(stock, in_order=all(len(each.calls) == 1 for each in said))
        num_injected = sum(each.is_injected for each in said)
        assert stock.num_requests == len(answers)
        assert ours.num_requests == len(answers) - num_injected
        assert (engine_of(ours).num_injected, engine_of(ours).num_attached) == (num_injected, num_injected)
        assert (engine_of(ours).num_aborted, engine_of(ours).num_unavailable) == (0, 0)
        if all(each.is_injected for each in said):
            assert len(ours.runs) == sum(len(each.guesses) for each in said)
        assert ours.server.engine_statistics().num_refused_posts == 0

    asyncio.run(check())


class Trims(AgentMiddleware[Any, Any]):
    """Changes what the model is asked after the first turn."""

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        if len(request.messages) > 1:
            request = request.override(messages=[HumanMessage("shorter", id="human"), *request.messages[1:]])
        return await handler(request)


async def test_a_changed_prompt_aborts_the_stream_and_is_sent_as_usual() -> None:
    def build(model: ChatOpenAI, tools: list[BaseTool], speculation: Speculation | None) -> Any:
        return agent(model, tools, speculation, Trims())

    stock = await outcome(build, ANSWERS, None)
    ours = await outcome(build, ANSWERS, GUESSES)
    ours.assert_same_as(stock)
    assert ours.num_requests == 2  # the second differs from the first; the third is what follows the second
    assert [event.reason for event in ours.pace.of(StreamAborted)] == ["different_request"]
    assert engine_of(ours).num_attached == 1
    assert ours.server.statistics().num_cancelled_requests == 1


async def test_a_limit_ends_the_run_and_its_stream() -> None:
    def build(model: ChatOpenAI, tools: list[BaseTool], speculation: Speculation | None) -> Any:
        return agent(model, tools, speculation, ModelCallLimitMiddleware(run_limit=1, exit_behavior="end"))

    stock = await outcome(build, ANSWERS, None)
    ours = await outcome(build, ANSWERS, GUESSES)
    ours.assert_same_as(stock)
    assert [event.reason for event in ours.pace.of(StreamAborted)] == ["run_ended"]
    assert engine_of(ours).num_attached == 0


async def test_parameters_that_change_between_turns() -> None:
    class Warms(AgentMiddleware[Any, Any]):
        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return await handler(request.override(model_settings={"temperature": 0.1 * len(request.messages)}))

    def build(model: ChatOpenAI, tools: list[BaseTool], speculation: Speculation | None) -> Any:
        return agent(model, tools, speculation, Warms())

    stock = await outcome(build, ANSWERS, None)
    ours = await outcome(build, ANSWERS, GUESSES)
    ours.assert_same_as(stock)
    assert ours.num_requests == 3
    assert engine_of(ours).num_aborted == 2


async def test_a_changed_tool_result_is_another_request() -> None:
    class Shouts(AgentMiddleware[Any, Any]):
        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            message = await handler(request)
            return message.model_copy(update={"content": message.content.upper()})

    def build(model: ChatOpenAI, tools: list[BaseTool], speculation: Speculation | None) -> Any:
        return agent(model, tools, speculation, Shouts())

    stock = await outcome(build, ANSWERS, None)
    ours = await outcome(build, ANSWERS, GUESSES)
    ours.assert_same_as(stock)
    assert ours.num_requests == 3
    assert engine_of(ours).num_injected == 2
    assert engine_of(ours).num_attached == 0


def injected_late(latch: Latch) -> EngineBehaviour:
    return EngineBehaviour(before_injected=latch)


@BUILDS
async def test_the_next_call_waits_for_word_of_what_was_injected(build: Build) -> None:
    latch = Latch()

    async def during(server: EngineServer, pace: Pace) -> None:
        await latch.until_arrived(1)
        latch.open()

    stock = await outcome(build, ANSWERS, None)
    ours = await outcome(build, ANSWERS, GUESSES, behaviour=injected_late(latch), during=during)
    ours.assert_same_as(stock)
    assert ours.num_requests == 1


def wrong(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*messages[:-1], {**messages[-1], "content": "something else"}]


FAULTS = {
    "plugin absent": (EngineBehaviour(is_installed=False), "plugin_absent", 3),
    "posts refused 404": (EngineBehaviour(post_status=404), "post_refused", 3),
    "posts refused 413": (EngineBehaviour(post_status=413), "post_refused", 3),
    "posts refused 503": (EngineBehaviour(post_status=503), "post_refused", 3),
    "no JSON": (EngineBehaviour(injected=lambda _: "{"), "malformed", 3),
    "no messages": (EngineBehaviour(injected=lambda _: '{"turn": 1}'), "malformed", 3),
    "messages that are none": (EngineBehaviour(injected=lambda _: '{"messages": [1, 2]}'), "malformed", 3),
    "another continuation": (EngineBehaviour(injected=wrong), None, 3),
}


@BUILDS
@pytest.mark.parametrize("fault", FAULTS)
async def test_trouble_with_the_engine_is_client_mode(
    build: Build, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    behaviour, reason, num_requests = FAULTS[fault]
    stock = await outcome(build, ANSWERS, None)

    async def during(server: EngineServer, pace: Pace) -> None:
        if not behaviour.is_installed:
            pace.open()
        elif behaviour.post_status is not None:
            await server.until_engine(lambda counts: counts.num_refused_posts >= 1)
            pace.open()

    ours = await outcome(build, ANSWERS, GUESSES, behaviour=behaviour, during=during)
    ours.assert_same_as(stock)
    assert ours.num_requests == num_requests
    assert ours.runs == ["a", "b"]  # each once: hits of client mode
    assert engine_of(ours).num_attached == 0
    reasons = {event.reason for event in ours.pace.of(EngineUnavailable)}
    assert reasons == ({reason} if reason is not None else set())
    assert {event.status for event in ours.pace.of(EngineUnavailable)} <= {behaviour.post_status}
    assert len([record for record in caplog.records if "engine mode" in record.message]) == len(reasons)


@BUILDS
@STREAMED
async def test_a_stream_cut_before_the_second_turn_is_replaced(build: Build, stream_mode: list[str]) -> None:
    """The engine is killed after it went on, and is there again: nothing of the second turn had been seen."""
    cut = Answer(text=FINAL.text, fault=DroppedConnection("before_headers"))
    stock = await outcome(build, [asks("a"), FINAL], None, stream_mode=stream_mode)

    def whole_the_second_time(pace: Pace) -> Any:
        answers = iter([cut, FINAL])
        return lambda request: pace.script[0] if request.turn == 0 else next(answers)

    ours = await outcome(build, [asks("a"), FINAL], [["a"]], stream_mode=stream_mode, script=whole_the_second_time)
    ours.assert_same_as(stock)
    assert ours.num_requests == 2
    assert [event.reason for event in ours.pace.of(EngineUnavailable)] == ["cut"]


@BUILDS
async def test_a_stream_cut_within_the_second_turn_is_the_error_that_stock_sees(build: Build) -> None:
    answers = [asks("a"), Answer(text=FINAL.text, fault=DroppedConnection("mid_body"))]
    stock = await outcome(build, answers, None)
    ours = await outcome(build, answers, [["a"]])
    ours.assert_same_as(stock)
    assert stock.seen.error is not None
    assert ours.num_requests == 1


@BUILDS
async def test_a_first_turn_that_fails_is_the_error_that_stock_sees(build: Build) -> None:
    for fault in (DroppedConnection("before_headers"), DroppedConnection("mid_body"), HttpError(503), HttpError(400)):
        answers = [Answer(text=FINAL.text, fault=fault)]
        stock = await outcome(build, answers, None)
        ours = await outcome(build, answers, [[]])
        ours.assert_same_as(stock)
        assert stock.seen.error is not None


@BUILDS
@pytest.mark.parametrize("stage", ["first turn", "tool", "second turn"])
async def test_a_run_that_is_cancelled_leaves_nothing(build: Build, stage: str) -> None:
    hang = {"first turn": 0, "second turn": 1}.get(stage)
    answers = [asks("a"), FINAL]
    if hang is not None:
        answers[hang] = Answer(text=FINAL.text, tool_calls=answers[hang].tool_calls, fault=Hang("mid_body"))
    tools = Tools(latch=Latch() if stage == "tool" else None)
    pace = Pace(answers, [["a"]], is_held=True)
    async with LeakCheck(), EngineServer({SERVER: pace.script}, EngineBehaviour(hold_s=30.0)) as server:
        speculation = speculation_of(server, [["a"]], pace)
        async with chat_model(server) as chat:
            running = asyncio.create_task(run(build(chat, tools.made(), speculation)))
            if stage == "tool":
                assert tools.latch is not None
                await tools.latch.until_arrived(1)
                await server.until_engine(lambda counts: counts.num_pending == 1)
                pace.open()
                await server.until_engine(lambda counts: counts.num_parked == 1)
            else:
                await server.until_engine(lambda counts: counts.num_injected == hang)
                await server.until(lambda counts: counts.num_active_requests == 1)
                pace.open()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            counts = await server.until(lambda counts: counts.num_active_requests == 0)
            assert counts.num_cancelled_requests == 1
            await quiet(speculation)


@BUILDS
async def test_runs_at_once_of_one_graph_do_not_meet(build: Build) -> None:
    async def results(is_ours: bool) -> tuple[list[str], int, Any]:
        pace = Pace(ANSWERS, GUESSES, is_held=False)
        async with LeakCheck(), EngineServer({SERVER: pace.script}) as server:
            speculation = speculation_of(server, GUESSES, pace) if is_ours else None
            async with chat_model(server) as chat:
                built = build(chat, Tools().made(), speculation)
                seen = await asyncio.gather(*(run(built) for _ in range(8)))
                if speculation is not None:
                    await quiet(speculation)
            statistics = speculation.statistics().engine if speculation is not None else None
            return [named(one.messages) for one in seen], server.statistics().num_requests, statistics

    stock, num_stock_requests, _ = await results(is_ours=False)
    ours, num_requests, engine = await results(is_ours=True)
    assert ours == stock
    assert num_requests == num_stock_requests - engine.num_attached


async def test_agents_that_work_at_once_in_one_run_read_their_own_streams() -> None:
    async def result(*, is_ours: bool) -> tuple[str, int, Any]:
        latch = Latch()
        script = {task: [replace(asks(task), latch=latch), replace(FINAL, text=f"{task}!")] for task in ("a", "b")}
        async with LeakCheck(), EngineServer({SERVER: script}) as server:
            speculation = None
            if is_ours:
                speculation = speculation_of(server, [["a", "b"]])
            async with chat_model(server) as chat:
                worker = agent(chat, Tools().made(), speculation)

                async def work(state: MessagesState, task: str) -> dict[str, list[BaseMessage]]:
                    found = await worker.ainvoke({"messages": [HumanMessage(task, id=task)]})
                    return {"messages": [HumanMessage(found["messages"][-1].text, id=f"said {task}")]}

                made = StateGraph(MessagesState)
                for task in script:
                    made.add_node(task, partial(work, task=task))
                    made.add_edge(START, task)
                running = asyncio.create_task(made.compile().ainvoke({"messages": []}))
                if is_ours:
                    await server.until_engine(lambda counts: counts.num_outputs == 4)
                latch.open()
                found = await running
                if speculation is not None:
                    await quiet(speculation)
                await server.until(lambda counts: counts.num_active_requests == 0)
            statistics = speculation.statistics().engine if speculation is not None else None
            return named(found), server.statistics().num_requests, statistics

    stock, num_stock_requests, _ = await result(is_ours=False)
    ours, num_requests, engine = await result(is_ours=True)
    assert ours == stock
    assert (num_requests, num_stock_requests) == (2, 4)
    assert (engine.num_attached, engine.num_aborted) == (2, 0)


@BUILDS
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_sync_runs(build: Build, is_streamed: bool) -> None:
    async def result(guesses: list[list[str]] | None) -> tuple[Any, int, Any]:
        pace = Pace(ANSWERS, guesses or [], is_held=guesses is not None)

        @tool
        @speculatable
        def lookup(q: str) -> str:
            """Look something up."""
            return f"found {q}"

        async with EngineServer({SERVER: pace.script}) as server:
            speculation = speculation_of(server, guesses, pace) if guesses is not None else None
            async with chat_model(server) as chat:
                built, log = build(chat, [lookup], speculation), CallbackLog()
                config: Any = {"callbacks": [log]}

                def seen() -> Any:
                    if is_streamed:
                        return list(built.stream(QUESTION, config, stream_mode=["messages", "updates"]))
                    return built.invoke(QUESTION, config)

                found = await asyncio.to_thread(seen)
                await server.until(lambda counts: counts.num_active_requests == 0)
            engine = None
            if speculation is not None:
                engine = speculation.statistics().engine
                await quiet(speculation)
                await asyncio.to_thread(speculation.close)
            return (named(plain(found)), named(sorted(map(repr, per_run(log.events))))), server, engine

    stock, server, _ = await result(None)
    assert server.statistics().num_requests == 3
    ours, server, engine = await result(GUESSES)
    assert ours == stock
    assert server.statistics().num_requests == 1
    assert engine.num_attached == 2


@BUILDS
@pytest.mark.parametrize("mode", ["off", "shadow"])
async def test_without_speculation_requests_are_untouched(build: Build, mode: str) -> None:
    stock = await outcome(build, ANSWERS, None)
    ours = await outcome(build, ANSWERS, GUESSES, speculation_settings={"mode": mode}, is_held=False)
    ours.assert_same_as(stock)
    assert ours.num_requests == 3
    assert ours.server.engine_statistics().num_responses == 0
    assert not any("x-spectool-turns" in request.headers for request in ours.server.requests)


async def test_a_model_that_is_served_elsewhere_is_client_mode(caplog: pytest.LogCaptureFixture) -> None:
    stock = await outcome(graph, ANSWERS, None)
    elsewhere = {"engine_url": "http://127.0.0.1:9/v1"}
    ours = await outcome(graph, ANSWERS, GUESSES, speculation_settings=elsewhere, is_held=False)
    ours.assert_same_as(stock)
    assert {event.reason for event in ours.pace.of(EngineUnavailable)} == {"other_url"}
    assert ours.runs == ["a", "b"]
    assert len(caplog.records) == 1


async def test_a_graph_whose_model_was_not_made_speculative_is_client_mode() -> None:
    def build(model: ChatOpenAI, tools: list[BaseTool], speculation: Speculation | None) -> Any:
        bound = model.bind_tools(tools)

        async def call(state: MessagesState) -> dict[str, list[BaseMessage]]:
            return {"messages": [await bound.ainvoke(state["messages"])]}

        made = StateGraph(MessagesState)
        made.add_node("agent", call)
        made.add_node("tools", tool_node(tools, speculation))
        made.add_edge(START, "agent")
        made.add_conditional_edges("agent", tools_condition, ["tools", END])
        made.add_edge("tools", "agent")
        return made.compile()

    stock = await outcome(build, ANSWERS, None)
    ours = await outcome(build, ANSWERS, GUESSES, is_held=False)
    ours.assert_same_as(stock)
    assert {event.reason for event in ours.pace.of(EngineUnavailable)} == {"request_not_seen"}


class Budgeted(ChatOpenAI):
    """A user's own class, with state of its own."""

    left: int = 2

    async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
        if not self.left:
            raise RuntimeError("the budget is used up")
        self.left -= 1
        return await super()._agenerate(*args, **kwargs)


class Heard:
    """A wrapper around what a model asks, as those of tracing libraries."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.num_asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def create(self, **body: Any) -> Any:
        self.num_asked += 1
        return await self.inner.create(**body)

    @property
    def with_raw_response(self) -> Any:
        self.num_asked += 1
        return self.inner.with_raw_response


async def test_a_model_keeps_its_state_and_what_is_around_its_client() -> None:
    def build(model: ChatOpenAI, tools: list[BaseTool], speculation: Speculation | None) -> Any:
        clients = {name: getattr(model, name) for name in ("http_client", "http_async_client")}
        own = Budgeted(model=SERVER, base_url=model.openai_api_base, api_key="key", max_retries=0, **clients)
        own.async_client = heard = Heard(own.async_client)
        made.append((own, heard))
        return agent(own, tools, speculation)

    made: list[tuple[Budgeted, Heard]] = []
    stock = await outcome(build, ANSWERS, None, stream_mode=["values"])
    ours = await outcome(build, ANSWERS, GUESSES, stream_mode=["values"])
    assert "the budget is used up" in str(stock.seen.error)
    ours.assert_same_as(stock)
    assert [(own.left, heard.num_asked) for own, heard in made] == [(0, 2)] * 2
    assert (stock.num_requests, ours.num_requests) == (2, 1)


class Hidden(ChatOpenAI):
    """A user's own class, which gives no one its client."""

    def __getattribute__(self, name: str) -> Any:
        if name == "root_async_client" and is_made.get():
            raise RuntimeError("not for you")
        return super().__getattribute__(name)


is_made: ContextVar[bool] = ContextVar("is_made", default=False)


async def test_a_model_that_cannot_be_followed_is_client_mode() -> None:
    def build(model: ChatOpenAI, tools: list[BaseTool], speculation: Speculation | None) -> Any:
        clients = {name: getattr(model, name) for name in ("http_client", "http_async_client")}
        base_url = str(model.openai_api_base)
        is_made.set(False)
        own = Hidden(
            model=SERVER, base_url=base_url, api_key="key", stream_chunk_timeout=None, max_retries=0, **clients
        )
        is_made.set(True)
        return agent(own, tools, speculation)

    stock = await outcome(build, ANSWERS, None)
    ours = await outcome(build, ANSWERS, GUESSES, is_held=False)
    ours.assert_same_as(stock)
    assert ours.runs == ["a", "b"]
    assert {event.reason for event in ours.pace.of(EngineUnavailable)} == {"request_not_seen"}


async def test_the_users_model_is_not_changed() -> None:
    async with EngineServer({SERVER: FINAL}) as server, chat_model(server) as chat:
        speculation = speculation_of(server, [])
        before = dict(chat.__dict__)
        copied = speculative_model(chat, SpeculativeToolNode(Tools().made(), speculation))
        assert type(copied) is type(chat)
        assert chat.__dict__ == before
        assert copied.root_async_client is chat.root_async_client


def contents() -> list[tuple[Any, str, str | None]]:
    return [
        ("text", "content", "text"),
        ({"k": [1, "ä"]}, "content", '{"k": [1, "ä"]}'),
        (None, "content", "null"),
        ([{"type": "text", "text": "block"}], "content", None),
        (("text", {"artifact": 1}), "content_and_artifact", "text"),
        ("no pair", "content_and_artifact", None),
        (ToolMessage("made", tool_call_id="x"), "content", "made"),
        (Command(update={}), "content", None),
        (AIMessage("an answer"), "content", str(AIMessage("an answer"))),
    ]


@pytest.mark.parametrize(("value", "response_format", "expected"), contents())
async def test_the_content_of_a_tool_message_is_what_the_tool_node_makes(
    value: Any, response_format: Any, expected: str | None
) -> None:
    @tool(response_format=response_format)
    async def lookup(q: str) -> Any:
        """Look something up."""
        return value

    content = content_of(lookup, Recorded(value, ()))
    if isinstance(value, AIMessage):
        expected = content
    assert content == expected
    if content is not None and not isinstance(value, ToolMessage):
        asked = AIMessage("", tool_calls=[{"name": "lookup", "args": {"q": "a"}, "id": "call"}])
        made = StateGraph(MessagesState).add_node("tools", tool_node([lookup], None)).add_edge(START, "tools").compile()
        *_, message = (await made.ainvoke({"messages": [asked]}))["messages"]
        assert message.content == content

"""Engine mode: the run is stock's, with fewer chat requests, against a fake of vLLM with the plugin over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.core.base.llms.types import ImageBlock, TextBlock
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.tools import BaseTool, FunctionTool, ToolOutput
from llama_index.llms.openai import OpenAI

from spectool_core import Speculation, mark
from spectool_core.events import EngineUnavailable, StreamAborted
from spectool_core.testing import (
    Answer,
    DroppedConnection,
    EngineBehaviour,
    EngineServer,
    Hang,
    Latch,
    LeakCheck,
    ScriptedCall,
)
from spectool_llamaindex import SpeculativeAgent, SpeculativeFunctionAgent, SpeculativeReActAgent, speculate
from spectool_llamaindex._binding import ToolBinding
from spectool_llamaindex._isolation import Recorded
from tests.llamaindex.recording import Names
from tests.pacing import ANSWERS, FINAL, GUESSES, Pace, asks, named, quiet, speculation_of

MODEL = "gpt-4o-mini"


@dataclass
class Tools:
    """One marked tool and one that is not; how often each ran."""

    latch: Latch | None = None
    runs: list[str] = field(default_factory=list)
    broken: frozenset[str] = frozenset()

    def made(self) -> list[BaseTool]:
        async def lookup(q: str) -> str:
            """Look something up."""
            self.runs.append(q)
            if self.latch is not None:
                await self.latch.pass_through()
            if q in self.broken:
                raise ConnectionError(q)
            return f"found {q}"

        async def note(q: str) -> str:
            """Write something down: not marked."""
            self.runs.append(f"note {q}")
            return "noted"

        tools: list[BaseTool] = [FunctionTool.from_defaults(async_fn=each) for each in (lookup, note)]
        mark(tools, names=["lookup"])
        return tools


Build = Callable[..., Any]


def alone(llm: OpenAI, tools: list[BaseTool], speculation: Speculation | None, *, streaming: bool = True) -> Any:
    if speculation is None:
        return FunctionAgent(llm=llm, tools=tools, streaming=streaming)
    return SpeculativeFunctionAgent(llm=llm, tools=tools, streaming=streaming, speculation=speculation)


def workflow(llm: OpenAI, tools: list[BaseTool], speculation: Speculation | None, *, streaming: bool = True) -> Any:
    made = AgentWorkflow(agents=[FunctionAgent(name="one", llm=llm, tools=tools, streaming=streaming)])
    return made if speculation is None else speculate(made, speculation)


@dataclass
class Outcome:
    """All of one run."""

    events: list[Any]
    result: Any
    error: str | None
    memory: list[Any]
    runs: list[str]
    num_requests: int
    server: EngineServer
    speculation: Speculation | None
    pace: Pace

    def assert_same_as(self, stock: Outcome) -> None:
        for name in ("error", "result", "memory", "events"):
            assert named(getattr(self, name)) == named(getattr(stock, name)), name

    @property
    def engine(self) -> Any:
        assert self.speculation is not None
        return self.speculation.statistics().engine


@asynccontextmanager
async def language_model(server: EngineServer, **settings: Any) -> AsyncIterator[OpenAI]:
    async with httpx.AsyncClient() as client:
        yield OpenAI(
            model=MODEL, api_base=server.base_url, api_key="key", max_retries=0, async_http_client=client, **settings
        )


async def outcome(
    build: Build,
    answers: Sequence[Answer],
    guesses: Sequence[Sequence[str]] | None,
    *,
    streaming: bool = True,
    behaviour: EngineBehaviour | None = None,
    tools: Tools | None = None,
    speculation_settings: dict[str, Any] | None = None,
    script: Callable[[Pace], Any] | None = None,
    during: Callable[[EngineServer, Pace, Any], Any] | None = None,
    is_held: bool = True,
    **options: Any,
) -> Outcome:
    """Run one agent; stock where there are no guesses."""
    tools, names = tools or Tools(), Names()
    pace = Pace(answers, guesses or [], is_held=is_held and guesses is not None)
    result, error = None, None
    async with LeakCheck(), EngineServer({MODEL: script(pace) if script else pace.script}, behaviour) as server:
        speculation = None
        if guesses is not None:
            speculation = speculation_of(server, guesses, pace, **(speculation_settings or {}))
        async with language_model(server) as llm:
            handler = build(llm, tools.made(), speculation, streaming=streaming).run(user_msg="go", **options)
            task = asyncio.create_task(during(server, pace, handler)) if during is not None else None
            events = [names.plain(event) async for event in handler.stream_events()]
            try:
                result = names.plain(await handler)
            except (Exception, asyncio.CancelledError) as exc:
                error = repr(exc)
            if task is not None:
                await task
            memory = await handler.ctx.store.get("memory", default=None)
            messages = [names.plain(message) for message in memory.get_all()] if memory is not None else []
            await asyncio.sleep(0)
            if speculation is not None:
                await quiet(speculation)
            await server.until(lambda counts: counts.num_active_requests == 0)
        num_requests = server.statistics().num_requests
    return Outcome(events, result, error, messages, tools.runs, num_requests, server, speculation, pace)


BUILDS = pytest.mark.parametrize("build", [alone, workflow])
STREAMED = pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])


@BUILDS
@STREAMED
async def test_a_run_whose_calls_all_hit_makes_one_request(build: Build, streaming: bool) -> None:
    stock = await outcome(build, ANSWERS, None, streaming=streaming)
    ours = await outcome(build, ANSWERS, GUESSES, streaming=streaming)
    ours.assert_same_as(stock)
    assert stock.num_requests == 3
    assert ours.num_requests == 1
    assert ours.runs == stock.runs == ["a", "b"]
    assert (ours.engine.num_outputs_posted, ours.engine.num_injected, ours.engine.num_attached) == (2, 2, 2)
    assert (ours.engine.num_aborted, ours.engine.num_unavailable) == (0, 0)


@BUILDS
async def test_turns_after_a_miss_are_speculated(build: Build) -> None:
    answers = [asks("a"), asks("b"), asks("c"), FINAL]
    stock = await outcome(build, answers, None)
    ours = await outcome(build, answers, [["a"], ["x"], ["c"]])
    ours.assert_same_as(stock)
    assert ours.num_requests == 2
    assert sorted(ours.runs) == ["a", "b", "c", "x"]
    assert ours.engine.num_attached == 2


@BUILDS
async def test_a_write_in_the_same_answer_is_never_injected(build: Build) -> None:
    both = Answer(tool_calls=[*asks("a").tool_calls, *asks("w", name="note").tool_calls])
    stock = await outcome(build, [both, FINAL], None, early_stopping_method="force")
    ours = await outcome(build, [both, FINAL], [["a"]], early_stopping_method="force")
    assert ours.num_requests == stock.num_requests == 2
    assert named(ours.result) == named(stock.result)
    assert ours.engine.num_injected == 0


@BUILDS
async def test_a_tool_that_is_still_running_is_joined_inside_the_engine(build: Build) -> None:
    tools = Tools(latch=Latch())

    async def during(server: EngineServer, pace: Pace, handler: Any) -> None:
        await server.until_engine(lambda counts: counts.num_pending == 1)
        pace.latches[0].open()
        await server.until_engine(lambda counts: counts.num_parked == 1)
        assert tools.latch is not None
        tools.latch.open()
        await server.until_engine(lambda counts: counts.num_outputs == 1)
        pace.open()

    stock = await outcome(build, [asks("a"), FINAL], None)
    behaviour = EngineBehaviour(hold_s=30.0)
    ours = await outcome(build, [asks("a"), FINAL], [["a"]], tools=tools, during=during, behaviour=behaviour)
    ours.assert_same_as(stock)
    assert ours.num_requests == 1
    assert tools.runs == ["a"]


@BUILDS
async def test_a_joined_tool_that_fails_is_withdrawn_and_run_as_usual(build: Build) -> None:
    tools = Tools(latch=Latch(), broken=frozenset("a"))

    async def during(server: EngineServer, pace: Pace, handler: Any) -> None:
        await server.until_engine(lambda counts: counts.num_pending == 1)
        pace.open()
        await server.until_engine(lambda counts: counts.num_parked == 1)
        assert tools.latch is not None
        tools.latch.open()

    stock = await outcome(build, [asks("a"), FINAL], None, tools=Tools(broken=frozenset("a")))
    behaviour = EngineBehaviour(hold_s=30.0)
    ours = await outcome(build, [asks("a"), FINAL], [["a"]], tools=tools, during=during, behaviour=behaviour)
    ours.assert_same_as(stock)
    assert tools.runs == ["a", "a"]
    assert ours.num_requests == 2
    assert ours.server.engine_statistics().num_withdrawn == 1


async def test_a_handoff_between_agents() -> None:
    """Each agent reads the streams of its own calls."""

    def build(llm: OpenAI, tools: list[BaseTool], speculation: Speculation | None, *, streaming: bool) -> Any:
        agents = [
            FunctionAgent(name=name, description=f"The {name}.", llm=llm, tools=tools, streaming=streaming)
            for name in ("front", "back")
        ]
        made = AgentWorkflow(agents=agents, root_agent="front")
        return made if speculation is None else speculate(made, speculation)

    handoff = ScriptedCall("handoff", {"to_agent": "back", "reason": "it knows"}, "call_h")
    answers = [asks("a"), Answer(tool_calls=[handoff]), asks("b"), FINAL]
    stock = await outcome(build, answers, None)
    ours = await outcome(build, answers, [["a"], [], ["b"]])
    ours.assert_same_as(stock)
    assert (ours.num_requests, stock.num_requests) == (2, 4)
    assert (ours.engine.num_attached, ours.engine.num_unavailable) == (2, 0)
    # That of the handoff, which nobody looked at again, had come to its end.
    assert [event.reason for event in ours.pace.of(StreamAborted)] == ["run_ended"]
    assert ours.server.statistics().num_cancelled_requests == 0


SINGLE = st.sampled_from(["a", "b", "c"])


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(SINGLE, st.lists(SINGLE, max_size=2, unique=True)), min_size=1, max_size=4),
    st.sampled_from([alone, workflow]),
    st.booleans(),
)
def test_generated_runs(said: list[tuple[str, list[str]]], build: Build, streaming: bool) -> None:
    answers = [
        Answer(tool_calls=[ScriptedCall("lookup", {"q": query}, f"call_{turn}")])
        for turn, (query, _) in enumerate(said)
    ]
    guesses = [guessed for _, guessed in said]

    async def check() -> None:
        stock = await outcome(build, [*answers, FINAL], None, streaming=streaming)
        ours = await outcome(build, [*answers, FINAL], guesses, streaming=streaming)
        ours.assert_same_as(stock)
        num_injected = sum(query in guessed for query, guessed in said)
        assert stock.num_requests == len(answers) + 1
        assert ours.num_requests == len(answers) + 1 - num_injected
        assert (ours.engine.num_injected, ours.engine.num_attached) == (num_injected, num_injected)
        assert (ours.engine.num_aborted, ours.engine.num_unavailable) == (0, 0)
        assert len(ours.runs) == sum(len({query, *guessed}) for query, guessed in said)

    asyncio.run(check())


@BUILDS
async def test_max_iterations_end_the_run_and_its_stream(build: Build) -> None:
    options = {"max_iterations": 2, "early_stopping_method": "force"}
    stock = await outcome(build, ANSWERS, None, **options)
    ours = await outcome(build, ANSWERS, GUESSES, **options)
    ours.assert_same_as(stock)
    assert stock.error is not None
    assert [event.reason for event in ours.pace.of(StreamAborted)] == ["run_ended"]


def wrong(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*messages[:-1], {**messages[-1], "content": "something else"}]


FAULTS = {
    "plugin absent": (EngineBehaviour(is_installed=False), "plugin_absent"),
    "posts refused 404": (EngineBehaviour(post_status=404), "post_refused"),
    "posts refused 422": (EngineBehaviour(post_status=422), "post_refused"),
    "posts refused 503": (EngineBehaviour(post_status=503), "post_refused"),
    "malformed": (EngineBehaviour(injected=lambda _: "{"), "malformed"),
    "another continuation": (EngineBehaviour(injected=wrong), None),
}


@BUILDS
@pytest.mark.parametrize("fault", FAULTS)
async def test_trouble_with_the_engine_is_client_mode(
    build: Build, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    behaviour, reason = FAULTS[fault]

    async def during(server: EngineServer, pace: Pace, handler: Any) -> None:
        if not behaviour.is_installed:
            pace.open()
        elif behaviour.post_status is not None:
            await server.until_engine(lambda counts: counts.num_refused_posts >= 1)
            pace.open()

    stock = await outcome(build, ANSWERS, None)
    ours = await outcome(build, ANSWERS, GUESSES, behaviour=behaviour, during=during)
    ours.assert_same_as(stock)
    assert ours.num_requests == 3
    assert ours.runs == ["a", "b"]
    reasons = {event.reason for event in ours.pace.of(EngineUnavailable)}
    assert reasons == ({reason} if reason is not None else set())
    assert {event.status for event in ours.pace.of(EngineUnavailable)} <= {behaviour.post_status}
    assert len([record for record in caplog.records if "engine mode" in record.message]) == len(reasons)


@BUILDS
@STREAMED
async def test_a_stream_cut_before_the_second_turn_is_replaced(build: Build, streaming: bool) -> None:
    cut = Answer(text=FINAL.text, fault=DroppedConnection("before_headers"))

    def whole_the_second_time(pace: Pace) -> Any:
        answers = iter([cut, FINAL])
        return lambda request: pace.script[0] if request.turn == 0 else next(answers)

    stock = await outcome(build, [asks("a"), FINAL], None, streaming=streaming)
    ours = await outcome(build, [asks("a"), FINAL], [["a"]], streaming=streaming, script=whole_the_second_time)
    ours.assert_same_as(stock)
    assert ours.num_requests == 2
    assert [event.reason for event in ours.pace.of(EngineUnavailable)] == ["cut"]


@BUILDS
async def test_a_stream_cut_within_the_second_turn_is_the_error_that_stock_sees(build: Build) -> None:
    answers = [asks("a"), Answer(text=FINAL.text, fault=DroppedConnection("mid_body"))]
    stock = await outcome(build, answers, None)
    ours = await outcome(build, answers, [["a"]])
    ours.assert_same_as(stock)
    assert stock.error is not None
    assert ours.num_requests == 1


@BUILDS
@pytest.mark.parametrize("stage", ["first turn", "tool", "second turn"])
async def test_a_run_that_is_cancelled_leaves_nothing(build: Build, stage: str) -> None:
    answers = [asks("a"), FINAL]
    hang = {"first turn": 0, "second turn": 1}.get(stage)
    if hang is not None:
        answers[hang] = Answer(text=FINAL.text, tool_calls=answers[hang].tool_calls, fault=Hang("mid_body"))
    tools = Tools(latch=Latch() if stage == "tool" else None)

    async def during(server: EngineServer, pace: Pace, handler: Any) -> None:
        if stage == "tool":
            await server.until_engine(lambda counts: counts.num_pending == 1)
            pace.open()
            await server.until_engine(lambda counts: counts.num_parked == 1)
        else:
            await server.until_engine(lambda counts: counts.num_injected == hang)
            await server.until(lambda counts: counts.num_active_requests == 1)
            pace.open()
        await handler.cancel_run()

    ours = await outcome(build, answers, [["a"]], tools=tools, during=during, behaviour=EngineBehaviour(hold_s=30.0))
    assert ours.error is not None
    assert ours.server.statistics().num_cancelled_requests == 1


@BUILDS
async def test_runs_at_once_of_one_agent_do_not_meet(build: Build) -> None:
    async def results(is_ours: bool) -> tuple[list[str], int, int]:
        pace = Pace(ANSWERS, GUESSES, is_held=False)
        async with LeakCheck(), EngineServer({MODEL: pace.script}) as server:
            speculation = speculation_of(server, GUESSES, pace) if is_ours else None
            async with language_model(server) as llm:
                built = build(llm, Tools().made(), speculation)
                seen = await asyncio.gather(*(built.run(user_msg="go") for _ in range(8)))
                await asyncio.sleep(0)
                num_attached = 0
                if speculation is not None:
                    await quiet(speculation)
                    num_attached = speculation.statistics().engine.num_attached
                await server.until(lambda counts: counts.num_active_requests == 0)
            return [named(Names().plain(one)) for one in seen], server.statistics().num_requests, num_attached

    stock, num_stock_requests, _ = await results(is_ours=False)
    ours, num_requests, num_attached = await results(is_ours=True)
    assert ours == stock
    assert num_requests == num_stock_requests - num_attached


@BUILDS
@pytest.mark.parametrize("mode", ["off", "shadow"])
async def test_without_speculation_requests_are_untouched(build: Build, mode: str) -> None:
    stock = await outcome(build, ANSWERS, None)
    ours = await outcome(build, ANSWERS, GUESSES, speculation_settings={"mode": mode}, is_held=False)
    ours.assert_same_as(stock)
    assert ours.num_requests == 3
    assert not any("x-spectool-turns" in request.headers for request in ours.server.requests)


class Budgeted(OpenAI):
    """A user's own class, with state of its own."""

    left: int = 2

    async def astream_chat(self, *args: Any, **kwargs: Any) -> Any:
        if not self.left:
            raise RuntimeError("the budget is used up")
        self.left -= 1
        return await super().astream_chat(*args, **kwargs)


class Counting(FunctionAgent):
    """A user's own class, with state of its own."""

    steps: int = 0

    async def take_step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return await super().take_step(*args, **kwargs)


class SpeculativeCounting(SpeculativeAgent, Counting):
    """The same, with early runs."""


@pytest.mark.parametrize("kind", [Counting, SpeculativeCounting])
async def test_llm_and_agent_keep_their_state(kind: type[Counting]) -> None:
    is_ours = kind is SpeculativeCounting
    pace = Pace(ANSWERS, GUESSES, is_held=is_ours)
    async with EngineServer({MODEL: pace.script}) as server, httpx.AsyncClient() as client:
        llm = Budgeted(model=MODEL, api_base=server.base_url, api_key="key", max_retries=0, async_http_client=client)
        options = {"speculation": speculation_of(server, GUESSES, pace)} if is_ours else {}
        agent = kind(llm=llm, tools=Tools().made(), **options)
        with pytest.raises(Exception, match="the budget is used up"):
            await agent.run(user_msg="go")
        assert (llm.left, agent.steps) == (0, 3)
        assert agent.llm is llm
        assert server.statistics().num_requests == (1 if is_ours else 2)


async def test_a_llm_that_makes_a_client_for_each_request_is_client_mode() -> None:
    pace = Pace(ANSWERS, GUESSES, is_held=False)
    async with LeakCheck(), EngineServer({MODEL: pace.script}) as server:
        llm = OpenAI(model=MODEL, api_base=server.base_url, api_key="key", reuse_client=False)
        agent = alone(llm, Tools().made(), speculation_of(server, GUESSES, pace), streaming=False)
        await agent.run(user_msg="go")
        assert {event.reason for event in pace.of(EngineUnavailable)} == {"request_not_seen"}
        assert server.statistics().num_requests == 3


class Hidden(OpenAI):
    """A user's own class, which at first gives its client to nobody."""

    _num_asked: int = PrivateAttr(default=0)

    def _get_aclient(self) -> Any:
        self._num_asked += 1
        if self._num_asked == 1:
            raise RuntimeError("not for you")
        return super()._get_aclient()


async def test_a_llm_that_cannot_be_followed_is_client_mode() -> None:
    pace = Pace(ANSWERS, GUESSES, is_held=False)
    async with LeakCheck(), EngineServer({MODEL: pace.script}) as server, httpx.AsyncClient() as client:
        llm = Hidden(model=MODEL, api_base=server.base_url, api_key="key", async_http_client=client)
        tools = Tools()
        await alone(llm, tools.made(), speculation_of(server, GUESSES, pace)).run(user_msg="go")
        assert EngineUnavailable in set(map(type, pace.events))
        assert tools.runs == ["a", "b"]


async def test_a_react_agent_whose_calls_are_text_is_left_alone() -> None:
    said = [
        Answer(text='Thought: hm\nAction: lookup\nAction Input: {"q": "a"}\n'),
        Answer(text="Thought: I can answer.\nAnswer: yes"),
    ]
    pace = Pace(said, [["a"]], is_held=False)
    async with LeakCheck(), EngineServer({MODEL: said}) as server, language_model(server) as llm:
        speculation = speculation_of(server, [], pace)
        agent = SpeculativeReActAgent(llm=llm, tools=Tools().made(), speculation=speculation)
        assert str(await agent.run(user_msg="go")) == "yes"
        assert server.statistics().num_requests == 2
        assert pace.of(EngineUnavailable) == []


def tool_of(value: Any, **settings: Any) -> FunctionTool:
    def lookup(q: str) -> Any:
        """Look something up."""
        return value

    made = FunctionTool.from_defaults(lookup, **settings)
    mark([made], names=["lookup"])
    return made


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", "text"),
        ({"k": 1}, "{'k': 1}"),
        (None, "None"),
        ([TextBlock(text="one "), TextBlock(text="two")], "one two"),
        (ImageBlock(url="http://127.0.0.1/x.png"), None),
    ],
)
def test_the_content_of_a_function_tools_message(value: Any, expected: str | None) -> None:
    binding = ToolBinding.of(tool_of(value))
    assert binding is not None
    assert binding._execution.content(Recorded(value, ())) == expected


def test_a_tool_whose_callback_may_put_another_content_in_is_not_shown() -> None:
    binding = ToolBinding.of(tool_of("text", callback=lambda output: f"changed {output}"))
    assert binding is not None
    assert binding._execution.content(Recorded("text", ())) is None


def test_the_content_of_a_whole_output() -> None:
    class Own(FunctionTool):
        async def acall(self, *args: Any, **kwargs: Any) -> ToolOutput:
            return ToolOutput(content="own", tool_name="lookup", raw_input={}, raw_output=None)

    made = Own(fn=tool_of("text").fn, metadata=tool_of("text").metadata)
    mark([made], names=["lookup"])
    binding = ToolBinding.of(made)
    assert binding is not None
    output = ToolOutput(content="own", tool_name="lookup", raw_input={}, raw_output=None)
    assert binding._execution.content(Recorded(output, ())) == "own"
    assert binding._execution.content(Recorded("no output", ())) is None

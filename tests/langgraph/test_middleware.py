"""`SpeculationMiddleware` in `create_agent`: equal to an empty middleware at its place, with early runs behind it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ModelCallLimitMiddleware,
    ModelFallbackMiddleware,
    ModelRequest,
    ModelRetryMiddleware,
    ToolCallLimitMiddleware,
    ToolRetryMiddleware,
    dynamic_prompt,
    wrap_model_call,
    wrap_tool_call,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from spectool_core import ConfigurationError, Speculation, speculatable
from spectool_core.calls import ToolCall
from spectool_core.testing import FakeTool, run_virtual
from spectool_langgraph import SpeculationMiddleware, SpeculativeToolNode
from tests.guessing import Call, Guess, GuessingSpeculator, Reply, outcomes, predicting, prompts_of
from tests.langgraph.agents import QUESTION, STREAM_MODES, Seen, in_order, make_tools, per_run, plain, run
from tests.langgraph.scripted import CallbackLog, ScriptedChatModel, StreamingChatModel, wait_for
from tests.tool_log import ToolLog

TWO = Reply(calls=(Call("lookup", {"q": "a"}, "call_0"), Call("weigh", {"q": "b"}, "call_1")))
LOOK = Reply(calls=(Call("lookup", {"q": "c"}, "call_0"),))
TELL = Reply(calls=(Call("announce", {"q": "d"}, "call_0"),), text="let me see")
DONE = Reply(text="done")
REPLIES = [TWO, LOOK, TELL, DONE]


class SpeculationPlaceholder(AgentMiddleware[Any, Any, Any]):
    """Does nothing in each place where `SpeculationMiddleware` does something; goes by its name in traces."""

    @property
    def name(self) -> str:
        return "SpeculationMiddleware"

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request)

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request)

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        return handler(request)

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        return await handler(request)


def middleware_of(speculation: Speculation | None) -> AgentMiddleware[Any, Any, Any]:
    return SpeculationPlaceholder() if speculation is None else SpeculationMiddleware(speculation)


def play(
    speculation: Speculation | None,
    *,
    replies: Sequence[Reply] = REPLIES,
    outer: Sequence[Any] = (),
    inner: Sequence[Any] = (),
    log: ToolLog | None = None,
    model: Any = None,
    given: Sequence[Any] = (QUESTION,),
    extra_tools: Sequence[BaseTool] = (),
    model_class: type[ScriptedChatModel] = StreamingChatModel,
    checkpointer: Any = None,
    **arguments: Any,
) -> Seen:
    tools = [*make_tools(log or ToolLog(lambda *_: 0.4)), *extra_tools]
    agent = create_agent(
        model or model_class(replies=list(replies)),
        tools,
        middleware=[*outer, middleware_of(speculation), *inner],
        checkpointer=checkpointer,
        **arguments,
    )

    async def main() -> Seen:
        config = {"configurable": {"thread_id": "t"}}
        for each in given[:-1]:
            await run(agent, each, config=config)
        return await run(agent, given[-1], config=config)

    return run_virtual(main)


def assert_same(ours: Seen, stock: Seen) -> None:
    assert stock.error is None
    assert ours.error is None
    assert ours.messages == stock.messages
    assert Counter(map(repr, ours.stream)) == Counter(map(repr, stock.stream))
    assert per_run(ours.callbacks) == per_run(stock.callbacks)
    assert ours.num_tasks_left == 0


# Alone


def test_it_needs_a_speculation() -> None:
    with pytest.raises(ConfigurationError, match="speculation=None is not allowed"):
        SpeculationMiddleware(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("model_class", [ScriptedChatModel, StreamingChatModel])
def test_a_run_equals_that_with_an_empty_middleware(model_class: type[ScriptedChatModel]) -> None:
    speculation, log = predicting(REPLIES), ToolLog(lambda *_: 0.4)
    ours, stock = play(speculation, log=log, model_class=model_class), play(None, model_class=model_class)
    assert_same(ours, stock)
    assert outcomes(speculation) == (4, 0, 0)
    assert sum(log.counts("started").values()) == 4
    assert ours.duration_s == pytest.approx(stock.duration_s - 3 * 0.4)


def test_order_is_stock_s_order_for_one_call_at_a_time() -> None:
    speculation = predicting([LOOK, TELL, DONE])
    ours, stock = play(speculation, replies=[LOOK, TELL, DONE]), play(None, replies=[LOOK, TELL, DONE])
    assert ours.stream == stock.stream
    assert in_order(ours.callbacks) == in_order(stock.callbacks)
    assert outcomes(speculation) == (2, 0, 0)


@pytest.mark.parametrize("mode", ["debug", "tasks", "checkpoints", "tools", "values"])
def test_each_stream_mode(mode: str) -> None:
    async def main(speculation: Speculation | None) -> Any:
        agent = create_agent(
            StreamingChatModel(replies=[LOOK, TELL, DONE]),
            make_tools(ToolLog(lambda *_: 0.4)),
            middleware=[middleware_of(speculation)],
            checkpointer=InMemorySaver(),
        )
        return await run(agent, config={"configurable": {"thread_id": "t"}}, stream_mode=[mode], subgraphs=True)

    speculation = predicting([LOOK, TELL, DONE])
    assert run_virtual(lambda: main(speculation)).stream == run_virtual(lambda: main(None)).stream
    assert outcomes(speculation) == (2, 0, 0)


def test_events() -> None:
    async def main(speculation: Speculation | None) -> list[Any]:
        tools = make_tools(ToolLog(lambda *_: 0.4))
        replies = [LOOK, TELL, DONE]
        agent = create_agent(StreamingChatModel(replies=replies), tools, middleware=[middleware_of(speculation)])
        return [plain(event) async for event in agent.astream_events(QUESTION, version="v2")]

    assert run_virtual(lambda: main(predicting([LOOK, TELL, DONE]))) == run_virtual(lambda: main(None))


@pytest.mark.parametrize("model_class", [ScriptedChatModel, StreamingChatModel])
def test_sync(model_class: type[ScriptedChatModel]) -> None:
    replies = [Reply(calls=(Call("lookup", {"query": "a"}, "call_0"),)), DONE]

    def sync_play(speculation: Speculation | None) -> Any:
        def wait(turn: int) -> None:
            if turn == 0 and speculation is not None:
                wait_for(lambda: speculation.statistics().total.num_runs_succeeded == 1)

        fake = FakeTool("lookup")
        model = model_class(replies=replies, before_answer=wait)
        agent = create_agent(model, [speculatable(tool(fake.function))], middleware=[middleware_of(speculation)])
        log = CallbackLog()
        stream = [plain(chunk) for chunk in agent.stream(QUESTION, {"callbacks": [log]}, stream_mode=STREAM_MODES)]  # type: ignore[arg-type]
        assert fake.statistics().num_started == 1
        return stream, in_order(log.events)

    speculation = predicting(replies, after_s=0.0)
    assert sync_play(speculation) == sync_play(None)
    assert outcomes(speculation) == (1, 0, 0)
    speculation.close()


# Among others


class AroundModel(AgentMiddleware[Any, Any, Any]):
    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request)


class AroundTools(AgentMiddleware[Any, Any, Any]):
    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        return await handler(request)


@pytest.mark.parametrize("inner", [AroundModel, AroundTools])
def test_a_warning_when_it_is_not_the_innermost(inner: type[AgentMiddleware[Any, Any, Any]]) -> None:
    with pytest.warns(UserWarning, match="not the last in middleware") as caught:
        play(predicting(REPLIES), inner=[inner()])
    assert len(caught) == 1


def test_no_warning_when_it_is_the_innermost() -> None:
    class AfterModel(AgentMiddleware[Any, Any, Any]):
        async def aafter_model(self, state: Any, runtime: Any) -> None:
            return None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer = [AroundModel(), AroundTools(), ModelRetryMiddleware()]
        assert play(predicting(REPLIES), outer=outer, inner=[AfterModel()]).error is None


def test_the_speculator_sees_what_the_model_sees() -> None:
    """An outer middleware that trims and rewrites the prompt, as summarization does."""

    @dynamic_prompt
    def system(request: ModelRequest[Any]) -> str:
        return f"answer {len(request.messages)} messages"

    class Trims(AgentMiddleware[Any, Any, Any]):
        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return await handler(request.override(messages=[HumanMessage("summary"), *request.messages[-2:]]))

    asked: list[list[tuple[str, str]]] = []

    class Listens(ScriptedChatModel):
        def _reply(self, messages: Any) -> tuple[int, Reply]:
            asked.append([(message.type, message.content) for message in messages])
            return len(asked) - 1, [LOOK, TELL, DONE][len(asked) - 1]

    speculation = Speculation([GuessingSpeculator([])])
    seen = play(speculation, model=Listens(replies=[]), outer=[system, Trims()])
    assert seen.error is None
    names = {"human": "user", "ai": "assistant"}
    expected = [[(names.get(role, role), content) for role, content in prompt] for prompt in asked]
    assert prompts_of(speculation) == expected
    assert prompts_of(speculation)[1][1] == ("user", "summary")


class FailsFirst(ScriptedChatModel):
    num_failures: int = 1

    def _reply(self, messages: Any) -> tuple[int, Reply]:
        turn, reply = super()._reply(messages)
        if self.attempts.count(turn) <= self.num_failures:
            raise ConnectionError("busy")
        return turn, reply


def test_model_retry_is_one_turn() -> None:
    def with_retry(speculation: Speculation | None) -> Seen:
        retry = ModelRetryMiddleware(max_retries=3, initial_delay=0.5, jitter=False)
        return play(speculation, model=FailsFirst(replies=REPLIES, num_failures=2), outer=[retry])

    speculation = predicting(REPLIES)
    assert_same(with_retry(speculation), with_retry(None))
    assert len(prompts_of(speculation)) == 4
    assert outcomes(speculation) == (4, 0, 0)


def test_model_fallback_is_one_turn() -> None:
    def with_fallback(speculation: Speculation | None) -> Seen:
        fallback = ModelFallbackMiddleware(ScriptedChatModel(replies=REPLIES))
        return play(speculation, model=FailsFirst(replies=REPLIES, num_failures=99), outer=[fallback])

    speculation = predicting(REPLIES)
    assert_same(with_fallback(speculation), with_fallback(None))
    assert len(prompts_of(speculation)) == 4
    assert outcomes(speculation) == (4, 0, 0)


@pytest.mark.parametrize("place", ["outer", "inner"])
@pytest.mark.filterwarnings("ignore:SpeculationMiddleware is not the last")
def test_tool_retry(place: str) -> None:
    """A broken early run is a miss; what the retry middleware then does is its own affair."""
    replies = [LOOK, DONE]

    def with_retry(speculation: Speculation | None, log: ToolLog) -> Seen:
        retry = ToolRetryMiddleware(max_retries=2, initial_delay=0.5, jitter=False)
        return play(speculation, replies=replies, log=log, **{place: [retry]})  # type: ignore[arg-type]

    speculation = predicting(replies)
    logs = [ToolLog(lambda *_: 0.4, frozenset({"c1"})) for _ in range(2)]
    assert_same(with_retry(speculation, logs[0]), with_retry(None, logs[1]))
    assert logs[1].counts("raised") == {("lookup", "c1"): 3}
    assert logs[0].counts("raised") == {("lookup", "c1"): 4}


def test_call_limits() -> None:
    def limited(speculation: Speculation | None) -> Seen:
        limits = [ToolCallLimitMiddleware(run_limit=3), ModelCallLimitMiddleware(run_limit=3)]
        return play(speculation, outer=limits)

    speculation = predicting(REPLIES)
    assert_same(limited(speculation), limited(None))
    assert sum(outcomes(speculation)) == 3


def test_a_middleware_that_short_circuits_the_model_makes_no_turn() -> None:
    class Cached(AgentMiddleware[Any, Any, Any]):
        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return AIMessage("from the cache")

    speculation = predicting(REPLIES)
    assert play(speculation, outer=[Cached()]).error is None
    assert speculation.statistics().num_turns == 0


def test_tools_that_a_middleware_has_copied_for_the_model() -> None:
    """As prompt caching does to the last tool: the model is offered a copy, the node runs the original."""

    class Copies(AgentMiddleware[Any, Any, Any]):
        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            copies = [tool.model_copy(update={"extras": {"cache": True}}) for tool in request.tools]
            return await handler(request.override(tools=copies))

    speculation, log = predicting(REPLIES), ToolLog(lambda *_: 0.4)
    assert_same(play(speculation, outer=[Copies()], log=log), play(None, outer=[Copies()]))
    assert outcomes(speculation) == (4, 0, 0)
    assert sum(log.counts("started").values()) == 4


def test_tools_that_a_middleware_takes_away_are_not_run_early() -> None:
    class OnlyNote(AgentMiddleware[Any, Any, Any]):
        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return await handler(request.override(tools=[tool for tool in request.tools if tool.name == "note"]))

    speculation, log = predicting(REPLIES), ToolLog(lambda *_: 0.4)
    play(speculation, outer=[OnlyNote()], log=log, replies=[DONE])
    assert speculation.statistics().num_turns == 0
    assert log.events == []


def test_tools_that_a_middleware_adds_are_run_early() -> None:
    """A tool that the agent was not made with: offered in one hook, run in another."""
    log = ToolLog(lambda *_: 0.4)

    def dynamic(log: ToolLog) -> Any:
        @tool
        @speculatable
        async def extra(q: str) -> str:
            """Come later."""
            return await log.run("extra", q)

        class Adds(AgentMiddleware[Any, Any, Any]):
            async def awrap_model_call(self, request: Any, handler: Any) -> Any:
                return await handler(request.override(tools=[*request.tools, extra]))

            async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
                return await handler(request.override(tool=extra) if request.tool_call["name"] == "extra" else request)

        return Adds()

    replies = [Reply(calls=(Call("extra", {"q": "x"}, "1"),)), DONE]
    speculation = predicting(replies)
    ours = play(speculation, replies=replies, outer=[dynamic(log)])
    stock = play(None, replies=replies, outer=[dynamic(ToolLog(lambda *_: 0.4))])
    assert_same(ours, stock)
    assert outcomes(speculation) == (1, 0, 0)
    assert log.counts("started") == {("extra", "x"): 1}


def test_a_middleware_that_runs_another_tool_of_the_same_name() -> None:
    @tool("lookup")
    async def replacement(q: str, n: int = 1) -> str:
        """Stand in."""
        return "from the replacement"

    class Replaces(AgentMiddleware[Any, Any, Any]):
        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            return await handler(request.override(tool=replacement))

    speculation = predicting([LOOK, DONE])
    ours = play(speculation, replies=[LOOK, DONE], outer=[Replaces()])
    assert_same(ours, play(None, replies=[LOOK, DONE], outer=[Replaces()]))
    assert "from the replacement" in repr(ours.messages)


# What create_agent offers besides


class Answer(BaseModel):
    """The final answer."""

    text: str


def test_structured_output() -> None:
    replies = [LOOK, Reply(calls=(Call("Answer", {"text": "42"}, "call_1"),))]

    async def main(speculation: Speculation | None) -> Any:
        agent = create_agent(
            ScriptedChatModel(replies=replies),
            make_tools(ToolLog(lambda *_: 0.4)),
            middleware=[middleware_of(speculation)],
            response_format=ToolStrategy(Answer),
        )
        result = await agent.ainvoke(QUESTION)
        return result["structured_response"], [plain(message) for message in result["messages"]]

    speculation = predicting(replies)
    ours = run_virtual(lambda: main(speculation))
    assert ours == run_virtual(lambda: main(None))
    assert ours[0] == Answer(text="42")
    assert outcomes(speculation) == (1, 0, 0)
    assert speculation.statistics().tools["Answer"].num_skipped == 1


def test_a_system_prompt_and_a_name() -> None:
    speculation = predicting(REPLIES)
    ours = play(speculation, system_prompt="be brief", name="agent")
    assert_same(ours, play(None, system_prompt="be brief", name="agent"))
    assert prompts_of(speculation)[0] == [("system", "be brief"), ("user", "go")]
    assert SystemMessage("be brief").content == "be brief"


def test_a_tool_that_cannot_run_early_stays_stock(caplog: pytest.LogCaptureFixture) -> None:
    """The agent's tools come after its middleware is made, so the reason is logged, once."""

    @tool(return_direct=True)
    @speculatable
    async def final(q: str) -> str:
        """End the run."""
        return q

    replies = [LOOK, Reply(calls=(Call("final", {"q": "x"}, "2"),)), DONE]
    speculation = predicting(replies)
    assert_same(
        play(speculation, replies=replies, extra_tools=[final]), play(None, replies=replies, extra_tools=[final])
    )
    assert outcomes(speculation, "lookup") == (1, 0, 0)
    assert speculation.statistics().total.num_runs_succeeded == 1
    assert [record.getMessage() for record in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert "return_direct=True" in caplog.text


def test_one_middleware_in_two_agents_at_once() -> None:
    import asyncio

    speculation = predicting([LOOK, DONE])
    middleware = SpeculationMiddleware(speculation)
    logs = [ToolLog(lambda *_: 0.4) for _ in range(2)]

    async def main() -> list[str]:
        agents = [
            create_agent(ScriptedChatModel(replies=[LOOK, DONE]), make_tools(log), middleware=[middleware])
            for log in logs
        ]
        results = await asyncio.gather(*(agent.ainvoke(QUESTION) for agent in agents))
        return [result["messages"][2].content for result in results]

    assert run_virtual(main) == ["lookup of c1"] * 2
    assert outcomes(speculation) == (2, 0, 0)
    assert [log.counts("started") for log in logs] == [{("lookup", "c1"): 1}] * 2


def test_an_agent_with_middleware_as_a_tool_of_another() -> None:
    """Each agent's model is asked about its own tools only."""
    inner_speculation, outer_speculation = predicting([LOOK, DONE]), predicting([TWO, DONE])

    def agent(inner: Speculation | None, outer: Speculation | None) -> Any:
        tools = make_tools(ToolLog(lambda *_: 0.4))
        sub = create_agent(ScriptedChatModel(replies=[LOOK, DONE]), tools, middleware=[middleware_of(inner)])

        @tool
        async def delegate(q: str) -> str:
            """Ask another agent."""
            return str((await sub.ainvoke({"messages": [HumanMessage(q)]}))["messages"][-1].content)

        replies = [Reply(calls=(Call("delegate", {"q": "x"}, "call_0"),)), DONE]
        return create_agent(ScriptedChatModel(replies=replies), [*tools, delegate], middleware=[middleware_of(outer)])

    ours, stock = agent(inner_speculation, outer_speculation), agent(None, None)
    assert_same(run_virtual(lambda: run(ours)), run_virtual(lambda: run(stock)))
    assert len(prompts_of(inner_speculation)) == len(prompts_of(outer_speculation)) == 2
    assert outcomes(inner_speculation) == (1, 0, 0)


def test_a_stock_agent_with_the_same_tools_stays_stock() -> None:
    speculation = predicting(REPLIES)
    tools = make_tools(ToolLog(lambda *_: 0.4))
    create_agent(ScriptedChatModel(replies=REPLIES), tools, middleware=[SpeculationMiddleware(speculation)])
    stock = create_agent(ScriptedChatModel(replies=REPLIES), tools)
    assert run_virtual(lambda: run(stock)).error is None
    assert speculation.statistics().num_turns == 0


def test_mode_off_costs_no_turn() -> None:
    speculation = predicting(REPLIES, mode="off")
    assert_same(play(speculation), play(None))
    assert speculation.statistics().num_turns == 0


def test_parallel_answers_with_ids_that_repeat() -> None:
    """`call_0` in every turn, and twice in one: each call gets its own result."""
    replies = [
        LOOK,
        TWO,
        Reply(calls=(Call("lookup", {"q": "x"}, "call_0"), Call("lookup", {"q": "y"}, "call_0"))),
        DONE,
    ]
    speculation, log = predicting(replies), ToolLog(lambda *_: 0.4)
    ours = play(speculation, replies=replies, log=log)
    assert_same(ours, play(None, replies=replies))
    assert outcomes(speculation) == (5, 0, 0)
    assert sum(log.counts("started").values()) == 5


def test_decorator_middleware_around_it() -> None:
    heard: list[str] = []

    def hooks() -> list[Any]:
        @wrap_model_call
        async def model_hook(request: Any, handler: Callable[[Any], Any]) -> Any:
            heard.append("model")
            return await handler(request)

        @wrap_tool_call
        async def tool_hook(request: Any, handler: Callable[[Any], Any]) -> Any:
            heard.append(request.tool_call["name"])
            return await handler(request)

        return [model_hook, tool_hook]

    speculation = predicting([LOOK, DONE])
    assert_same(play(speculation, replies=[LOOK, DONE], outer=hooks()), play(None, replies=[LOOK, DONE], outer=hooks()))
    assert heard == ["model", "lookup", "model"] * 2
    assert outcomes(speculation) == (1, 0, 0)


def test_a_speculative_tool_node_is_not_what_create_agent_takes() -> None:
    """It would be used as one tool; LangChain itself refuses it."""
    node = SpeculativeToolNode(make_tools(ToolLog(lambda *_: 0.0)), Speculation())
    with pytest.raises((TypeError, ValueError, AttributeError)):
        create_agent(ScriptedChatModel(replies=[]), node)  # type: ignore[arg-type]


def test_a_wrong_guess_changes_nothing() -> None:
    wrong = GuessingSpeculator([Guess((ToolCall("lookup", {"q": "wrong"}), ToolCall("note", {"text": "n"})))] * 4)
    speculation, log = Speculation([wrong]), ToolLog(lambda *_: 0.4)
    assert_same(play(speculation, log=log), play(None))
    assert outcomes(speculation) == (0, 0, 4)
    assert log.counts("started")["note", "n"] == 0
    assert speculation.statistics().num_wasted == 4

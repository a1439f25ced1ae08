"""`SpeculativeToolNode` in place of the stock node: errors, wrappers, retries, results, checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.messages.tool import tool_call
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState
from langgraph.prebuilt import InjectedState, InjectedStore, ToolRuntime
from langgraph.prebuilt.tool_node import ToolCallRequest
from langgraph.types import Command, RetryPolicy, interrupt

from spectool_core import ConfigurationError, NotSpeculatableError, Speculation, mark, speculatable
from spectool_core.calls import ToolCall
from spectool_core.events import ToolObserved
from spectool_core.testing import run_virtual
from spectool_langgraph import SpeculativeToolNode
from tests.guessing import Call, Guess, GuessingSpeculator, Reply, outcomes, predicting, prompts_of
from tests.langgraph.agents import QUESTION, Seen, build, in_order, make_tools, per_run, run
from tests.langgraph.scripted import ScriptedChatModel
from tests.tool_log import ToolLog

LOOK = Reply(calls=(Call("lookup", {"q": "a"}, "call_0"),))
LOOK_AGAIN = Reply(calls=(Call("lookup", {"q": "b"}, "call_0"),))
DONE = Reply(text="done")

Played = tuple[Seen, ToolLog]


def play(
    replies: list[Reply],
    speculation: Speculation | None,
    *,
    broken: frozenset[str] = frozenset(),
    given: list[Any] | None = None,
    checkpointer: Any = None,
    tools: Callable[[ToolLog], list[BaseTool]] = make_tools,
    **arguments: Any,
) -> Played:
    """Run an agent once for each input, all on one thread, and return what was seen last."""
    log = ToolLog(lambda _name, _argument: 0.4, broken)

    async def main() -> Seen:
        graph = build(replies, tools(log), speculation, **arguments).compile(checkpointer=checkpointer)
        config = {"configurable": {"thread_id": "t"}}
        for each in (given or [QUESTION])[:-1]:
            await run(graph, each, config=config)
        return await run(graph, (given or [QUESTION])[-1], config=config)

    return run_virtual(main), log


def assert_equal(ours: Played, stock: Played) -> None:
    assert ours[0].messages == stock[0].messages
    assert ours[0].error == stock[0].error
    if stock[0].error is None:
        assert sorted(map(repr, ours[0].stream)) == sorted(map(repr, stock[0].stream))
        assert per_run(ours[0].callbacks) == per_run(stock[0].callbacks)
    assert ours[0].num_tasks_left == 0


# What is made


def test_it_needs_a_speculation() -> None:
    with pytest.raises(ConfigurationError, match="speculation='openai:gpt' is not allowed"):
        SpeculativeToolNode([], "openai:gpt")  # type: ignore[arg-type]


def test_plain_functions_are_tools_and_keep_their_mark() -> None:
    @speculatable
    def search(query: str) -> str:
        """Search."""
        return query

    node = SpeculativeToolNode([search], Speculation())
    assert set(node.tools_by_name) == set(node.enlisted.marked) == {"search"}


def injects_state(q: str, state: Annotated[dict[str, Any], InjectedState]) -> str:
    """Take state."""
    return q


def injects_store(q: str, store: Annotated[Any, InjectedStore()]) -> str:
    """Take the store."""
    return q


def injects_runtime(q: str, runtime: ToolRuntime) -> str:
    """Take the runtime."""
    return q


def injects_id(q: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> str:
    """Take the id."""
    return q


def returns_command(q: str) -> Command[Any]:
    """Go somewhere."""
    return Command(goto="x")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (injects_state, "takes what only the tool node can inject: state"),
        (injects_store, "takes what only the tool node can inject: store"),
        (injects_runtime, "takes what only the tool node can inject: runtime"),
        (injects_id, "takes what only the tool node can inject: tool_call_id"),
        (returns_command, "returns a Command"),
        (
            StructuredTool.from_function(lambda q: q, name="direct", description="d", return_direct=True),
            "return_direct",
        ),
    ],
)
def test_a_tool_that_cannot_run_early_is_refused_with_the_reason(function: Any, reason: str) -> None:
    marked = speculatable(tool(function) if callable(function) else function)
    with pytest.raises(NotSpeculatableError, match=reason):
        SpeculativeToolNode([marked], Speculation())


@pytest.mark.parametrize("function", [injects_state, injects_runtime, injects_id])
def test_an_unmarked_tool_of_that_kind_works_as_ever(function: Any) -> None:
    name = f"unmarked_{function.__name__}"
    replies = [
        Reply(calls=(Call("lookup", {"q": "a"}, "1"),)),
        Reply(calls=(Call(name, {"q": "b"}, "2"),)),
        DONE,
    ]
    speculation = predicting(replies)

    def tools(log: ToolLog) -> list[BaseTool]:
        return [*make_tools(log), StructuredTool.from_function(function, name=name, handle_tool_error=True)]

    # A sync tool runs in the loop's executor, which a virtual clock does not wait for.
    async def main(speculation: Speculation | None) -> Seen:
        graph = build(replies, tools(ToolLog(lambda *_: 0.0)), speculation).compile()
        return await run(graph)

    quick = [Reply(calls=reply.calls, text=reply.text, generation_s=0.0) for reply in replies]
    replies = quick
    stock, ours = asyncio.run(main(None)), asyncio.run(main(speculation))
    assert stock.error is None
    assert ours.messages == stock.messages
    assert "b" in repr(ours.messages[4])


# Errors


def only_connection(error: ConnectionError) -> str:
    return f"sorry: {error}"


def only_value(error: ValueError) -> str:
    return f"sorry: {error}"


HANDLERS: list[Any] = [
    True,
    False,
    "it failed",
    only_connection,
    only_value,
    ConnectionError,
    ValueError,
    (ValueError, ConnectionError),
    (ValueError,),
]


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda given: getattr(given, "__name__", repr(given)))
@pytest.mark.parametrize("predicted", [True, False])
def test_errors_are_handled_as_the_stock_node_handles_them(handler: Any, predicted: bool) -> None:
    replies = [LOOK, Reply(calls=(Call("weigh", {"q": "b"}, "call_0"),)), DONE]
    speculation = predicting(replies if predicted else [DONE] * 3)
    stock = play(replies, None, broken=frozenset({"a1"}), handle_tool_errors=handler)
    ours = play(replies, speculation, broken=frozenset({"a1"}), handle_tool_errors=handler)
    assert_equal(ours, stock)
    assert ours[1].counts("raised") == {("lookup", "a1"): 2 if predicted else 1}  # the early run's error is not shown
    if stock[0].error is None:
        assert outcomes(speculation) == ((1, 0, 1) if predicted else (0, 0, 2))


def test_default_error_handling_raises_what_the_tool_raised() -> None:
    stock, ours = (play([LOOK, DONE], each, broken=frozenset({"a1"})) for each in (None, predicting([LOOK, DONE])))
    assert_equal(ours, stock)
    assert "a1 is unreachable" in (ours[0].error or "")


def test_arguments_that_the_schema_refuses() -> None:
    replies = [Reply(calls=(Call("lookup", {"n": "many"}, "1"),)), DONE]
    stock, ours = play(replies, None), play(replies, predicting(replies))
    assert_equal(ours, stock)
    assert "Please fix" in repr(ours[0].messages) or "error" in repr(ours[0].messages)


# The user's own wrapper


async def retrying(request: ToolCallRequest, execute: Callable[[ToolCallRequest], Awaitable[Any]]) -> Any:
    for _ in range(2):
        try:
            return await execute(request)
        except ConnectionError:
            continue
    return await execute(request)


async def polling(request: ToolCallRequest, execute: Callable[[ToolCallRequest], Awaitable[Any]]) -> Any:
    results = [await execute(request) for _ in range(3)]
    return results[-1]


async def modifying(request: ToolCallRequest, execute: Callable[[ToolCallRequest], Awaitable[Any]]) -> Any:
    call = request.tool_call
    return await execute(request.override(tool_call={**call, "args": {**call["args"], "q": "other"}}))


async def modifying_in_place(request: ToolCallRequest, execute: Callable[[ToolCallRequest], Awaitable[Any]]) -> Any:
    request.tool_call["args"]["q"] = "other"
    return await execute(request)


async def refusing(request: ToolCallRequest, execute: Callable[[ToolCallRequest], Awaitable[Any]]) -> Any:
    return ToolMessage("refused", tool_call_id=request.tool_call["id"], name=request.tool_call["name"])


async def passing(request: ToolCallRequest, execute: Callable[[ToolCallRequest], Awaitable[Any]]) -> Any:
    return await execute(request)


@pytest.mark.parametrize(
    ("wrapper", "runs_in_stock", "runs", "expected"),
    [
        (passing, {"a1": 1}, {"a1": 1}, (1, 0, 0)),
        (retrying, {"a1": 1}, {"a1": 1}, (1, 0, 0)),
        (polling, {"a1": 3}, {"a1": 3}, (1, 0, 2)),  # each further execution of one call runs the tool, as stock
        (modifying, {"other1": 1}, {"other1": 1, "a1": 1}, (0, 0, 0)),
        (modifying_in_place, {"other1": 1}, {"other1": 1, "a1": 1}, (0, 0, 1)),
        (refusing, {}, {"a1": 1}, (0, 0, 0)),
    ],
)
def test_a_wrapper(wrapper: Any, runs_in_stock: Any, runs: Any, expected: tuple[int, int, int]) -> None:
    speculation = predicting([LOOK, DONE])
    stock = play([LOOK, DONE], None, awrap_tool_call=wrapper)
    ours = play([LOOK, DONE], speculation, awrap_tool_call=wrapper)
    assert_equal(ours, stock)
    assert {argument: count for (_, argument), count in stock[1].counts("returned").items()} == runs_in_stock
    assert {argument: count for (_, argument), count in ours[1].counts("returned").items()} == runs
    assert outcomes(speculation) == expected
    assert speculation.statistics().num_settled_turns == 2


def test_a_retrying_wrapper_around_a_broken_tool() -> None:
    broken = frozenset({"a1"})
    stock = play([LOOK, DONE], None, broken=broken, awrap_tool_call=retrying, handle_tool_errors=True)
    ours = play(
        [LOOK, DONE], predicting([LOOK, DONE]), broken=broken, awrap_tool_call=retrying, handle_tool_errors=True
    )
    assert_equal(ours, stock)


def test_a_wrapper_that_puts_another_tool_in() -> None:
    @tool("lookup")
    async def replacement(q: str, n: int = 1) -> str:
        """Stand in."""
        return "from the replacement"

    async def replacing(request: ToolCallRequest, execute: Callable[[ToolCallRequest], Awaitable[Any]]) -> Any:
        return await execute(request.override(tool=replacement))

    speculation = predicting([LOOK, DONE])
    stock = play([LOOK, DONE], None, awrap_tool_call=replacing)
    ours = play([LOOK, DONE], speculation, awrap_tool_call=replacing)
    assert_equal(ours, stock)
    assert "from the replacement" in repr(ours[0].messages)
    assert outcomes(speculation) == (0, 0, 0)


class Incomparable:
    def __repr__(self) -> str:
        return "incomparable"

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


def test_a_wrapper_that_puts_in_what_cannot_be_compared() -> None:
    async def giving(request: ToolCallRequest, execute: Callable[[ToolCallRequest], Awaitable[Any]]) -> Any:
        return await execute(request.override(tool_call={**request.tool_call, "args": {"q": Incomparable()}}))

    stock, ours = (
        play([LOOK, DONE], each, awrap_tool_call=giving, handle_tool_errors=True)
        for each in (None, predicting([LOOK, DONE]))
    )
    assert_equal(ours, stock)


def test_a_sync_wrapper_alone_in_an_async_graph_does_not_deadlock() -> None:
    """The wrapper runs on the event loop, where nobody may wait for a run that lives on it."""
    gate: list[str] = []

    def wrap(request: ToolCallRequest, execute: Callable[[ToolCallRequest], Any]) -> Any:
        gate.append(request.tool_call["id"] or "")
        return execute(request)

    def make(log: ToolLog) -> list[BaseTool]:
        def lookup(q: str, n: int = 1) -> str:
            """Look something up."""
            log.events.append(("lookup", f"{q}{n}", "returned"))
            return f"{q}{n}"

        return [speculatable(tool(lookup))]

    async def main(speculation: Speculation | None) -> Seen:
        graph = build(quick, make(ToolLog(lambda *_: 0.0)), speculation, wrap_tool_call=wrap).compile()
        return await run(graph)

    quick = [Reply(calls=LOOK.calls, generation_s=0.05), Reply(text="done", generation_s=0.0)]
    stock = asyncio.run(main(None))
    for after_s in (0.0, 0.0499):
        ours = asyncio.run(main(predicting(quick, after_s=after_s)))
        assert ours.messages == stock.messages
        assert ours.num_tasks_left == 0
    assert gate == ["call_0"] * 3


# Retries


@pytest.mark.parametrize("predicted", [True, False])
def test_a_retry_policy_on_both_nodes(predicted: bool) -> None:
    """The model fails once, and the tool beside the speculated one fails once: both nodes run again."""
    policy = RetryPolicy(max_attempts=3, initial_interval=0.5, jitter=False, retry_on=(ConnectionError,))
    replies = [
        Reply(
            calls=(Call("lookup", {"q": "a"}, "1"), Call("weigh", {"q": "flaky"}, "2")),
            error=ConnectionError("the model is down"),
        ),
        DONE,
    ]

    def make(log: ToolLog) -> list[BaseTool]:
        lookup, *_ = make_tools(log)

        @tool("weigh")
        async def flaky(q: str) -> str:
            """Fail the first time."""
            result = await log.run("weigh", q)
            if log.counts("returned")["weigh", "flaky"] == 1:
                raise ConnectionError("the scale is down")
            return result

        return [lookup, speculatable(flaky, reads=["scale"], writes=["scale"])]

    speculation = predicting(replies if predicted else [DONE, DONE])
    stock = play(replies, None, tools=make, retry_policy=policy)
    ours = play(replies, speculation, tools=make, retry_policy=policy)
    assert stock[0].error is None
    assert_equal(ours, stock)
    assert speculation.statistics().num_turns == 2  # the model's second attempt goes on with the first's turn
    assert len(prompts_of(speculation)) == 2
    assert stock[1].counts("returned") == {("lookup", "a1"): 2, ("weigh", "flaky"): 2}


class AnyNumberOfFailures(ScriptedChatModel):
    """Fails `num_failures` times before each answer."""

    num_failures: int = 2

    def _reply(self, messages: Any) -> tuple[int, Reply]:
        turn, reply = super()._reply(messages)
        if self.attempts.count(turn) <= self.num_failures:
            raise ConnectionError("busy")
        return turn, reply


def retried(tools: list[BaseTool]) -> Any:
    model = AnyNumberOfFailures(replies=[LOOK, DONE], num_failures=2).bind_tools(tools)
    return model.with_retry(wait_exponential_jitter=False, stop_after_attempt=5)


def fallen_back(tools: list[BaseTool]) -> Any:
    down = AnyNumberOfFailures(replies=[LOOK, DONE], num_failures=99)
    return down.bind_tools(tools).with_fallbacks([down.bind_tools(tools), retried(tools)])


@pytest.mark.parametrize("model_of", [retried, fallen_back])
def test_retries_and_fallbacks_of_the_model_are_one_turn(model_of: Callable[[list[BaseTool]], Any]) -> None:
    def run_with(speculation: Speculation | None) -> Played:
        log = ToolLog(lambda *_: 0.4)
        tools = make_tools(log)

        async def main() -> Seen:
            return await run(build([], tools, speculation, model=model_of(tools)).compile())

        return run_virtual(main), log

    speculation = predicting([LOOK, DONE])
    stock, ours = run_with(None), run_with(speculation)
    assert stock[0].error is None
    assert_equal(ours, stock)
    assert speculation.statistics().num_turns == 2
    assert len(prompts_of(speculation)) == 2
    assert outcomes(speculation) == (1, 0, 0)
    assert ours[1].counts("started") == {("lookup", "a1"): 1}


def test_a_model_that_fails_for_good() -> None:
    replies = [Reply(error=ConnectionError("down")), DONE]
    speculation = predicting([LOOK])
    stock, ours = play(replies, None), play(replies, speculation)
    assert_equal(ours, stock)
    assert speculation.statistics().num_settled_turns == 1
    assert ours[1].counts("cancelled") == ours[1].counts("started")


def test_a_node_that_goes_on_without_the_failed_model_gives_its_turn_up() -> None:
    """At the next model call, not only at the run's end: whoever is still asked about it is cancelled."""
    never = GuessingSpeculator([Guess(after_s=None)] * 3)
    num_cancelled: list[int] = []
    log = ToolLog(lambda *_: 0.4)
    tools = make_tools(log)
    model = ScriptedChatModel(replies=[Reply(error=ConnectionError("down")), LOOK, DONE]).bind_tools(tools)

    class GoesOn:
        async def ainvoke(self, messages: Any) -> Any:
            num_cancelled.append(never.num_cancelled)
            try:
                return await model.ainvoke(messages)
            except ConnectionError:
                return AIMessage("the model is down", tool_calls=[tool_call(name="note", args={"text": "n"}, id="1")])

    async def main() -> Seen:
        return await run(build([], tools, Speculation([never]), model=GoesOn()).compile())

    assert run_virtual(main).error is None
    # Before the second call the failed turn may still be retried; before the third, two turns are over.
    assert num_cancelled == [0, 0, 2]
    assert never.num_cancelled == 3


def test_a_failed_prompt_that_is_changed_in_place_is_another_prompt() -> None:
    """The callbacks of `agenerate` see a list of their own, so the change shows."""
    log = ToolLog(lambda *_: 0.4)
    tools = make_tools(log)
    model = ScriptedChatModel(replies=[Reply(calls=LOOK.calls, error=ValueError("too long")), DONE])
    offered = [convert_to_openai_tool(tool) for tool in tools]

    class Shortens:
        async def ainvoke(self, messages: Any) -> Any:
            messages = list(messages)
            try:
                answer = await model.agenerate([messages], tools=offered)
            except ValueError:
                messages[0] = HumanMessage("shorter")
                answer = await model.agenerate([messages], tools=offered)
            return answer.generations[0][0].message  # type: ignore[union-attr]

    speculation = predicting([LOOK, DONE])
    assert run_virtual(lambda: run(build([], tools, speculation, model=Shortens()).compile())).error is None
    assert prompts_of(speculation)[:2] == [[("user", "go")], [("user", "shorter")]]
    assert outcomes(speculation) == (1, 0, 0)


# Results


def test_commands_run_as_stock_and_never_early_again() -> None:
    """A tool that turns out to return a Command is tried once."""
    replies = [Reply(calls=(Call("go", {"q": each}, "1"),)) for each in "abc"] + [DONE]

    def make(log: ToolLog) -> list[BaseTool]:
        @tool
        @speculatable
        async def go(q: str) -> Any:
            """Update the state."""
            text = await log.run("go", q)
            return Command(update={"messages": [ToolMessage(text, tool_call_id="1", id=f"command-{q}")]})

        return [go]

    speculation = predicting(replies)
    stock, ours = play(replies, None, tools=make), play(replies, speculation, tools=make)
    assert_equal(ours, stock)
    assert ours[1].counts("returned") == {("go", "a"): 2, ("go", "b"): 1, ("go", "c"): 1}
    assert speculation.statistics().tools["go"].num_runs_not_replayable == 1
    assert speculation.statistics().tools["go"].num_skipped == 2


def test_an_artifact_is_there_and_belongs_to_its_message() -> None:
    replies = [Reply(calls=(Call("weigh", {"q": "a"}, "1"), Call("weigh", {"q": "a"}, "2"))), DONE]
    speculation = predicting(replies)
    log = ToolLog(lambda *_: 0.4)

    async def main() -> Any:
        graph = build(replies, make_tools(log), speculation).compile()
        return (await graph.ainvoke(QUESTION))["messages"]

    first, second = [message for message in run_virtual(main) if isinstance(message, ToolMessage)]
    assert first.artifact == second.artifact == {"weighed": ["a"]}
    assert first.artifact is not second.artifact
    assert outcomes(speculation) == (2, 0, 0)
    assert log.counts("started") == {("weigh", "a"): 1}


# Checkpoints


def test_many_invocations_of_one_thread() -> None:
    replies = [LOOK, DONE, LOOK_AGAIN, DONE, LOOK, DONE]
    speculation = predicting(replies)
    given = [{"messages": [("user", f"question {n}")]} for n in range(3)]
    stock = play(replies, None, checkpointer=InMemorySaver(), given=given)
    ours = play(replies, speculation, checkpointer=InMemorySaver(), given=given)
    assert_equal(ours, stock)
    assert in_order(ours[0].callbacks) == in_order(stock[0].callbacks)
    assert len(stock[0].messages) == 12
    assert outcomes(speculation) == (3, 0, 0)
    assert ours[1].counts("started") == {("lookup", "a1"): 2, ("lookup", "b1"): 1}


def test_results_do_not_outlive_their_run_unless_scope_and_mark_say_so() -> None:
    replies = [LOOK, DONE, LOOK, DONE]

    def shared_tools(log: ToolLog) -> list[BaseTool]:
        async def lookup(q: str, n: int = 1) -> str:
            """Look something up."""
            return await log.run("lookup", f"{q}{n}")

        return [speculatable(tool(lookup), reuse="ttl")]

    given = [{"messages": [("user", f"question {n}")]} for n in range(2)]
    for scope, num_runs in ((None, 2), (lambda _call, context: context.thread_id, 1)):
        speculation = predicting(replies, scope=scope)
        _, log = play(replies, speculation, checkpointer=InMemorySaver(), given=given, tools=shared_tools)
        assert outcomes(speculation) == (2, 0, 0)
        assert log.counts("started") == {("lookup", "a1"): num_runs}


def test_results_that_only_their_run_could_use_are_forgotten_with_it() -> None:
    """Though their mark lets them serve later turns, for an hour."""
    log = ToolLog(lambda *_: 0.4)
    tools = mark(make_tools(log), names=["lookup"], reuse="ttl", ttl_s=3600.0)
    speculation = predicting([LOOK, DONE])
    num_kept: list[int] = []

    def kept() -> int:
        return sum(cache.num_results for cache in speculation._caches.values())

    async def looking(request: ToolCallRequest, execute: Callable[[ToolCallRequest], Awaitable[Any]]) -> Any:
        num_kept.append(kept())
        return await execute(request)

    async def main() -> None:
        await run(build([LOOK, DONE], tools, speculation, awrap_tool_call=looking).compile())
        num_kept.append(kept())

    run_virtual(main)
    assert outcomes(speculation) == (1, 0, 0)
    assert num_kept == [1, 0]


def test_another_process_resumes_with_an_empty_cache() -> None:
    """The run dies before its tools; new objects over the same store run them: a miss, not an error."""

    async def dies(request: ToolCallRequest, execute: Any) -> Any:
        raise RuntimeError("the process ends")

    def resumed(speculations: list[Speculation | None]) -> Played:
        saver, log = InMemorySaver(), ToolLog(lambda *_: 0.4)
        config = {"configurable": {"thread_id": "t"}}

        async def main() -> Seen:
            dying = build(
                [LOOK, DONE], make_tools(log), speculations[0], awrap_tool_call=dies, handle_tool_errors=False
            )
            assert (await run(dying.compile(checkpointer=saver), config=config)).error
            second = build([LOOK, DONE], make_tools(log), speculations[1]).compile(checkpointer=saver)
            return await run(second, None, config=config)

        return run_virtual(main), log

    speculations: list[Speculation | None] = [predicting([LOOK, DONE]), predicting([LOOK, DONE])]
    stock, ours = resumed([None, None]), resumed(speculations)
    assert stock[0].error is None
    assert len(stock[0].messages) == 4
    assert_equal(ours, stock)
    first, second = speculations
    assert first is not None
    assert second is not None
    assert outcomes(first) == outcomes(second) == (0, 0, 0)
    assert first.statistics().num_launched == 1
    assert second.statistics().num_turns == 1
    assert ours[1].counts("returned") == {("lookup", "a1"): 2}


# Interrupts


@pytest.mark.parametrize("marked", [True, False])
def test_a_human_s_answer_reaches_the_tool_that_asked(marked: bool) -> None:
    """`ask` interrupts; `lookup` beside or before it is speculated, and the resume value is `ask`'s alone."""
    replies = [
        Reply(calls=(Call("lookup", {"q": "a"}, "1"),)),
        Reply(calls=(Call("ask", {"q": "name"}, "2"), Call("lookup", {"q": "b"}, "3"))),
        Reply(calls=(Call("ask", {"q": "age"}, "4"),)),
        DONE,
    ]

    def make(log: ToolLog) -> list[BaseTool]:
        async def ask(q: str) -> str:
            """Ask the human."""
            await log.run("ask", q)
            answer = interrupt(q)
            log.events.append(("ask", f"{q}={answer}", "answered"))
            return f"{q} is {answer}"

        return [*make_tools(log), speculatable(tool(ask)) if marked else tool(ask)]

    given = [QUESTION, Command(resume="Ada"), Command(resume=36)]
    speculation = predicting(replies)
    stock = play(replies, None, checkpointer=InMemorySaver(), given=given, tools=make)
    ours = play(replies, speculation, checkpointer=InMemorySaver(), given=given, tools=make)
    assert stock[0].error is None
    assert_equal(ours, stock)
    assert ours[1].counts("answered") == {("ask", "name=Ada"): 1, ("ask", "age=36"): 1}
    hits, _, _ = outcomes(speculation, "lookup")
    assert hits >= 1
    if marked:
        # Tried for each of its answers: after the first one a real call succeeded, which ended its rest.
        assert speculation.statistics().tools["ask"].num_runs_failed == 2


# What the library learns


def test_a_tool_that_the_framework_runs_is_observed_on_the_loop_s_clock() -> None:
    observed: list[ToolObserved] = []

    def hook(event: Any) -> None:
        if isinstance(event, ToolObserved):
            observed.append(event)

    replies = [Reply(calls=(Call("lookup", {"q": "a"}, "1"), Call("note", {"text": "b"}, "2"))), DONE]
    play(replies, Speculation(hooks=[hook]))
    assert [(event.tool, event.marked, event.succeeded) for event in observed] == [
        ("lookup", True, True),
        ("note", False, True),
    ]
    for event in observed:
        assert (event.started_s, event.ended_s) == (pytest.approx(1.0), pytest.approx(1.4))


# Who is a main model


def state_of(result: Any) -> list[str]:
    return [message.content for message in result["messages"]]


@pytest.mark.parametrize(
    "binding",
    [{}, {"tools": []}, {"tools": "bound", "tool_choice": "none"}, {"tools": "others"}],
    ids=["no tools", "empty", "forbidden", "others"],
)
def test_a_model_that_cannot_call_the_tools_starts_nothing(binding: dict[str, Any]) -> None:
    log = ToolLog(lambda *_: 0.0)
    tools = make_tools(log)
    offered = {"bound": tools, "others": tools[-1:]}.get(str(binding.get("tools")), [])
    model = ScriptedChatModel(replies=[DONE])
    bound: Any = (
        model if not binding else model.bind_tools(offered, **{k: v for k, v in binding.items() if k != "tools"})
    )
    speculation = predicting([LOOK])

    async def main() -> Seen:
        return await run(build([], tools, speculation, model=bound).compile())

    assert run_virtual(main).error is None
    assert speculation.statistics().num_turns == 0
    assert prompts_of(speculation) == []
    assert log.events == []


def test_mode_off_asks_nobody_and_shadow_runs_nothing() -> None:
    stock = play([LOOK, DONE], None)
    for mode, num_requests in (("off", 0), ("shadow", 2)):
        speculation = predicting([LOOK, DONE], mode=mode)
        ours = play([LOOK, DONE], speculation)
        assert_equal(ours, stock)
        assert len(prompts_of(speculation)) == num_requests
        assert ours[1].events == stock[1].events
        assert ours[0].duration_s == stock[0].duration_s


def test_the_model_called_twice_in_one_node_makes_two_turns() -> None:
    """The first answer is thrown away; the second's calls are served from the second's turn."""
    speculation = predicting([LOOK, DONE])

    def run_with(speculation: Speculation | None) -> Played:
        log = ToolLog(lambda *_: 0.4)
        tools = make_tools(log)
        model = ScriptedChatModel(replies=[LOOK, DONE]).bind_tools(tools)

        class Twice:
            async def ainvoke(self, messages: Any) -> Any:
                await model.ainvoke(messages)
                return await model.ainvoke(messages)

        async def main() -> Seen:
            return await run(build([], tools, speculation, model=Twice()).compile())

        return run_virtual(main), log

    stock, ours = run_with(None), run_with(speculation)
    assert_equal(ours, stock)
    assert speculation.statistics().num_turns == 4
    assert outcomes(speculation) == (1, 0, 0)
    assert ours[1].counts("started") == {("lookup", "a1"): 2}


def test_a_model_inside_a_tool_is_not_a_main_model() -> None:
    replies = [Reply(calls=(Call("think", {"q": "a"}, "1"),)), DONE]

    def make(log: ToolLog) -> list[BaseTool]:
        tools = make_tools(log)

        @tool
        async def think(q: str) -> str:
            """Ask a model that knows the same tools."""
            model = ScriptedChatModel(replies=[LOOK]).bind_tools(tools)
            return str((await model.ainvoke(q)).tool_calls)

        return [*tools, think]

    speculation = Speculation([GuessingSpeculator([Guess((ToolCall("lookup", {"q": "a"}),))] * 3)])
    stock, ours = play(replies, None, tools=make), play(replies, speculation, tools=make)
    assert_equal(ours, stock)
    assert len(prompts_of(speculation)) == 2


def test_the_node_is_found_under_with_config_and_looks_the_same_in_a_drawing() -> None:
    log = ToolLog(lambda *_: 0.4)
    tools = make_tools(log)
    speculation = predicting([LOOK, DONE])

    def graph(speculation: Speculation | None) -> Any:
        from langgraph.graph import START, StateGraph
        from langgraph.prebuilt import tools_condition

        from tests.langgraph.agents import tool_node

        model = ScriptedChatModel(replies=[LOOK, DONE]).bind_tools(tools)

        async def agent(state: MessagesState) -> Any:
            return {"messages": [await model.ainvoke(state["messages"])]}

        built = StateGraph(MessagesState)
        built.add_node("agent", agent)
        built.add_node("tools", tool_node(tools, speculation).with_config(tags=["tagged"]))
        built.add_edge(START, "agent")
        built.add_conditional_edges("agent", tools_condition)
        built.add_edge("tools", "agent")
        return built.compile()

    stock, ours = run_virtual(lambda: run(graph(None))), run_virtual(lambda: run(graph(speculation)))
    assert ours.messages == stock.messages
    assert in_order(ours.callbacks) == in_order(stock.callbacks)
    assert outcomes(speculation) == (1, 0, 0)
    assert graph(speculation).get_graph().draw_mermaid() == graph(None).get_graph().draw_mermaid()

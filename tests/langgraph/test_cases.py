"""Inputs on which other software failed, through a LangGraph agent: one test for each row of the list, by its number.

Rows 6 to 10 are about a stream's pieces: `tests/core/speculators/test_assembly.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.tools import BaseTool, StructuredTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt
from pydantic import BaseModel, ConfigDict

from spectool_core import Speculation, mark, speculatable
from spectool_core.calls import ToolCall
from spectool_core.testing import run_virtual
from tests.guessing import Call, Guess, GuessingSpeculator, Reply, outcomes, predicting
from tests.langgraph.agents import Seen, build, run
from tests.langgraph.scripted import StreamingChatModel
from tests.tool_log import ToolLog

DONE = Reply(text="done")

Played = tuple[Seen, list[Any]]


def asking(*calls: tuple[str, dict[str, Any]]) -> Reply:
    return Reply(calls=tuple(Call(name, args, f"call_{index}") for index, (name, args) in enumerate(calls)))


def guessing(*turns: Sequence[tuple[str, dict[str, Any]]]) -> Speculation:
    guesses = [Guess(tuple(ToolCall(name, args) for name, args in calls)) for calls in turns]
    return Speculation([GuessingSpeculator(guesses)])


def recording(function: Callable[..., Any], received: list[Any], latency_s: float = 0.4) -> Callable[..., Any]:
    """The tool's function as a coroutine that takes its time and notes what it was given, by type and value."""
    from functools import wraps

    @wraps(function)
    async def recorded(*args: Any, **kwargs: Any) -> Any:
        received.append(kwargs)
        await asyncio.sleep(latency_s)
        return function(*args, **kwargs)

    return recorded


def play(
    replies: Sequence[Reply],
    function: Callable[..., Any],
    speculation: Speculation | None,
    others: Callable[[list[Any]], Sequence[BaseTool]] = lambda _: (),
    **options: Any,
) -> Played:
    """Run an agent with one marked tool; what was seen, and what the tool received in order."""
    received: list[Any] = []
    marked = speculatable(tool(recording(function, received)))
    options.setdefault("handle_tool_errors", True)

    async def main() -> Seen:
        return await run(build(replies, [marked, *others(received)], speculation, **options).compile())

    return run_virtual(main), received


def compare(
    replies: Sequence[Reply],
    function: Callable[..., Any],
    speculation: Speculation,
    others: Callable[[list[Any]], Sequence[BaseTool]] = lambda _: (),
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """Hold the speculative run against the stock one; what the tool received in each."""
    stock, in_stock = play(replies, function, None, others, **options)
    ours, in_ours = play(replies, function, speculation, others, **options)
    assert ours.messages == stock.messages
    assert ours.error == stock.error
    assert Counter(map(repr, ours.stream)) == Counter(map(repr, stock.stream))
    return in_ours, in_stock


def typed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return [typed(item) for item in value] if isinstance(value, list) else (type(value).__name__, value)


def take(x: Any = None) -> str:
    """Take anything."""
    return repr(typed(x))


def test_01_values_that_differ_in_type_never_share_a_result() -> None:
    for asked, guessed in (
        (1, 1.0),
        (1, True),
        (200, -56),
        ("1", 1),
        (None, "None"),
        ([1], [1.0]),
        ({"a": 0}, {"a": False}),
    ):
        speculation = guessing([("take", {"x": guessed})])
        compare([asking(("take", {"x": asked})), DONE], take, speculation)
        assert outcomes(speculation) == (0, 0, 1), (asked, guessed)


@pytest.mark.parametrize("number", [9223372036854775807, 10000000000000001, 2512292042121000001])
def test_02_digits_are_kept_exactly(number: int) -> None:
    speculation = guessing([("take", {"x": number})])
    received, _ = compare([asking(("take", {"x": number})), DONE], take, speculation)
    assert received == [{"x": number}]
    assert outcomes(speculation) == (1, 0, 0)
    wrong = guessing([("take", {"x": number + 1})])
    compare([asking(("take", {"x": number})), DONE], take, wrong)
    assert outcomes(wrong) == (0, 0, 1)


def many(tags: set[str], rows: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Take containers."""
    return f"{sorted(tags)} {rows} {options}"


def test_03_containers_have_a_key() -> None:
    arguments = {"tags": ["b", "a"], "rows": [{"n": 1}, {"m": [2]}], "options": {"deep": {"er": [1, 2]}}}
    speculation = guessing([("many", arguments)])
    compare([asking(("many", arguments)), DONE], many, speculation)
    assert outcomes(speculation) == (1, 0, 0)


@pytest.mark.parametrize("predicted", [True, False])
def test_04_the_same_call_twice_in_one_answer(predicted: bool) -> None:
    def others(received: list[Any]) -> list[BaseTool]:
        async def unmarked(x: Any = None) -> str:
            """Take anything, unmarked."""
            received.append(("unmarked", x))
            return str(x)

        return [tool(unmarked)]

    twice = [("take", {"x": 1})] * 2
    speculation = guessing(twice if predicted else [])
    received, in_stock = compare([asking(*twice), DONE], take, speculation)
    assert received == [{"x": 1}]
    assert in_stock == [{"x": 1}] * 2
    assert sum(outcomes(speculation)[:2]) == 2
    again = guessing([("unmarked", {"x": 1})])
    received, in_stock = compare([asking(("unmarked", {"x": 1}), ("unmarked", {"x": 1})), DONE], take, again, others)
    assert received == in_stock == [("unmarked", 1)] * 2


def flaky(x: str) -> str:
    """Work, or not."""
    if x == "bad":
        raise ConnectionError("unreachable")
    return x


def test_05_one_call_works_and_the_other_raises() -> None:
    speculation = guessing([("flaky", {"x": "good"}), ("flaky", {"x": "bad"})])
    received, _ = compare([asking(("flaky", {"x": "good"}), ("flaky", {"x": "bad"})), DONE], flaky, speculation)
    assert outcomes(speculation) == (1, 0, 1)
    assert Counter(each["x"] for each in received) == {"good": 1, "bad": 2}


class NotJson(StreamingChatModel):
    """Streams a call whose arguments are no JSON."""

    async def _astream(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> Any:
        turn, _ = self._reply(messages)
        await asyncio.sleep(1.0)
        calls = [tool_call_chunk(name="take", args='query = """select 1"""', id="call_0", index=0)] if turn == 0 else []
        yield ChatGenerationChunk(message=AIMessageChunk(content="", id=f"ai-{turn}", tool_call_chunks=calls))


def test_11_arguments_that_are_no_json() -> None:
    speculation = guessing([("take", {"x": 1})])
    received, in_stock = compare([DONE, DONE], take, speculation, model_class=NotJson)
    assert in_stock == []
    assert len(received) == 1  # the guess, wasted
    assert outcomes(speculation) == (0, 0, 0)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    x: int


@pytest.mark.parametrize("schema", [None, Strict])
def test_12_an_argument_that_the_tool_does_not_take(schema: type[BaseModel] | None) -> None:
    """Dropped, and then one key; or refused, and then the framework's error."""

    def others(received: list[Any]) -> list[BaseTool]:
        async def number(x: int) -> str:
            """Take a number."""
            received.append(x)
            return str(x)

        made = StructuredTool.from_function(coroutine=number, args_schema=schema)
        return [speculatable(made)]

    speculation = guessing([("number", {"x": 1})])
    received, in_stock = compare([asking(("number", {"x": 1, "y": 2})), DONE], take, speculation, others)
    assert in_stock == ([1] if schema is None else [])
    assert received == [1]
    assert outcomes(speculation) == ((1, 0, 0) if schema is None else (0, 0, 1))


def integer(x: int) -> str:
    """Take an integer."""
    return f"{x} is {type(x).__name__}"


def test_13_what_the_schema_makes_equal_is_one_call() -> None:
    for asked in ("1", 1, 1.0):
        for guessed in ("1", 1, 1.0):
            speculation = guessing([("integer", {"x": guessed})])
            received, _ = compare([asking(("integer", {"x": asked})), DONE], integer, speculation)
            assert outcomes(speculation) == (1, 0, 0)
            assert typed(received) == [{"x": ("int", 1)}]


def test_14_nan_has_no_key() -> None:
    speculation = guessing([("take", {"x": math.nan})])
    received, in_stock = compare([asking(("take", {"x": math.nan})), DONE], take, speculation)
    assert len(received) == len(in_stock) == 1
    assert speculation.statistics().num_launched == 0
    assert outcomes(speculation) == (0, 0, 1)


def test_15_hits_are_hits() -> None:
    """Asserted in every test here; this one says that a hit needs no second run and no second wait."""
    replies = [asking(("take", {"x": n})) for n in range(3)] + [DONE]
    speculation = predicting(replies)
    stock, _ = play(replies, take, None)
    ours, received = play(replies, take, speculation)
    assert outcomes(speculation) == (3, 0, 0)
    assert len(received) == 3
    assert ours.duration_s == pytest.approx(stock.duration_s - 3 * 0.4)


def test_16_a_late_prediction_delays_nothing() -> None:
    replies = [asking(("take", {"x": 1})), DONE]
    speculation = predicting(replies, after_s=2.0)
    stock, _ = play(replies, take, None)
    ours, received = play(replies, take, speculation)
    assert ours.duration_s == stock.duration_s
    (speculator,) = speculation.speculators
    assert isinstance(speculator, GuessingSpeculator)
    assert speculator.num_cancelled == 2
    assert len(received) == 1


@pytest.mark.parametrize("together", [False, True])
def test_17_a_read_after_a_write_sees_the_write(together: bool) -> None:
    """Across turns with results that outlive them, and within one answer."""
    file = ["old"]

    def tools(log: ToolLog) -> list[BaseTool]:
        file[:] = ["old"]

        async def read(path: str) -> str:
            """Read the file."""
            content = file[0]
            await log.run("read", content)
            return content

        async def write(path: str, text: str) -> str:
            """Write the file."""
            await log.run("write", text)
            file[0] = text
            return "written"

        return [*mark([tool(read)], reuse="ttl"), tool(write)]

    read, write = ("read", {"path": "f"}), ("write", {"path": "f", "text": "new"})
    replies = [asking(read), asking(write, read) if together else asking(write), asking(read), DONE]
    guesses = [[read], [read], [read]]

    async def main(speculation: Speculation | None, log: ToolLog) -> Seen:
        return await run(build(replies, tools(log), speculation).compile())

    speculation, log, stock_log = guessing(*guesses), ToolLog(lambda *_: 0.4), ToolLog(lambda *_: 0.4)
    ours = run_virtual(lambda: main(speculation, log))
    stock = run_virtual(lambda: main(None, stock_log))
    assert ours.messages == stock.messages
    assert "new" in repr(ours.messages[-2])
    assert outcomes(speculation)[0] >= 2
    assert log.counts("started")["write", "new"] == 1


def test_17_a_write_that_a_resumed_run_begins_with_is_a_write() -> None:
    """No model has been called in that run yet, and the result belongs to a scope that outlives runs."""
    file = ["old"]

    async def read(path: str) -> str:
        """Read the file."""
        return file[0]

    async def write(path: str, text: str) -> str:
        """Write the file."""
        file[0] = text
        return "written"

    reading, writing = ("read", {"path": "f"}), ("write", {"path": "f", "text": "new"})
    replies = [asking(reading), asking(writing), asking(reading), DONE]

    async def main(speculation: Speculation | None) -> Seen:
        file[:] = ["old"]
        tools = [*mark([tool(read)], reuse="ttl"), tool(write)]
        graph = build(replies, tools, speculation).compile(checkpointer=InMemorySaver())
        config: Any = {"configurable": {"thread_id": "t"}}
        num_steps = 0
        async for _ in graph.astream({"messages": [HumanMessage("go")]}, config, stream_mode="updates"):
            num_steps += 1
            if num_steps == 2:  # once the first answer is served, the human looks at each call of a tool
                break
        await run(graph, None, config=config, interrupt_before=["tools"])
        return await run(graph, None, config=config)

    speculation = guessing([reading], [], [reading], [])
    speculation = Speculation(speculation.speculators, scope=lambda call, context: "everyone")
    ours, stock = run_virtual(lambda: main(speculation)), run_virtual(lambda: main(None))
    assert ours.messages == stock.messages
    assert "new" in repr(ours.messages[-2])
    assert outcomes(speculation) == (2, 0, 0)


def test_18_a_tool_without_credentials_rests_until_it_works() -> None:
    class DeniedError(Exception):
        pass

    valid = [False]

    def secured(x: int) -> str:
        """Need a token."""
        if not valid[0]:
            raise DeniedError("401")
        return str(x)

    def others(received: list[Any]) -> list[BaseTool]:
        async def log_in() -> str:
            """Get a token."""
            valid[0] = True
            return "in"

        return [tool(log_in)]

    secure = [("secured", {"x": n}) for n in range(5)]
    replies = [asking(secure[0]), asking(secure[1]), asking(("log_in", {})), asking(secure[2]), asking(secure[3]), DONE]
    speculation = predicting(replies)
    valid[0] = False
    stock, _ = play(replies, secured, None, others)
    valid[0] = False
    ours, received = play(replies, secured, speculation, others)
    assert ours.messages == stock.messages
    assert [each["x"] for each in received] == [0, 0, 1, 2, 3]
    statistics = speculation.statistics().tools["secured"]
    assert (statistics.num_runs_failed, statistics.num_skipped, statistics.num_hits) == (1, 2, 1)


def test_19_a_declined_tool_never_runs() -> None:
    """A node that asks, and a tool that needs approval; see `test_human_in_the_loop.py` for the middleware."""
    ran: list[str] = []

    async def delete(path: str) -> str:
        """Delete a file."""
        if interrupt(f"delete {path}?") != "yes":
            return "declined"
        ran.append(path)
        return "deleted"

    replies = [asking(("delete", {"path": "f"})), DONE]
    speculation = predicting(replies)

    async def main() -> Seen:
        tools = [speculatable(tool(delete), needs_approval=True)]
        graph = build(replies, tools, speculation).compile(checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "t"}}
        await run(graph, config=config)
        return await run(graph, Command(resume="no"), config=config)

    assert "declined" in repr(run_virtual(main).messages[-2])
    assert ran == []
    assert speculation.statistics().num_launched == 0


@pytest.mark.parametrize("shared", [False, True])
def test_20_two_tenants_share_nothing_unless_told_so(shared: bool) -> None:
    ran: list[str] = []

    async def whoami(x: int) -> str:
        """Tell whose run it is."""
        from langgraph.config import get_config

        tenant = str(get_config()["configurable"]["tenant"])
        ran.append(tenant)
        await asyncio.sleep(0.4)
        return tenant

    replies = [asking(("whoami", {"x": 1})), DONE]
    scope = (lambda call, context: "everyone") if shared else None
    speculation = predicting(replies, scope=scope)
    graph = build(replies, mark([tool(whoami)], reuse="ttl"), speculation).compile()

    async def ask(tenant: str) -> str:
        config: Any = {"configurable": {"tenant": tenant, "thread_id": tenant}}
        return str((await graph.ainvoke({"messages": [HumanMessage("go")]}, config))["messages"][2].content)

    async def main() -> list[str]:
        return await asyncio.gather(ask("a"), ask("b"))

    answers = run_virtual(main)
    assert answers == (["a", "a"] if shared else ["a", "b"])
    assert sorted(ran) == (["a"] if shared else ["a", "b"])
    assert outcomes(speculation) == (2, 0, 0)


def query(text: str, limit: int = 10, order: str = "asc") -> str:
    """Ask a database."""
    return f"{text} {limit} {order}"


def test_21_order_of_keys_and_defaults_spelled_out() -> None:
    speculation = guessing([("query", {"order": "asc", "text": "a"})], [("query", {"text": "b", "limit": 10})])
    replies = [asking(("query", {"text": "a", "limit": 10})), asking(("query", {"text": "b"})), DONE]
    compare(replies, query, speculation)
    assert outcomes(speculation) == (2, 0, 0)


@pytest.mark.parametrize("guessed", ["Paris", "paris ", " paris", "PARIS"])
def test_22_case_and_outer_spaces_matter(guessed: str) -> None:
    speculation = guessing([("query", {"text": guessed})])
    compare([asking(("query", {"text": "paris"})), DONE], query, speculation)
    assert outcomes(speculation) == (0, 0, 1)


def test_23_the_order_of_a_list_matters() -> None:
    speculation = guessing([("take", {"x": ["a", "b"]})])
    compare([asking(("take", {"x": ["b", "a"]})), DONE], take, speculation)
    assert outcomes(speculation) == (0, 0, 1)

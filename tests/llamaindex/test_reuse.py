"""Whose results are whose: across turns, across writes, across runs that share an agent."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest
from llama_index.core.agent.workflow import ToolCallResult
from llama_index.core.tools import FunctionTool
from llama_index_instrumentation.dispatcher import instrument_tags

from spectool_core import RunContext, Speculation, ToolCall, speculatable
from tests.guessing import Call, Guess, GuessingSpeculator, Reply, outcomes, predicting
from tests.llamaindex.agents import Seen, alone, function_agent, run
from tests.llamaindex.clock import run_virtual
from tests.llamaindex.comparing import by_call, compare
from tests.llamaindex.recording import without_order
from tests.llamaindex.scripted import ScriptedLLM
from tests.llamaindex.tools import make_tools
from tests.tool_log import ToolLog

LOOKUP = ("lookup", {"q": "a"})
DONE = Reply(text="done")


def asking(*calls: tuple[str, dict[str, Any]], generation_s: float = 1.0) -> Reply:
    return Reply(tuple(Call(name, args, f"id-{n}") for n, (name, args) in enumerate(calls)), generation_s=generation_s)


def lasting(log: ToolLog, **policy: Any) -> list[Any]:
    """The tools, with a `lookup` whose results outlive their turn."""
    lookup, *others = make_tools(log)
    return [speculatable(lookup, reuse="ttl", **policy), *others]


def guessing_once(*calls: tuple[str, dict[str, Any]]) -> Speculation:
    """A speculator that says something in the first turn only."""
    return Speculation([GuessingSpeculator([Guess(tuple(ToolCall(*call) for call in calls))])])


@pytest.mark.parametrize("in_workflow", [False, True])
def test_a_result_is_used_in_later_turns(in_workflow: bool) -> None:
    replies = [asking(LOOKUP), asking(("search", {"input": "b"})), asking(LOOKUP), DONE]

    def make(log: ToolLog, given: Speculation | None) -> Any:
        agent = function_agent(replies, lasting(log), given)
        return alone(agent) if in_workflow else agent

    speculation = guessing_once(LOOKUP)
    compared = compare(make, speculation)
    assert compared.log.counts("started") == {("lookup", "a1"): 1, ("search", "b"): 1}
    assert outcomes(speculation, "lookup") == (2, 0, 0)
    assert compared.saved_s == pytest.approx(0.8)


def test_a_guess_that_comes_true_later() -> None:
    replies = [asking(("search", {"input": "b"})), asking(LOOKUP), DONE]
    speculation = guessing_once(LOOKUP)
    compared = compare(lambda log, given: function_agent(replies, lasting(log), given), speculation)
    assert compared.log.counts("started") == {("lookup", "a1"): 1, ("search", "b"): 1}
    assert outcomes(speculation, "lookup") == (1, 0, 0)


@pytest.mark.parametrize("write", [("note", {"text": "n"}), ("remember", {"text": "r"}), ("unknown", {})])
@pytest.mark.parametrize("in_workflow", [False, True])
def test_an_unmarked_tool_makes_what_was_read_stale(write: tuple[str, dict[str, Any]], in_workflow: bool) -> None:
    replies = [asking(LOOKUP), asking(write), asking(LOOKUP), DONE]

    def make(log: ToolLog, given: Speculation | None) -> Any:
        agent = function_agent(replies, lasting(log), given)
        return alone(agent) if in_workflow else agent

    speculation = guessing_once(LOOKUP)
    compared = compare(make, speculation)
    assert compared.log.counts("started")["lookup", "a1"] == 2
    assert outcomes(speculation, "lookup") == (1, 0, 1)


def test_a_write_of_something_else_does_not() -> None:
    replies = [asking(LOOKUP), asking(("note", {"text": "n"})), asking(LOOKUP), DONE]

    def make(log: ToolLog, given: Speculation | None) -> Any:
        tools = lasting(log, reads=["docs"])
        speculatable(tools[6], writes=["notes"])
        assert tools[6].metadata.name == "note"
        return function_agent(replies, tools, given)

    speculation = guessing_once(LOOKUP)
    compared = compare(make, speculation)
    assert compared.log.counts("started") == {("lookup", "a1"): 1, ("note", "n"): 1}
    assert outcomes(speculation, "lookup") == (2, 0, 0)


@pytest.mark.parametrize("together", [False, True])
def test_a_read_after_a_write_sees_the_write(together: bool) -> None:
    """Across turns with results that outlive them, and within one answer."""
    file = ["old"]

    def make(log: ToolLog, given: Speculation | None) -> Any:
        file[:] = ["old"]

        async def read(path: str) -> str:
            """Read the file."""
            content = file[0]
            await log.run("read", content)
            return content

        async def write(path: str, text: str) -> str:
            """Write the file."""
            await log.run("write", text)
            file[:] = [text]
            return "written"

        tools = [speculatable(reuse="ttl")(read), write]
        return function_agent(replies, [FunctionTool.from_defaults(async_fn=function) for function in tools], given)

    reading, writing = ("read", {"path": "f"}), ("write", {"path": "f", "text": "new"})
    replies = [asking(reading), asking(writing, reading) if together else asking(writing), asking(reading), DONE]
    speculation = predicting(replies)
    # Beside a write that takes as long, stock's own read may see either: it is given less time.
    compared = compare(
        make, speculation, latency_s=lambda name, _: 0.4 if name == "read" else 0.9, in_order=not together
    )
    assert compared.ours.tools_said[-1] == "new"
    assert outcomes(speculation, "read")[0] >= 2


def test_a_result_lives_for_its_time() -> None:
    replies = [asking(LOOKUP), asking(("search", {"input": "b"}), generation_s=40.0), asking(LOOKUP), DONE]
    for ttl_s, num_runs in ((60.0, 1), (30.0, 2)):
        speculation = guessing_once(LOOKUP)
        compared = compare(
            lambda log, given, ttl_s=ttl_s: function_agent(replies, lasting(log, ttl_s=ttl_s), given), speculation
        )
        assert compared.log.counts("started")["lookup", "a1"] == num_runs


def test_results_end_with_their_run() -> None:
    """Another run of the same agent begins with an empty hand."""
    replies = [asking(LOOKUP), DONE]
    speculation = guessing_once(LOOKUP)
    log = ToolLog(lambda *_: 0.4)

    async def main() -> None:
        agent = function_agent(replies, lasting(log), speculation)
        for _ in range(2):
            await run(agent)

    run_virtual(main)
    assert log.counts("started") == {("lookup", "a1"): 2}
    assert outcomes(speculation) == (2, 0, 0)


tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


def tenants(log: ToolLog) -> FunctionTool:
    async def whoami(x: int = 1) -> str:
        """Tell whose run it is."""
        return await log.run("whoami", tenant.get())

    return FunctionTool.from_defaults(async_fn=speculatable(reuse="ttl")(whoami))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("in_workflow", [False, True])
def test_concurrent_runs_of_one_agent_share_nothing_unless_told_so(shared: bool, in_workflow: bool) -> None:
    contexts: list[RunContext] = []

    def everyone(call: ToolCall, context: RunContext) -> str:
        contexts.append(context)
        return "everyone" if shared else str(context.configurable["tenant"])

    replies = [asking(("whoami", {"x": 1})), asking(("whoami", {})), DONE]
    speculation = predicting(replies, scope=everyone)
    log = ToolLog(lambda *_: 0.4)

    async def ask(agent: Any, name: str) -> Seen:
        tenant.set(name)
        with instrument_tags({"tenant": name}):
            return await run(agent)

    async def main() -> list[Seen]:
        agent = function_agent(replies, [tenants(log)], speculation)
        agent = alone(agent) if in_workflow else agent
        return await asyncio.gather(ask(agent, "a"), ask(agent, "b"))

    first, second = (seen.tools_said for seen in run_virtual(main))
    if shared:
        assert first == second
        assert log.counts("started").total() == 1
    else:
        assert (first, second) == (["whoami of a"] * 2, ["whoami of b"] * 2)
        assert log.counts("started") == {("whoami", "a"): 1, ("whoami", "b"): 1}
    assert {context.configurable["tenant"] for context in contexts} == {"a", "b"}
    assert len({context.run for context in contexts}) == 2
    assert outcomes(speculation) == (4, 0, 0)


@pytest.mark.parametrize("num_runs", [2, 5])
def test_concurrent_runs_of_one_agent_are_the_runs_they_would_have_been(num_runs: int) -> None:
    """Each starts a little later than the last, so that their turns overlap."""
    replies = [asking(LOOKUP), asking(("search", {"input": "b"}), ("weigh", {"q": "c"})), DONE]

    def play(given: Speculation | None) -> tuple[list[Seen], ToolLog]:
        log = ToolLog(lambda name, _: 0.7 if name == "weigh" else 0.4)

        async def later(agent: Any, delay_s: float) -> Seen:
            await asyncio.sleep(delay_s)
            return await run(agent)

        async def main() -> list[Seen]:
            agent = function_agent(ScriptedLLM(replies=replies), make_tools(log), given)
            return await asyncio.gather(*(later(agent, 0.3 * n) for n in range(num_runs)))

        return run_virtual(main), log

    speculation = predicting(replies)
    stock, stock_log = play(None)
    ours, log = play(speculation)
    for mine, theirs in zip(ours, stock, strict=True):
        assert by_call(mine.events) == by_call(theirs.events)
        for what in ("result", "error", "memory"):
            assert without_order(getattr(mine, what)) == without_order(getattr(theirs, what)), what
        assert theirs.duration_s - mine.duration_s == pytest.approx(0.4 + 0.7)
    assert log.counts("started") == stock_log.counts("started")
    assert set(log.counts("started").values()) == {num_runs}
    assert outcomes(speculation) == (3 * num_runs, 0, 0)


def test_no_more_early_runs_at_once_than_stock_runs_tools_at_once() -> None:
    """A step of LlamaIndex has four workers."""
    calls = [("lookup", {"q": f"q{n}"}) for n in range(6)]
    replies = [asking(*calls, generation_s=10.0), DONE]
    running, most = [0], [0]

    def make(log: ToolLog, given: Speculation | None) -> Any:
        async def lookup(q: str) -> str:
            """Look something up."""
            running[0] += 1
            most[0] = max(most[0], running[0])
            result = await log.run("lookup", q)
            running[0] -= 1
            return result

        return function_agent(replies, [FunctionTool.from_defaults(async_fn=speculatable(lookup))], given)

    speculation = predicting(replies, max_runs_per_tool=8, max_concurrency_per_tool=8)
    compared = compare(make, speculation, in_order=False)
    assert most == [4]
    assert outcomes(speculation) == (6, 0, 0)
    assert compared.saved_s == pytest.approx(0.8)


@pytest.mark.parametrize("shape", ["agent", "workflow"])
def test_the_cap_is_of_the_run_and_not_of_the_process(shape: str) -> None:
    calls = [("lookup", {"q": f"q{n}"}) for n in range(3)]
    replies = [asking(*calls), DONE]
    speculation = predicting(replies, max_concurrency_per_tool=32)
    log = ToolLog(lambda *_: 0.7)

    async def main() -> list[Seen]:
        agent = function_agent(replies, make_tools(log), speculation)
        agent = agent if shape == "agent" else alone(agent)
        return await asyncio.gather(*(run(agent) for _ in range(4)))

    assert [seen.duration_s for seen in run_virtual(main)] == [pytest.approx(2.0)] * 4
    assert outcomes(speculation) == (12, 0, 0)


def test_whoever_changes_a_result_changes_their_own() -> None:
    """Each call gets a copy, also those that share one run; as in stock, where each has its own run."""
    weigh, search = ("weigh", {"q": "a"}), ("search", {"input": "b"})
    replies = [asking(weigh, weigh, search), asking(search, weigh), DONE]
    speculation = predicting(replies)
    log = ToolLog(lambda *_: 0.4)
    outputs: list[Any] = []

    async def main() -> None:
        tools = [speculatable(tool, reuse="ttl") for tool in make_tools(log)[:6]]
        handler = function_agent(replies, tools, speculation).run(user_msg="go")
        async for event in handler.stream_events():
            if isinstance(event, ToolCallResult):
                output = event.tool_output
                outputs.append((output.tool_name, output.content, str(output.raw_output)))
                output.blocks[0].text = "spoiled"
                if isinstance(output.raw_output, dict):
                    output.raw_output["weighed"].append("spoiled")
                else:
                    output.raw_output.response = "spoiled"
        await handler

    run_virtual(main)
    assert log.counts("started") == {("weigh", "a kg"): 1, ("search", "b"): 1}
    weighed = "{'result': 'weigh of a kg', 'weighed': ['a']}"
    assert sorted(outputs) == [("search", "search of b", "search of b")] * 2 + [("weigh", weighed, weighed)] * 3

"""Tools that block: run early on the library's own threads, on a real clock with latches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from llama_index.core.agent.workflow import ToolCall, ToolCallResult
from llama_index.core.tools import BaseTool, FunctionTool, ToolMetadata, ToolOutput

from spectool_core import Speculation, speculatable
from spectool_core.events import Hook, RunFinished
from spectool_core.testing import FakeTool, Latch, LeakCheck
from tests.guessing import Call, Reply, outcomes, predicting
from tests.llamaindex.agents import GiveUp, Seen, alone, function_agent, run
from tests.llamaindex.comparing import assert_equal
from tests.llamaindex.scripted import ScriptedLLM

REPLIES = [Reply((Call("lookup", {"query": "a"}, "1"),), generation_s=0.0), Reply(text="done", generation_s=0.0)]


class Plain(BaseTool):
    """A tool of the kind that LlamaIndex adapts: sync, with one input."""

    def __init__(self, lookup: FakeTool) -> None:
        self._lookup = lookup

    @property
    def metadata(self) -> ToolMetadata:
        return ToolMetadata("Look something up.", name="lookup")

    def __call__(self, input: Any) -> ToolOutput:
        result = self._lookup.function(query=input)
        return ToolOutput(str(self.metadata.name), str(result), raw_input={"input": input}, raw_output=result)


def tool_of(kind: str, lookup: FakeTool) -> BaseTool:
    return speculatable(FunctionTool.from_defaults(lookup.function) if kind == "function" else Plain(lookup))


def replies_of(kind: str) -> list[Reply]:
    name = "query" if kind == "function" else "input"
    return [Reply((Call("lookup", {name: "a"}, "1"),), generation_s=0.0), REPLIES[1]]


def agent_of(kind: str, lookup: FakeTool, given: Speculation | None, latch: Latch | None = None) -> Any:
    llm = ScriptedLLM(replies=replies_of(kind), latch=latch)
    return function_agent(llm, [tool_of(kind, lookup)], given)


def opening(latch: Latch) -> Hook:
    """Lets the main model answer when an early run has ended."""
    return lambda event: latch.open() if isinstance(event, RunFinished) else None


def threads(used: list[str]) -> Any:
    def result(arguments: Mapping[str, Any]) -> str:
        used.append(threading.current_thread().name)
        return f"found {arguments['query']}"

    return result


@pytest.mark.parametrize("kind", ["function", "plain"])
@pytest.mark.parametrize("in_workflow", [False, True])
def test_a_hit_of_a_tool_that_blocks(kind: str, in_workflow: bool) -> None:
    latch = Latch()

    async def play(given: Speculation | None) -> tuple[Seen, FakeTool, list[str]]:
        used: list[str] = []
        lookup = FakeTool("lookup", result=threads(used))
        agent = agent_of(kind, lookup, given, latch if given is not None else None)
        return await run(alone(agent) if in_workflow else agent), lookup, used

    speculation = predicting(replies_of(kind), after_s=0.0, hooks=[opening(latch)])
    stock, _, stock_threads = asyncio.run(play(None))
    ours, lookup, used = asyncio.run(play(speculation))
    stock.threads_left = []  # those of the loop's default executor, which a hit does not need
    ours.threads_left = [name for name in ours.threads_left if not name.startswith(("asyncio", "spectool"))]
    assert_equal(ours, stock, in_order=True)
    assert ours.tools_said == ["found a"]
    assert lookup.statistics().num_started == 1
    assert (stock_threads[0].startswith("asyncio"), used[0].startswith("spectool")) == (True, True)
    assert outcomes(speculation) == (1, 0, 0)
    speculation.close()


@pytest.mark.parametrize("kind", ["function", "plain"])
def test_a_join_of_a_tool_that_blocks(kind: str) -> None:
    async def play() -> None:
        held, latch = Latch(), Latch()
        lookup = FakeTool("lookup", result="found", latch=held)
        handler = agent_of(kind, lookup, speculation, latch).run(user_msg="go")
        await held.until_arrived(1)
        latch.open()
        async for event in handler.stream_events():
            if isinstance(event, ToolCall):
                for _ in range(50):  # until the step that has said so waits for the tool
                    await asyncio.sleep(0)
                held.open()
            if isinstance(event, ToolCallResult):
                assert event.tool_output.content == "found"
        await handler
        assert lookup.statistics().num_started == 1

    speculation = predicting(replies_of(kind), after_s=0.0)
    asyncio.run(play())
    assert outcomes(speculation) == (0, 1, 0)
    speculation.close()


@pytest.mark.parametrize("how", ["cancel_run", "stop_awaiting", "abort"])
def test_a_tool_that_blocks_cannot_be_cancelled_and_its_result_is_dropped(how: Any) -> None:
    async def main() -> None:
        held, latch = Latch(), Latch()
        lookup = FakeTool("lookup", result="found", latch=held)
        async with LeakCheck(allowed_threads=("asyncio_", "spectool")):
            seen = await run(agent_of("function", lookup, speculation, latch), give_up=GiveUp(0.05, how))
            assert seen.error is not None
            latch.open()  # for the step that stock forgets
            held.open()
            await lookup.until(lambda counts: counts.num_finished == 1)
        assert lookup.statistics().num_started == 1

    speculation = predicting(REPLIES, after_s=0.0)
    asyncio.run(main())
    statistics = speculation.statistics()
    assert (statistics.num_launched, statistics.num_wasted) == (1, 1)
    assert statistics.num_settled_turns == statistics.num_turns
    speculation.close()


def test_an_error_of_a_tool_that_blocks_is_stocks_own() -> None:
    latch = Latch()

    async def play(given: Speculation | None) -> tuple[Seen, FakeTool]:
        lookup = FakeTool("lookup", error=ConnectionError("unreachable"))
        return await run(agent_of("function", lookup, given, latch if given is not None else None)), lookup

    speculation = predicting(REPLIES, after_s=0.0, hooks=[opening(latch)])
    stock, _ = asyncio.run(play(None))
    ours, lookup = asyncio.run(play(speculation))
    stock.threads_left = ours.threads_left = []
    assert_equal(ours, stock, in_order=True)
    assert ours.tools_said == ["unreachable"]
    assert lookup.statistics().num_failed == 2
    assert outcomes(speculation) == (0, 0, 1)
    speculation.close()

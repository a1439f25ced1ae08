"""Fake tools: what they count, how they look to a framework, and how latches order them."""

from __future__ import annotations

import asyncio
import inspect
import threading
import typing
from concurrent.futures import ThreadPoolExecutor

import pytest

from spectool_core.errors import ConfigurationError
from spectool_core.testing import FakeTool, FakeToolStatistics, Latch, run_virtual


def test_coroutine_takes_its_latency_exactly():
    tool = FakeTool("search", latency_s=lambda arguments: len(arguments["query"]) / 10, result="found")

    async def main() -> tuple[str, float]:
        return await tool.coroutine(query="abc"), asyncio.get_running_loop().time()

    assert run_virtual(main) == ("found", 0.3)
    assert tool.statistics() == FakeToolStatistics(num_started=1, num_finished=1, max_concurrent=1)
    assert tool.calls == ({"query": "abc"},)


def test_runs_are_counted_whatever_becomes_of_them():
    tool = FakeTool(
        "search", latency_s=1, error=lambda arguments: KeyError("bad") if arguments["query"] == "bad" else None
    )

    async def main() -> None:
        runs = [asyncio.create_task(tool.coroutine(query)) for query in ("good", "bad", "gone")]
        await asyncio.sleep(0.5)
        assert tool.statistics().num_running == 3
        runs[2].cancel()
        results = await asyncio.gather(*runs, return_exceptions=True)
        assert [type(result) for result in results] == [str, KeyError, asyncio.CancelledError]

    run_virtual(main)
    assert tool.statistics() == FakeToolStatistics(
        num_started=3, num_finished=1, num_failed=1, num_cancelled=1, max_concurrent=3
    )
    assert tool.statistics().num_running == 0


def test_result_may_depend_on_the_arguments():
    tool = FakeTool(
        "add", parameters={"a": int, "b": (int, 2)}, result=lambda arguments: arguments["a"] + arguments["b"]
    )
    assert tool.function(1) == 3
    assert tool.calls == ({"a": 1, "b": 2},)


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_tool_looks_like_a_function_of_its_parameters(kind):
    tool = FakeTool("search", parameters={"query": str, "limit": (int, 5)}, doc="Search.")
    function = getattr(tool, kind)

    assert function.__name__ == "search"
    assert inspect.getdoc(function) == "Search."
    assert str(inspect.signature(function)) == "(query: str, limit: int = 5) -> Any"
    assert typing.get_type_hints(function) == {"query": str, "limit": int, "return": typing.Any}
    assert inspect.iscoroutinefunction(function) == (kind == "coroutine")
    with pytest.raises(TypeError, match="missing a required argument: 'query'"):
        tool.function(limit=1)
    assert tool.statistics().num_started == 0


def test_latch_with_parties_proves_that_threads_run_at_once():
    tool = FakeTool("search", latch=Latch(num_parties=3))
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(tool.function, "abc")) == ["ok"] * 3
    assert tool.statistics().max_concurrent == 3


def test_latch_orders_a_sync_tool_without_wall_time():
    latch = Latch()
    tool = FakeTool("search", latch=latch)
    thread = threading.Thread(target=tool.function, args=("q",))
    thread.start()
    tool.wait_until(lambda counts: counts.num_running == 1)
    latch.open()
    thread.join()
    assert tool.statistics().num_finished == 1


async def test_latch_orders_an_async_tool_and_is_opened_from_another_thread():
    latch = Latch()
    tool = FakeTool("search", latch=latch)
    running = asyncio.create_task(tool.coroutine("q"))
    await tool.until(lambda counts: counts.num_running == 1)
    threading.Thread(target=latch.open).start()
    assert await running == "ok"


async def test_closed_latch_holds_the_next():
    latch = Latch(timeout_s=0.001)
    latch.open()
    await latch.pass_through()
    latch.close()
    with pytest.raises(TimeoutError):
        await latch.pass_through()
    with pytest.raises(TimeoutError):
        latch.wait()
    await latch.until_arrived(3)
    latch.wait_until_arrived(3)
    assert latch.statistics().num_arrived == 3


def test_bad_values_are_refused():
    with pytest.raises(ConfigurationError, match="latency_s=-1"):
        FakeTool("search", latency_s=-1)
    with pytest.raises(ConfigurationError, match="num_parties=0"):
        Latch(num_parties=0)

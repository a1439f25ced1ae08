from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectool_core import model
from spectool_core.calls import ToolCall
from spectool_core.events import (
    RunFinished,
)
from spectool_core.speculation import Speculation
from tests.core.fakes import (
    FromFunction,
    Predicts,
    Recorder,
    call,
    no_tasks,
    now,
    search,
    take_turn,
    toolbox_of,
    virtual,
)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 1.0, 2.0])
@pytest.mark.parametrize("speculator_s", [0.1, 0.2, 0.5, 1.0, 1.25, 1.9, 2.5])
@pytest.mark.parametrize("hits", ["", "1", "0", "10110", "11111", "00000"])
@virtual
async def test_a_run_takes_as_long_as_the_model_says_to_the_microsecond(
    ratio: float, speculator_s: float, hits: str
) -> None:
    generation_s = 2.0
    tool_s = ratio * generation_s
    tool = search(tool_s)
    toolbox = toolbox_of(tool)
    queries = [str(number) for number in range(len(hits))]
    turn_number = 0

    async def predict() -> AsyncIterator[ToolCall]:
        if turn_number < len(hits):
            right = hits[turn_number] == "1"
            await asyncio.sleep(speculator_s)
            yield call(query=queries[turn_number] if right else "wrong")

    speculation = Speculation([FromFunction(predict)])
    for turn_number, query in enumerate(queries):
        outcome = await take_turn(speculation, toolbox, call(query=query), generation_s=generation_s)
        in_time = speculator_s < generation_s and hits[turn_number] == "1"
        assert (outcome[0][0] != "miss") == in_time
    turn_number = len(hits)
    await take_turn(speculation, toolbox, generation_s=generation_s)

    statistics = speculation.statistics().total
    expected = model.run_time(
        len(hits),
        statistics.num_hits + statistics.num_joins,
        generation_s=generation_s,
        speculator_s=speculator_s,
        tool_s=tool_s,
    )
    assert now() == pytest.approx(expected, abs=1e-6)
    standard_s = model.run_standard_time(len(hits), generation_s=generation_s, tool_s=tool_s)
    assert now() <= standard_s + 1e-6
    assert statistics.saved_s == pytest.approx(standard_s - now(), abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(
    generation=st.integers(0, 16),
    delays=st.lists(st.tuples(st.integers(0, 20), st.sampled_from("abcd")), max_size=5),
    asked=st.lists(st.sampled_from("abc"), max_size=4),
    latencies=st.fixed_dictionaries({query: st.integers(0, 24) for query in "abcd"}),
    max_concurrency=st.integers(1, 3),
)
def test_no_turn_is_slower_than_stock_and_every_result_is_that_of_one_run(
    generation: int,
    delays: list[tuple[int, str]],
    asked: list[str],
    latencies: dict[str, int],
    max_concurrency: int,
) -> None:
    @virtual
    async def scenario() -> None:
        tool, hook = search(lambda arguments: latencies[arguments["query"]] / 8), Recorder()
        speculators = [Predicts(call(query=query), delay_s=delay / 8) for delay, query in delays]
        speculation = Speculation(speculators, hooks=[hook], max_concurrency=max_concurrency)
        calls = [call(query=query, id=str(number)) for number, query in enumerate(asked)]
        outcomes = await take_turn(speculation, toolbox_of(tool), *calls, generation_s=generation / 8)
        stock_s = generation / 8 + max((latencies[query] / 8 for query in asked), default=0.0)
        assert now() <= stock_s
        for query, (_, result) in zip(asked, outcomes, strict=True):
            assert result.startswith(f"{query}#")
        await no_tasks()
        statistics = speculation.statistics()
        assert tool.statistics().num_running == 0
        assert all(speculator.num_active == 0 for speculator in speculators)
        assert statistics.total.num_hits + statistics.total.num_joins + statistics.total.num_misses == len(asked)
        assert statistics.num_settled_turns == 1
        assert statistics.num_launched == statistics.total.num_speculative_runs
        # No call that succeeded early is run again: every run beyond a call's own was wasted or queued.
        num_served_runs = statistics.num_launched - statistics.num_wasted
        num_misses = statistics.total.num_misses
        num_begun_and_wasted = sum(event.started_s is not None for event in hook.of(RunFinished)) - num_served_runs
        assert tool.statistics().num_started == num_misses + num_served_runs + num_begun_and_wasted

    scenario()

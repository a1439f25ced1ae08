from __future__ import annotations

import asyncio

import pytest

from spectool_core.annotation import ToolPolicy
from spectool_core.calls import ToolCall
from spectool_core.events import (
    RunFinished,
    SpeculatorFinished,
)
from spectool_core.runs import NotReplayable, RunContext
from spectool_core.speculation import Speculation
from spectool_core.turn import Claimed
from tests.core.fakes import (
    RUN,
    Predicts,
    Recorder,
    call,
    now,
    observed,
    search,
    skips,
    speculation_of,
    start,
    take_turn,
    toolbox_of,
    virtual,
)

# Rest


@virtual
async def test_a_tool_that_failed_rests_until_a_real_call_succeeded() -> None:
    """Case 18."""
    error: list[BaseException | None] = [PermissionError("401")]
    tool, hook = search(0.5, error=lambda _: error[0]), Recorder()
    toolbox = toolbox_of(tool)
    speculation = speculation_of(call(), hooks=[hook])
    bound = toolbox.tool("search")

    async def missed() -> bool:
        turn = start(speculation, toolbox)
        await asyncio.sleep(1)
        turn.answer([call()])
        return (await turn.claim(call())).outcome == "miss"

    assert await missed()
    assert tool.statistics().num_started == 1
    assert await missed()
    speculation.observe(bound, observed(succeeded=False))
    assert await missed()
    speculation.observe(object(), observed(succeeded=True))
    assert await missed()
    assert tool.statistics().num_started == 1
    assert skips(hook) == ["resting"] * 3
    error[0] = None
    speculation.observe(bound, observed(succeeded=True))
    assert not await missed()
    assert tool.statistics().num_started == 2


@virtual
async def test_a_tool_that_cannot_be_replayed_rests_for_good() -> None:
    tool, hook = search(0.5, error=NotReplayable("wrote to the stream")), Recorder()
    toolbox = toolbox_of(tool)
    speculation = speculation_of(call(), hooks=[hook])
    for _ in range(3):
        turn = start(speculation, toolbox)
        await asyncio.sleep(1)
        turn.answer([call()])
        assert await turn.claim(call()) == Claimed("miss")
        speculation.observe(toolbox.tool("search"), observed(succeeded=True))
    assert tool.statistics().num_started == 1
    assert [event.outcome for event in hook.of(RunFinished)] == ["not_replayable"]


@virtual
async def test_neither_a_cancelled_nor_a_timed_out_run_makes_its_tool_rest() -> None:
    tool = search(10)
    toolbox = toolbox_of(tool)
    speculation = speculation_of(call(), timeout_s=0.5)
    turn = start(speculation, toolbox)
    await asyncio.sleep(0.5)
    turn.answer([])  # cancelled
    turn = start(speculation, toolbox)
    await asyncio.sleep(1)  # timed out
    turn.answer([])
    turn = start(speculation, toolbox)
    await asyncio.sleep(0.5)
    assert tool.statistics().num_started == 3
    turn.answer([])


# Limits, permission, shadow


@virtual
async def test_the_limits_of_turn_and_tool_bound_what_is_started() -> None:
    tools = [search(1, name="a"), search(1, name="b")]
    predictions = [call("a", str(n)) for n in range(4)] + [call("b", str(n)) for n in range(4)]
    hook = Recorder()
    speculation = Speculation(
        [Predicts(*predictions, delay_s=0.01)], hooks=[hook], max_runs_per_turn=5, max_runs_per_tool=3, max_runs=8
    )
    turn = start(speculation, toolbox_of(*tools))
    await asyncio.sleep(1)
    assert [tool.statistics().num_started for tool in tools] == [3, 2]
    assert skips(hook) == ["max_runs_per_tool", "max_runs_per_turn"]
    # The limit is used up and none of the runs is still queued, to be displaced: asking on would be a waste.
    assert hook.of(SpeculatorFinished)[0].num_calls == 7
    turn.answer([])
    turn = start(speculation, toolbox_of(*tools))
    await asyncio.sleep(1)
    assert [tool.statistics().num_started for tool in tools] == [6, 2]
    assert "max_runs" in skips(hook)
    turn.answer([])


@virtual
async def test_a_prediction_made_twice_runs_once() -> None:
    tool, hook = search(0.5), Recorder()
    speculation = Speculation([Predicts(call(id="a"), call(id="b")), Predicts(call())], hooks=[hook])
    assert [outcome for outcome, _ in await take_turn(speculation, toolbox_of(tool), call())] == ["hit"]
    assert tool.statistics().num_started == 1
    assert skips(hook) == ["duplicate", "duplicate"]


@pytest.mark.parametrize(("of_the_tool", "of_all", "ended_s"), [(0.5, 2.0, 0.75), (None, 2.0, 2.25), (4.0, 2.0, 4.25)])
@virtual
async def test_the_mark_of_the_tool_overrides_the_time_limit(
    of_the_tool: float | None, of_all: float, ended_s: float
) -> None:
    hook = Recorder()
    speculation = speculation_of(call(), timeout_s=of_all, hooks=[hook])
    turn = start(speculation, toolbox_of(search(60), policy=ToolPolicy(timeout_s=of_the_tool)))
    await asyncio.sleep(10)
    assert hook.of(RunFinished) == [RunFinished(1, "search", "fake", 0.25, ended_s, "timed_out")]
    turn.settle()


@virtual
async def test_a_run_that_timed_out_may_be_predicted_again_and_both_count() -> None:
    tool = search(10)
    speculation = Speculation([Predicts(call(), call(), delay_s=1)], timeout_s=0.5)
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(2.25)
    turn.answer([call()])
    claim = asyncio.create_task(turn.claim(call()))
    await asyncio.sleep(20)  # joined: the limit no longer applies
    assert claim.result() == Claimed("join", "x#1")
    statistics = speculation.statistics()
    assert (statistics.num_launched, statistics.num_wasted) == (2, 1)
    assert statistics.tools["search"].num_runs_timed_out == 1


@virtual
async def test_may_speculate_denies_single_launches() -> None:
    asked: list[tuple[ToolCall, RunContext]] = []

    def allow(call: ToolCall, context: RunContext) -> bool:
        asked.append((call, context))
        return call.arguments["query"] != "secret"

    tool, hook = search(0.5), Recorder()
    speculation = speculation_of(call(query="secret"), call(), may_speculate=allow, hooks=[hook])
    outcomes = await take_turn(speculation, toolbox_of(tool), call(), call(query="secret"))
    assert [outcome for outcome, _ in outcomes] == ["hit", "miss"]
    assert skips(hook) == ["denied"]
    assert asked == [(call(query="secret"), RUN), (call(), RUN)]


@virtual
async def test_shadow_mode_runs_nothing_but_counts() -> None:
    tool, hook = search(1), Recorder()
    speculation = speculation_of(call(), call(query="wrong"), hooks=[hook], mode="shadow")
    outcomes = await take_turn(speculation, toolbox_of(tool), call(id="a"), call(id="b"))
    assert outcomes == [("miss", "x#1"), ("miss", "x#2")]
    assert now() == 2.0
    statistics = speculation.statistics()
    assert (statistics.num_turns, statistics.num_predictions, statistics.num_launched) == (1, 2, 0)
    assert statistics.tools["search"].num_misses == 2
    assert statistics.tools["search"].acceptance_rate == 1.0  # what it would be worth
    assert statistics.tools["search"].num_speculative_runs == 0
    assert skips(hook) == ["shadow", "shadow", "shadow"]

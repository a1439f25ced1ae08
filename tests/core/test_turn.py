from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from spectool_core.annotation import ToolPolicy
from spectool_core.calls import ToolCall
from spectool_core.events import (
    CallResolved,
    RunFinished,
    SpeculatorFinished,
    TurnAnswered,
    TurnSettled,
    TurnStarted,
)
from spectool_core.speculation import Speculation
from spectool_core.testing import FakeTool
from spectool_core.turn import Claimed
from tests.core.fakes import (
    RUN,
    TTL,
    FakeToolbox,
    Predicts,
    Recorder,
    call,
    misses,
    no_tasks,
    now,
    search,
    skips,
    speculation_of,
    start,
    take_turn,
    toolbox_of,
    virtual,
)

# Hit, join, miss


@virtual
async def test_a_prediction_that_came_true_in_time_is_a_hit() -> None:
    tool, hook = search(0.5), Recorder()
    speculation = speculation_of(call(), hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call(id="call_0")])
    assert await turn.claim(call(id="call_0")) == Claimed("hit", "x#1")
    assert now() == 1.0
    assert hook.of(CallResolved) == [CallResolved(1, "search", "hit", "", 1.0, 0.5, 0.0, ("fake",), "fake")]
    assert hook.of(RunFinished) == [RunFinished(1, "search", "fake", 0.25, 0.75, "succeeded")]
    assert hook.of(TurnSettled) == [TurnSettled(1, 1.0, 1, 0)]
    assert tool.statistics().num_started == 1


@virtual
async def test_a_run_in_flight_is_joined_and_takes_only_what_is_left() -> None:
    tool, hook = search(2.0), Recorder()
    speculation = speculation_of(call(), hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call()])
    assert await turn.claim(call()) == Claimed("join", "x#1")
    assert now() == 2.25
    assert hook.of(CallResolved) == [CallResolved(1, "search", "join", "", 2.25, 0.75, 1.25, ("fake",), "fake")]
    assert tool.statistics().num_started == 1


@virtual
async def test_another_call_is_a_miss_and_the_loser_is_cancelled_at_once() -> None:
    tool, hook = search(10), Recorder()
    speculation = speculation_of(call(query="wrong"), hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call()])
    assert await turn.claim(call()) == Claimed("miss")
    assert now() == 1.0
    await no_tasks()
    assert tool.statistics().num_cancelled == 1
    assert hook.of(RunFinished) == [RunFinished(1, "search", "fake", 0.25, 1.0, "cancelled")]
    assert misses(hook) == ["not_predicted"]
    assert hook.of(TurnSettled) == [TurnSettled(1, 1.0, 1, 1)]


@virtual
async def test_no_speculators_no_cost() -> None:
    tool, hook = search(1), Recorder()
    speculation = speculation_of(hooks=[hook])
    assert await take_turn(speculation, toolbox_of(tool), call()) == [("miss", "x#1")]
    assert now() == 2.0
    assert [type(event) for event in hook.events] == [TurnStarted, TurnAnswered, CallResolved, TurnSettled]


@virtual
async def test_a_queued_prediction_is_dropped_and_the_models_call_runs() -> None:
    tool, hook = search(10), Recorder()
    speculation = speculation_of(call(query="a"), call(query="b"), hooks=[hook], max_concurrency_per_tool=1)
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call(query="b")])
    for _ in range(5):
        await asyncio.sleep(0)  # the slot that "a" held is free now
    assert await turn.claim(call(query="b")) == Claimed("miss")
    assert now() == 1.0
    await no_tasks()
    assert [arguments["query"] for arguments in tool.calls] == ["a"]
    assert {(event.started_s, event.outcome) for event in hook.of(RunFinished)} == {
        (0.25, "cancelled"),
        (None, "cancelled"),
    }


@virtual
async def test_a_prediction_that_comes_with_the_answer_delays_nothing() -> None:
    tool = search(5)
    speculation = speculation_of(call(), delay_s=1.0)
    assert await take_turn(speculation, toolbox_of(tool), call()) == [("miss", "x#1")]
    assert now() == 6.0
    assert tool.statistics().num_started == tool.statistics().num_finished == 1


@virtual
async def test_a_failed_run_is_a_miss_and_its_error_is_never_shown() -> None:
    fails = iter([RuntimeError("early"), None])
    tool, hook = search(0.5, error=lambda _: next(fails)), Recorder()
    speculation = speculation_of(call(), hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call()])
    assert await turn.claim(call()) == Claimed("miss")
    assert hook.of(RunFinished)[0].outcome == "failed"


@virtual
async def test_a_joined_run_that_fails_is_a_miss_when_it_fails() -> None:
    tool, hook = search(2, error=RuntimeError("early")), Recorder()
    speculation = speculation_of(call(), hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call()])
    assert await turn.claim(call()) == Claimed("miss")
    assert now() == 2.25
    assert hook.of(CallResolved) == [CallResolved(1, "search", "miss", "failed", 2.25, 0.0, 1.25, ("fake",))]


@virtual
async def test_two_joiners_of_a_run_that_fails_both_miss() -> None:
    tool, hook = search(2, error=RuntimeError("early")), Recorder()
    speculation = speculation_of(call(), hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    asked = [call(id="a"), call(id="b")]
    turn.answer(asked)
    assert await asyncio.gather(*map(turn.claim, asked)) == [Claimed("miss")] * 2
    assert misses(hook) == ["failed", "failed"]


@virtual
async def test_a_further_execution_of_a_served_call_runs_the_tool() -> None:
    tool, hook = search(0.25), Recorder()
    speculation = speculation_of(call(), call(query="y"), hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call(), call(query="y")])
    assert await turn.claim(call()) == Claimed("hit", "x#1")
    assert await turn.claim(call()) == Claimed("miss")
    assert (await turn.claim(call(query="y"))).outcome == "hit"
    assert await turn.claim(call(query="y")) == Claimed("miss")
    assert misses(hook) == ["already_served", "already_served"]


@virtual
async def test_a_call_that_was_not_in_the_answer_is_a_miss() -> None:
    hook = Recorder()
    speculation = speculation_of(call(), hooks=[hook])
    turn = start(speculation, toolbox_of(search(0.5)))
    await asyncio.sleep(1)
    assert await turn.claim(call()) == Claimed("miss")
    turn.answer([call()])
    assert (await turn.claim(call())).outcome == "hit"


@virtual
async def test_unmarked_unknown_approved_writing_and_invalid_calls_are_never_run_early() -> None:
    tools = {
        "unmarked": None,
        "approved": ToolPolicy(needs_approval=True),
        "writes": ToolPolicy(writes=frozenset({"docs"})),
        "invalid": ToolPolicy(),
    }
    toolbox, fakes = FakeToolbox(), []
    for name, policy in tools.items():
        fakes.append(toolbox.add(search(1, name=name), policy))
    predictions = [call(name) for name in ("unmarked", "approved", "writes", "unknown")]
    predictions += [ToolCall("invalid", {"wrong": 1}), ToolCall("invalid", {"query": float("nan")})]
    hook = Recorder()
    speculation = Speculation([Predicts(*predictions, delay_s=0.01)], hooks=[hook])
    turn = start(speculation, toolbox)
    await asyncio.sleep(1)
    turn.answer(predictions)
    assert [await turn.claim(predicted) for predicted in predictions] == [Claimed("miss")] * len(predictions)
    assert [tool.statistics().num_started for tool in fakes] == [0, 0, 0, 0]
    assert skips(hook) == ["unmarked", "needs_approval", "writes", "unmarked", "invalid", "no_key"]
    # Only calls of marked tools are counted.
    assert misses(hook) == ["needs_approval", "writes", "invalid", "no_key"]


# The moment of the answer


@virtual
async def test_speculators_are_cancelled_the_moment_the_model_answers() -> None:
    speculators = [Predicts(call(), delay_s=60, name="slow"), Predicts(call(query="y"), call(), delay_s=0.6, name="s")]
    hook = Recorder()
    speculation = Speculation(speculators, hooks=[hook])
    turn = start(speculation, toolbox_of(search(0.1)))
    await asyncio.sleep(1)
    assert [speculator.num_active for speculator in speculators] == [1, 1]
    turn.answer([call()])
    await no_tasks()
    assert now() == 1.0
    assert [speculator.num_active for speculator in speculators] == [0, 0]
    assert [speculator.num_cancelled for speculator in speculators] == [1, 1]
    assert [
        (event.speculator, event.ended_s, event.num_calls, event.outcome) for event in hook.of(SpeculatorFinished)
    ] == [
        ("slow", 1.0, 0, "cancelled"),
        ("s", 1.0, 1, "cancelled"),
    ]
    turn.settle()


@virtual
async def test_an_answer_without_calls_settles_the_turn() -> None:
    tool, hook = search(10), Recorder()
    speculation = speculation_of(call(), hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([])
    await no_tasks()
    assert hook.of(TurnSettled) == [TurnSettled(1, 1.0, 1, 1)]
    assert tool.statistics().num_cancelled == 1


@virtual
async def test_only_the_first_answer_and_the_first_settlement_count() -> None:
    hook = Recorder()
    speculation = speculation_of(call(), hooks=[hook])
    turn = start(speculation, toolbox_of(search(0.5)))
    await asyncio.sleep(1)
    turn.answer([call()])
    turn.answer([call(), call(), call()])
    assert (await turn.claim(call())).outcome == "hit"
    assert (await turn.claim(call())).outcome == "miss"
    turn.settle()
    turn.settle()
    assert len(hook.of(TurnAnswered)) == len(hook.of(TurnSettled)) == 1


@virtual
async def test_a_turn_that_is_settled_without_an_answer_leaves_nothing() -> None:
    tool, hook = search(10), Recorder()
    speculation = Speculation([Predicts(call(), call(query="y"), delay_s=0.6)], hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.settle()
    await no_tasks()
    assert tool.statistics().num_cancelled == 1
    turn.answer([call()])
    assert await turn.claim(call()) == Claimed("miss")
    assert len(hook.of(TurnAnswered)) == 0


@virtual
async def test_a_turn_that_is_settled_at_once_asks_nobody() -> None:
    speculator = Predicts(call())
    speculation = Speculation([speculator])
    turn = start(speculation, toolbox_of(search(1)))
    turn.settle()
    turn.start([("late", speculator)])
    await asyncio.sleep(1)
    assert speculator.num_asked == 0
    turn.answer([call()])
    assert await turn.claim(call()) == Claimed("miss")


@virtual
async def test_an_explicit_settlement_spares_a_run_that_is_joined() -> None:
    tool, hook = search(2), Recorder()
    speculation = speculation_of(call(), hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call(), call(query="never claimed")])
    claim = asyncio.create_task(turn.claim(call()))
    await asyncio.sleep(0.5)
    turn.settle()
    assert await claim == Claimed("join", "x#1")
    assert hook.of(TurnSettled) == [TurnSettled(1, 1.5, 1, 0)]


# Several calls in one answer


@virtual
async def test_identical_calls_in_one_answer_run_once_and_answer_every_id() -> None:
    tool, hook = search(1), Recorder()
    speculation = speculation_of(hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    asked = [call(id="a"), call(id="b"), call(id="c")]
    turn.answer(asked)
    await asyncio.sleep(0)  # a framework takes a step between answer and tools
    assert await asyncio.gather(*map(turn.claim, asked)) == [Claimed("join", "x#1")] * 3
    assert now() == 2.0
    assert tool.statistics().num_started == 1
    assert hook.of(RunFinished)[0].source == "answer"
    assert [resolved.source for resolved in hook.of(CallResolved)] == [None] * 3
    assert hook.of(TurnSettled) == [TurnSettled(1, 2.0, 1, 0)]
    statistics = speculation.statistics()
    assert statistics.tools["search"].num_joins == 3
    assert statistics.speculators == {}


@virtual
async def test_a_speculator_may_be_named_answer() -> None:
    speculation = Speculation([Predicts(call(), name="answer")])
    turn = start(speculation, toolbox_of(search(0.5)))
    await asyncio.sleep(1)
    turn.answer([call()])
    assert (await turn.claim(call())).outcome == "hit"
    assert speculation.statistics().speculators["answer"].num_hits == 1


@virtual
async def test_identical_calls_that_were_predicted_are_all_served_by_the_one_run() -> None:
    tool = search(0.5)
    speculation = speculation_of(call())
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    asked = [call(id=None), call(id=None), call(id="same"), call(id="same")]
    turn.answer(asked)
    assert [await turn.claim(each) for each in asked] == [Claimed("hit", "x#1")] * 4
    assert await turn.claim(call()) == Claimed("miss")
    assert tool.statistics().num_started == 1


@virtual
async def test_identical_calls_of_an_unmarked_tool_run_as_often_as_they_were_asked() -> None:
    tool = search(1)
    speculation = speculation_of(call())
    outcomes = await take_turn(speculation, toolbox_of(tool, policy=None), call(id="a"), call(id="b"))
    assert outcomes == [("miss", "x#1"), ("miss", "x#2")]
    assert now() == 2.0


@virtual
async def test_identical_calls_wait_for_no_slot() -> None:
    """The one run would have to queue behind a wrong guess: each call runs as it would have."""
    slow, tool = FakeTool("slow", latency_s=100), search(1)
    toolbox = toolbox_of(tool)
    toolbox.add(slow, TTL)
    speculation = Speculation([Predicts(call("slow"))], max_concurrency=1)
    outcomes = await take_turn(speculation, toolbox, call(id="a"), call(id="b"))
    assert [outcome for outcome, _ in outcomes] == ["miss", "miss"]
    assert now() == 2.0
    speculation.end_run(RUN)


@virtual
async def test_identical_calls_beyond_the_limits_each_run() -> None:
    tool = search(1)
    speculation = speculation_of(max_runs=0)
    assert await take_turn(speculation, toolbox_of(tool), call(id="a"), call(id="b")) == [
        ("miss", "x#1"),
        ("miss", "x#2"),
    ]
    assert now() == 2.0


@virtual
async def test_one_of_several_calls_hits_one_joins_and_one_misses() -> None:
    tool, hook = search(lambda arguments: {"a": 0.5, "b": 3.0, "c": 1.0}[arguments["query"]]), Recorder()
    speculation = speculation_of(call(query="a"), call(query="b"), hooks=[hook], delay_s=0.25)
    outcomes = await take_turn(speculation, toolbox_of(tool), *(call(query=query) for query in "abc"))
    assert outcomes == [("hit", "a#1"), ("join", "b#3"), ("miss", "c#2")]
    assert now() == 3.5
    statistics = speculation.statistics()
    assert (statistics.num_launched, statistics.num_wasted) == (2, 0)
    assert statistics.tools["search"].saved_s == 0.5 + 0.5
    assert hook.of(TurnSettled) == [TurnSettled(1, 3.5, 2, 0)]  # not while one is still waited for


@virtual
async def test_the_numbers_and_the_times_of_the_events_are_those_of_the_turn() -> None:
    hook = Recorder()
    speculation = speculation_of(call(), hooks=[hook])
    await asyncio.sleep(5)
    for _ in range(2):
        await take_turn(speculation, toolbox_of(search(0.5)), call())
    assert hook.of(TurnStarted) == [TurnStarted(1, 5.0, ("fake",)), TurnStarted(2, 6.0, ("fake",))]
    assert hook.of(TurnAnswered) == [
        TurnAnswered(1, 6.0, 1.0, 1, (("fake", "search"),)),
        TurnAnswered(2, 7.0, 1.0, 1, (("fake", "search"),)),
    ]
    assert hook.of(SpeculatorFinished)[1] == SpeculatorFinished(2, "fake", 6.0, 6.25, 1, "finished")


def test_claims_are_equal_by_value_and_frozen() -> None:
    assert replace(Claimed("hit", 1), result=2) == Claimed("hit", 2)
    with pytest.raises(AttributeError):
        Claimed("miss").outcome = "hit"  # type: ignore[misc]

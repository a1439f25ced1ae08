"""The gate in whole turns: who is asked, what is run first, and what is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from spectool_core.annotation import ToolPolicy
from spectool_core.bounds import Bound
from spectool_core.calls import ToolCall
from spectool_core.errors import ConfigurationError
from spectool_core.events import LaunchSkipped, RunFinished, SpeculatorSkipped, TurnAnswered, TurnStarted
from spectool_core.speculation import Speculation
from spectool_core.speculators.protocol import SpeculatorStatistics
from tests.core.economy import Cell
from tests.core.fakes import (
    FromFunction,
    Predicts,
    Recorder,
    call,
    observed,
    search,
    start,
    take_turn,
    toolbox_of,
    virtual,
)

TOOLS = [{"type": "function", "function": {"name": "search"}}]


class Likely(ToolCall):
    """A prediction that says how likely it is."""

    __slots__ = ("probability",)

    def __init__(self, name: str, query: str, probability: float) -> None:
        super().__init__(name, {"query": query})
        object.__setattr__(self, "probability", probability)


# Asking


@virtual
async def test_one_that_is_always_wrong_is_asked_less_and_less() -> None:
    hook = Recorder()
    wrong = Predicts(call(query="wrong"))
    speculation = Speculation([wrong], hooks=[hook])
    toolbox = toolbox_of(search(0.5))
    for _ in range(68):
        await take_turn(speculation, toolbox, call(), tools=TOOLS)
    assert 8 <= wrong.num_asked <= 18
    assert {event.reason for event in hook.of(SpeculatorSkipped)} == {"no_gain"}
    assert speculation.statistics().speculators["fake"].num_skipped_turns == 68 - wrong.num_asked
    assert [(held.agent, held.on) for held in speculation.statistics().assessments] == [(("search",), False)]


@virtual
async def test_one_speculator_is_judged_apart_from_the_others() -> None:
    good, bad = Predicts(call(), name="good"), Predicts(call(query="wrong"), name="bad")
    speculation = Speculation([good, bad])
    toolbox = toolbox_of(search(0.5))
    for _ in range(40):
        await take_turn(speculation, toolbox, call(), tools=TOOLS)
    assert good.num_asked >= 35
    assert bad.num_asked <= 14
    assert {held.speculator: held.on for held in speculation.statistics().assessments} == {"good": True, "bad": False}


@virtual
async def test_agents_with_other_tools_are_judged_apart() -> None:
    other = [{"type": "function", "function": {"name": "search"}}, {"type": "function", "function": {"name": "more"}}]
    speculator = Predicts(call())
    speculation = Speculation([speculator])
    toolbox = toolbox_of(search(0.5))
    for _ in range(30):
        await take_turn(speculation, toolbox, call(), tools=TOOLS)
        await take_turn(speculation, toolbox, call(query="another"), tools=other)
    held = {held.agent: held.on for held in speculation.statistics().assessments}
    assert held == {("search",): True, ("more", "search"): False}


@virtual
async def test_time_in_whole_turns_is_what_the_judgement_reckons_with() -> None:
    """The miniature world of `economy` and real turns agree."""
    cell = Cell(0.5, 1, 0.25, 1)
    speculation = Speculation([Predicts(call(), delay_s=0.25)])
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    for _ in range(60):
        await take_turn(speculation, toolbox_of(search(0.5)), call(), generation_s=1, tools=TOOLS)
    skipped = speculation.statistics().speculators["fake"].num_skipped_turns
    expected_s = (60 - skipped) * (cell.turn_s(asked=True, right=True) - 0.001) + skipped * cell.turn_s(
        asked=False, right=True
    )
    assert loop.time() - started_s == pytest.approx(expected_s)
    assert 0 < skipped <= 5


@virtual
async def test_without_adaptation_each_is_asked_in_every_turn() -> None:
    wrong = Predicts(call(query="wrong"))
    speculation = Speculation([wrong], adaptive=False)
    for _ in range(40):
        await take_turn(speculation, toolbox_of(search(0.5)), call(), tools=TOOLS)
    assert wrong.num_asked == 40


@virtual
async def test_every_turn_says_who_could_have_been_asked_about_what() -> None:
    hook = Recorder()
    speculation = Speculation([Predicts(call(), name="one"), Predicts(name="two")], hooks=[hook])
    await take_turn(speculation, toolbox_of(search(0.5)), call(), tools=TOOLS)
    assert hook.of(TurnStarted) == [TurnStarted(1, 0.0, ("one", "two"), ("search",))]
    assert hook.of(TurnStarted)[0].load.num_agents == 1


# What is run first


@virtual
async def test_a_better_prediction_takes_the_place_of_one_that_has_not_begun() -> None:
    async def three() -> AsyncIterator[ToolCall]:
        yield Likely("search", "a", 0.6)
        yield Likely("search", "b", 0.5)
        yield Likely("search", "c", 0.9)

    tool = search(1)
    hook = Recorder()
    speculation = Speculation(
        [FromFunction(three)], hooks=[hook], max_runs_per_turn=2, max_concurrency=1, adaptive=False
    )
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(3)
    assert [ran["query"] for ran in tool.calls] == ["a", "c"]
    dropped = hook.of(RunFinished)[0]
    assert (dropped.outcome, dropped.started_s) == ("cancelled", None)
    turn.answer([])


@virtual
async def test_a_worse_prediction_takes_nobodys_place() -> None:
    async def three() -> AsyncIterator[ToolCall]:
        yield Likely("search", "a", 0.9)
        yield Likely("search", "b", 0.8)
        yield Likely("search", "c", 0.7)

    tool = search(1)
    hook = Recorder()
    speculation = Speculation([FromFunction(three)], hooks=[hook], max_runs_per_turn=2, max_concurrency=1)
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(3)
    assert [ran["query"] for ran in tool.calls] == ["a", "b"]
    assert [skipped.reason for skipped in hook.of(LaunchSkipped)] == ["max_runs_per_turn"]
    turn.answer([])


@virtual
async def test_the_worthiest_leaves_the_queue_first() -> None:
    async def four() -> AsyncIterator[ToolCall]:
        for query, probability in (("a", 0.6), ("b", 0.7), ("c", 0.9), ("d", 0.8)):
            yield Likely("search", query, probability)

    tool = search(1)
    speculation = Speculation([FromFunction(four)], max_concurrency=1)
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(5)
    assert [ran["query"] for ran in tool.calls] == ["a", "c", "d", "b"]
    turn.answer([])


@virtual
async def test_a_place_that_was_given_to_one_who_is_gone_goes_to_the_next() -> None:
    bound = Bound(1)
    await bound.acquire()
    first, second = asyncio.ensure_future(bound.acquire(1.0)), asyncio.ensure_future(bound.acquire(0.0))
    await asyncio.sleep(0)
    bound.release()
    first.cancel()
    await second
    assert first.cancelled()
    bound.release()
    await bound.acquire()


# What is not run


@virtual
async def test_what_is_not_likely_enough_is_not_run() -> None:
    async def two() -> AsyncIterator[ToolCall]:
        yield Likely("search", "a", 0.49)
        yield Likely("search", "b", 0.5)

    tool = search(1)
    hook = Recorder()
    turn = start(Speculation([FromFunction(two)], hooks=[hook]), toolbox_of(tool))
    await asyncio.sleep(2)
    assert [ran["query"] for ran in tool.calls] == ["b"]
    assert [skipped.reason for skipped in hook.of(LaunchSkipped)] == ["unlikely"]
    turn.answer([ToolCall("search", {"query": query}) for query in "ab"])
    assert [answered.came_true for answered in hook.of(TurnAnswered)] == [(("FromFunction", "search"),)], "b alone"


@virtual
async def test_a_run_that_costs_more_than_its_time_is_worth_is_not_started() -> None:
    for value_per_s, num_started in ((1.0, 1), (0.1, 0), (None, 1)):
        tool = search(0.5)
        speculation = Speculation([Predicts(call(), delay_s=0.25)], value_per_s=value_per_s)
        toolbox = toolbox_of(tool, policy=ToolPolicy(cost=0.25))
        speculation.observe(toolbox.tool("search"), observed(succeeded=True))
        turn = start(speculation, toolbox)
        await asyncio.sleep(1)
        assert tool.statistics().num_started == num_started
        turn.answer([])


@virtual
async def test_what_a_minute_may_cost_bounds_runs_and_speculators() -> None:
    hook = Recorder()
    tool = search(0.1)
    speculator = Predicts(call())
    speculation = Speculation([speculator], hooks=[hook], max_cost_per_minute=0.5)
    toolbox = toolbox_of(tool, policy=ToolPolicy(cost=0.25))
    for _ in range(4):
        await take_turn(speculation, toolbox, call(), tools=TOOLS)
    assert speculator.num_asked == 2
    assert [skipped.reason for skipped in hook.of(SpeculatorSkipped)] == ["max_cost_per_minute"] * 2
    await asyncio.sleep(60)
    await take_turn(speculation, toolbox, call(), tools=TOOLS)
    assert speculator.num_asked == 3


@virtual
async def test_tokens_that_a_speculator_reports_count() -> None:
    class Metered(Predicts):
        def statistics(self) -> SpeculatorStatistics:
            asked = self.num_asked
            return SpeculatorStatistics(num_prompt_tokens=90 * asked, num_completion_tokens=10 * asked)

    speculator = Metered(call())
    speculation = Speculation([speculator], max_tokens_per_minute=250)
    for _ in range(5):
        await take_turn(speculation, toolbox_of(search(0.1)), call(), tools=TOOLS)
    assert speculator.num_asked == 3


class AuthenticationError(Exception):
    status_code = 401


@virtual
async def test_a_tool_that_refused_rests_until_a_real_call_succeeded() -> None:
    refusing = search(0.1, error=lambda _: AuthenticationError("no key"))
    toolbox = toolbox_of(refusing)
    hook = Recorder()
    speculation = Speculation([Predicts(call())], hooks=[hook])
    for _ in range(3):
        turn = start(speculation, toolbox, tools=TOOLS)
        await asyncio.sleep(1)
        turn.answer([])
    assert refusing.statistics().num_started == 1
    assert [skipped.reason for skipped in hook.of(LaunchSkipped)] == ["resting", "resting"]
    assert speculation.statistics().resting == {"search": "failed"}
    speculation.observe(toolbox.tool("search"), observed(succeeded=False))
    assert speculation.statistics().resting == {"search": "failed"}
    speculation.observe(toolbox.tool("search"), observed(succeeded=True))
    assert speculation.statistics().resting == {}
    start(speculation, toolbox, tools=TOOLS)
    await asyncio.sleep(1)
    assert refusing.statistics().num_started == 2


# Configuration


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_runs_per_minute", 0),
        ("max_tokens_per_minute", 1.5),
        ("max_cost_per_minute", -1.0),
        ("min_probability", 1.1),
        ("value_per_s", float("nan")),
        ("adaptive", "yes"),
    ],
)
def test_a_setting_that_is_not_allowed_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=field):
        Speculation(**{field: value})

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectool_core.calls import ToolCall
from spectool_core.events import (
    RunFinished,
    SpeculatorFinished,
    TurnSettled,
    TurnStarted,
)
from spectool_core.runs import RunContext
from spectool_core.speculation import Speculation
from spectool_core.testing import FakeTool
from spectool_core.turn import Claimed, Turn
from tests.core.fakes import (
    RUN,
    TTL,
    FromFunction,
    Predicts,
    Recorder,
    call,
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

# Users' callables that misbehave


class BrokenError(Exception):
    pass


def broken(*_: Any) -> Any:
    raise BrokenError


@virtual
async def test_callables_that_raise_cost_the_gain_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    tool = search(1)
    denied = speculation_of(call(), may_speculate=broken)
    assert await take_turn(denied, toolbox_of(tool), call()) == [("miss", "x#1")]
    assert now() == 2.0

    unshared = speculation_of(call(), scope=broken)
    assert await take_turn(unshared, toolbox_of(tool, policy=TTL), call()) == [
        ("miss", "x#2")
    ]  # and nothing was run for nobody
    assert now() == 4.0
    unshared._caches[asyncio.get_running_loop()].drop_owner(object())

    hooked = speculation_of(call(), hooks=[broken])
    assert await take_turn(hooked, toolbox_of(tool), call()) == [("join", "x#3")]
    assert now() == 5.25
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    await asyncio.sleep(5)


@pytest.mark.parametrize("scope", [[], float("nan"), {}], ids=repr)
@virtual
async def test_a_scope_that_is_no_scope_shares_nothing(scope: object) -> None:
    tool = search(0.5)
    speculation = speculation_of(call(), scope=lambda call, context: scope if scope == scope else float("nan"))
    outcomes = await take_turn(speculation, toolbox_of(tool), call())
    assert [outcome for outcome, _ in outcomes] == ["miss"]
    assert now() == 1.5


@pytest.mark.parametrize("answer", ["", 0, None, False])
@virtual
async def test_what_is_false_denies(answer: object) -> None:
    tool = search(0.5)
    speculation = speculation_of(call(), may_speculate=lambda call, context: answer)
    assert [outcome for outcome, _ in await take_turn(speculation, toolbox_of(tool), call())] == ["miss"]


@virtual
async def test_an_answer_that_would_have_to_be_awaited_denies() -> None:
    answers: list[asyncio.Future[bool]] = []

    def later(call: ToolCall, context: RunContext) -> bool:
        answers.append(asyncio.get_running_loop().create_future())
        return answers[-1]  # type: ignore[return-value]

    tool = search(0.5)
    speculation = speculation_of(call(), may_speculate=later)
    assert [outcome for outcome, _ in await take_turn(speculation, toolbox_of(tool), call())] == ["miss"]
    assert len(answers) == 1
    assert tool.statistics().num_started == 1


@virtual
async def test_a_hook_may_settle_the_turn_it_hears_of() -> None:
    turns: list[Turn] = []

    def settle(event: object) -> None:
        if turns and not isinstance(event, TurnSettled):
            turns[0].settle()

    tool = search(0.5)
    speculation = speculation_of(call(), hooks=[settle])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turns.append(turn)
    turn.answer([call()])
    assert await turn.claim(call()) == Claimed("miss")


# Speculators that misbehave


async def _raises_at_once() -> AsyncIterator[ToolCall]:
    raise BrokenError
    yield


async def _raises_later() -> AsyncIterator[ToolCall]:
    yield call()
    raise BrokenError


async def _yields_garbage() -> AsyncIterator[Any]:
    yield call()
    yield None
    yield call(query="after")


async def _yields_an_unhashable_name() -> AsyncIterator[Any]:
    yield call()
    yield ToolCall([], {})  # type: ignore[arg-type]


async def _breaks_as_it_is_closed() -> AsyncIterator[ToolCall]:
    try:
        yield call()
        await asyncio.sleep(60)
    finally:
        raise BrokenError


async def _ignores_its_end() -> AsyncIterator[ToolCall]:
    for number in itertools.count():
        try:
            yield call(query="x" if number == 0 else str(number))
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


class _NoGenerator:
    """An async iterator that cannot be closed."""

    def __aiter__(self) -> _NoGenerator:
        return self

    def __init__(self) -> None:
        self._calls = iter([call()])

    async def __anext__(self) -> ToolCall:
        for predicted in self._calls:
            return predicted
        raise StopAsyncIteration


def _no_iterator() -> Any:
    return None


@pytest.mark.parametrize(
    ("predict", "outcome", "ended"),
    [
        (broken, "miss", "failed"),
        (_no_iterator, "miss", "failed"),
        (_raises_at_once, "miss", "failed"),
        (_raises_later, "hit", "failed"),
        (_yields_garbage, "hit", "failed"),
        (_yields_an_unhashable_name, "hit", "failed"),
        (_breaks_as_it_is_closed, "hit", "failed"),
        (_ignores_its_end, "hit", "finished"),
        (_NoGenerator, "hit", "finished"),
    ],
)
@virtual
async def test_a_speculator_that_misbehaves_is_counted_and_otherwise_ignored(
    predict: Callable[[], Any], outcome: str, ended: str
) -> None:
    tool, hook = search(0.5), Recorder()
    good = Predicts(call(query="good"))
    speculation = Speculation([FromFunction(predict), good], hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call(), call(query="good")])
    assert (await turn.claim(call())).outcome == outcome
    assert (await turn.claim(call(query="good"))).outcome == "hit"
    assert now() == 1.0
    await no_tasks()
    finished = {event.speculator: event.outcome for event in hook.of(SpeculatorFinished)}
    assert finished == {"FromFunction": ended, "fake": "finished"}


@virtual
async def test_a_speculator_that_hangs_costs_nothing() -> None:
    async def hang() -> AsyncIterator[ToolCall]:
        await asyncio.Event().wait()
        yield call()

    tool = search(1)
    assert await take_turn(Speculation([FromFunction(hang)]), toolbox_of(tool), call()) == [("miss", "x#1")]
    assert now() == 2.0


@virtual
async def test_what_a_speculator_says_after_the_answer_is_not_run() -> None:
    async def late() -> AsyncIterator[ToolCall]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            yield call(query="late")
            yield call(query="later")

    tool, hook = search(1), Recorder()
    turn = start(Speculation([FromFunction(late)], hooks=[hook]), toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call()])
    await no_tasks()
    assert tool.statistics().num_started == 0
    assert skips(hook) == ["answered"]
    turn.settle()


@pytest.mark.parametrize("pause_s", [None, 0.0, 1e-6])
@pytest.mark.parametrize("marked", [True, False])
@virtual
async def test_ten_thousand_distinct_predictions_are_bounded(pause_s: float | None, marked: bool) -> None:
    num_said = 0

    async def babble() -> AsyncIterator[ToolCall]:
        nonlocal num_said
        for number in range(10_000):
            num_said += 1
            yield call(query=str(number)) if marked else call(f"tool-{number}")
            if pause_s is not None:
                await asyncio.sleep(pause_s)

    tool = search(5)
    speculation = Speculation([FromFunction(babble)], max_runs_per_turn=8, max_runs_per_tool=8, max_concurrency=2)
    assert await take_turn(speculation, toolbox_of(tool), call()) == [("miss", "x#1")]
    assert now() == 6.0
    assert num_said <= 32
    assert tool.statistics().max_concurrent <= 3
    assert speculation.statistics().num_launched == (8 if marked else 0)


@virtual
async def test_a_thousand_turns_of_wrong_predictions_leave_nothing_behind() -> None:
    numbers = itertools.count()

    async def babble() -> AsyncIterator[ToolCall]:
        for _ in range(10):
            yield call(query=f"wrong {next(numbers)}")

    class Result:
        pass

    made: list[weakref.ref[Result]] = []

    def result(_: object) -> Result:
        made.append(weakref.ref(fresh := Result()))
        return fresh

    tool = FakeTool("search", latency_s=0.1, result=result)
    toolbox = toolbox_of(tool)
    speculation = Speculation([FromFunction(babble)], max_runs_per_turn=10, max_runs_per_tool=10, adaptive=False)
    for _ in range(1000):
        turn = start(speculation, toolbox)
        await asyncio.sleep(1)
        turn.answer([])
    cache = speculation._caches[asyncio.get_running_loop()]
    assert (cache.num_live, cache.num_results) == (0, 0)
    assert speculation.statistics().num_wasted == len(made) == 10_000
    gc.collect()
    assert sum(ref() is not None for ref in made) == 0
    assert turn is not None  # the last turn is still held, its results are not


# Cancellation by the user


@virtual
async def test_a_claim_that_is_cancelled_cancels_the_run_and_settles_the_turn() -> None:
    tool, hook = search(10), Recorder()
    speculation = speculation_of(call(), hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call()])
    claim = asyncio.create_task(turn.claim(call()))
    await asyncio.sleep(1)
    claim.cancel()
    await no_tasks()
    assert claim.cancelled()
    assert tool.statistics().num_cancelled == 1
    assert [event.outcome for event in hook.of(RunFinished)] == ["cancelled"]
    assert len(hook.of(TurnSettled)) == 1


@virtual
async def test_one_cancelled_claim_of_two_leaves_the_run_to_the_other() -> None:
    tool = search(10)
    speculation = speculation_of(call())
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call(id="a"), call(id="b")])
    first, second = (asyncio.create_task(turn.claim(call(id=name))) for name in "ab")
    await asyncio.sleep(1)
    first.cancel()
    assert await second == Claimed("join", "x#1")
    assert now() == 10.25


@settings(max_examples=150, deadline=None)
@given(cancel_at=st.integers(0, 40), num_calls=st.integers(1, 3), predicted=st.booleans(), latency=st.integers(0, 20))
def test_a_run_of_the_user_cancelled_at_any_moment_leaves_nothing(
    cancel_at: int, num_calls: int, predicted: bool, latency: int
) -> None:
    @virtual
    async def scenario() -> None:
        tool, hook = search(latency / 8), Recorder()
        speculator = Predicts(*([call()] if predicted else []), call(query="wrong"), delay_s=0.25)
        speculation = Speculation([speculator], hooks=[hook])
        toolbox = toolbox_of(tool)
        turns: list[Turn] = []

        async def agent() -> None:
            for _ in range(2):
                turn = start(speculation, toolbox)
                turns.append(turn)
                await asyncio.sleep(1)
                asked = [call(id=str(number)) for number in range(num_calls)]
                turn.answer(asked)
                await asyncio.sleep(0)
                for claimed in await asyncio.gather(*map(turn.claim, asked)):
                    if claimed.outcome == "miss":
                        await asyncio.sleep(0.5)

        run = asyncio.create_task(agent())
        await asyncio.sleep(cancel_at / 8)
        run.cancel()
        await asyncio.wait([run])
        for turn in turns:
            turn.settle()  # what an adapter does as the run ends
        speculation.end_run(RUN)
        await no_tasks()
        assert speculator.num_active == 0
        assert tool.statistics().num_running == 0
        assert len(hook.of(TurnSettled)) == len(hook.of(TurnStarted)) == len(turns)
        cache = speculation._caches[asyncio.get_running_loop()] if turns else None
        assert cache is None or (cache.num_live, cache.num_results) == (0, 0)

    scenario()

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from spectool_core.events import (
    TurnSettled,
)
from spectool_core.testing import FakeTool, Latch, LeakCheck
from spectool_core.threads import EventLoopThread
from spectool_core.turn import Claimed, Turn
from tests.core.fakes import (
    TTL,
    Recorder,
    call,
    misses,
    search,
    speculation_of,
    start,
    take_turn,
    toolbox_of,
)


def until_claiming(turn: Turn) -> None:
    """Block until someone waits for a run of `turn`."""
    deadline_s = time.monotonic() + 10
    while not turn._num_claiming:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def in_thread(function: Callable[[], Any]) -> Any:
    """Run `function` on another thread, and give what it returns."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"
    return results[0]


@pytest.mark.parametrize("blocking", [False, True])
def test_a_sync_run_hits_and_joins_on_the_background_loop(blocking: bool) -> None:
    with LeakCheck():
        latch = Latch()
        tool = FakeTool("search", result=lambda arguments: arguments["query"] * 2, latch=latch)
        speculation = speculation_of(call(), call(query="y"), delay_s=0)
        turn = start(speculation, toolbox_of(tool, blocking=blocking), background=True)
        latch.wait_until_arrived(2)
        turn.answer([call(), call(query="y"), call(query="z")])
        joined: list[Claimed] = []
        joiner = threading.Thread(target=lambda: joined.append(turn.claim_blocking(call())), daemon=True)
        joiner.start()
        until_claiming(turn)
        latch.open()
        joiner.join(10)
        assert joined == [Claimed("join", "xx")]
        assert turn.claim_blocking(call(query="y")).result == "yy"
        assert turn.claim_blocking(call(query="z")) == Claimed("miss")
        assert speculation.statistics().num_settled_turns == 1
        speculation.close()


def test_many_threads_claim_at_once_and_one_run_serves_them_all() -> None:
    latch = Latch()
    tool = FakeTool("search", latch=latch, result=lambda _: object())
    speculation = speculation_of(call(), delay_s=0)
    turn = start(speculation, toolbox_of(tool), background=True)
    latch.wait_until_arrived(1)
    asked = [call(id=str(number)) for number in range(16)]
    turn.answer(asked)
    claims: list[Claimed] = []
    threads = [threading.Thread(target=lambda each=each: claims.append(turn.claim_blocking(each))) for each in asked]
    for thread in threads:
        thread.start()
    latch.open()
    for thread in threads:
        thread.join(10)
    assert len(claims) == 16
    assert len({id(claim.result) for claim in claims}) == 1
    assert {claim.outcome for claim in claims} <= {"hit", "join"}
    assert tool.statistics().num_started == 1
    speculation.close()


def test_a_slow_wrong_guess_in_threads_delays_nothing_real() -> None:
    """Every worker and slot is held by a wrong guess; the model's call is a miss at once, and so is the next turn's."""
    latch = Latch()
    tool = FakeTool("search", latch=latch)
    speculation = speculation_of(call(query="wrong"), delay_s=0, max_concurrency=1)
    toolbox = toolbox_of(tool, blocking=True)
    turn = start(speculation, toolbox, background=True)
    latch.wait_until_arrived(1)
    turn.answer([call()])
    assert turn.claim_blocking(call()) == Claimed("miss")
    turn = start(speculation, toolbox, background=True)
    turn.answer([call(id="a"), call(id="b")])
    assert turn.claim_blocking(call(id="a")) == Claimed("miss")
    assert turn.claim_blocking(call(id="b")) == Claimed("miss")
    assert tool.statistics().num_started == 1

    async def default_executor_is_free() -> str:
        return await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 5)

    assert asyncio.run(default_executor_is_free()) == "free"
    latch.open()
    speculation.close()


async def test_a_claim_on_the_loops_own_thread_never_waits() -> None:
    latch = Latch()
    hook = Recorder()
    tool = FakeTool("search", latch=latch, result=lambda arguments: arguments["query"])
    speculation = speculation_of(call(), call(query="y"), delay_s=0, hooks=[hook])
    turn = start(speculation, toolbox_of(tool))
    await latch.until_arrived(2)
    turn.answer([call(), call(query="y"), call(query="z")])
    assert turn.claim_blocking(call()) == Claimed("miss")
    latch.open()
    await tool.until(lambda statistics: statistics.num_finished == 1)
    await asyncio.sleep(0)
    assert turn.claim_blocking(call(query="y")) == Claimed("hit", "y")
    assert turn.claim_blocking(call(query="z")) == Claimed("miss")
    assert misses(hook) == ["would_block", "not_predicted"]
    assert tool.statistics().num_cancelled == 1
    assert len(hook.of(TurnSettled)) == 1


async def test_a_claim_from_another_event_loop_is_served() -> None:
    latch = Latch()
    tool = FakeTool("search", latch=latch, result=lambda arguments: arguments["query"])
    speculation = speculation_of(call(), call(query="y"), delay_s=0)
    turn = start(speculation, toolbox_of(tool))
    await latch.until_arrived(2)
    turn.answer([call(), call(query="y"), call(query="z")])

    async def claim_all() -> list[Claimed]:
        joined = asyncio.create_task(turn.claim(call()))
        await asyncio.sleep(0)
        latch.open()
        return [await joined, await turn.claim(call(query="y")), await turn.claim(call(query="z"))]

    claims = await asyncio.to_thread(asyncio.run, claim_all())
    assert [claim.result for claim in claims] == ["x", "y", None]
    assert claims[2].outcome == "miss"


async def test_a_claim_that_is_cancelled_on_another_loop_cancels_the_run() -> None:
    latch = Latch()
    tool = FakeTool("search", latch=latch)
    speculation = speculation_of(call(), delay_s=0)
    turn = start(speculation, toolbox_of(tool))
    await latch.until_arrived(1)
    turn.answer([call()])

    async def claim_and_give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(turn.claim(call()), 0.05)

    await asyncio.to_thread(asyncio.run, claim_and_give_up())
    await tool.until(lambda statistics: statistics.num_cancelled == 1)


@pytest.mark.parametrize("how", ["blocking", "async"])
def test_on_a_loop_that_has_closed_every_call_is_a_miss(how: str) -> None:
    async def begin() -> Turn:
        turn = start(speculation_of(call(), delay_s=0), toolbox_of(search(0)))
        await asyncio.sleep(0.01)
        turn.answer([call()])
        return turn

    turn = asyncio.run(begin())
    claim = turn.claim_blocking if how == "blocking" else lambda asked: asyncio.run(turn.claim(asked))
    assert claim(call()) == Claimed("miss")
    turn.start([])
    turn.answer([call()])
    turn.settle()


@pytest.mark.parametrize("how", ["blocking", "async"])
def test_a_loop_that_ends_during_a_claim_leaves_nobody_waiting(how: str) -> None:
    """`close()` of the library, or the end of an `asyncio.run` whose threads go on."""
    latch = Latch()
    tool = FakeTool("search", latch=latch)
    speculation = speculation_of(call(), delay_s=0)
    turn = start(speculation, toolbox_of(tool), background=True)
    latch.wait_until_arrived(1)
    turn.answer([call()])
    claims: list[object] = []

    def claim() -> None:
        try:
            claims.append(turn.claim_blocking(call()) if how == "blocking" else asyncio.run(turn.claim(call())))
        except BaseException as error:
            claims.append(error)

    claimer = threading.Thread(target=claim, daemon=True)
    claimer.start()
    until_claiming(turn)
    speculation.close()
    claimer.join(10)
    assert claims == [Claimed("miss")]


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("how", ["blocking", "async"])
def test_a_loop_that_has_stopped_leaves_nobody_waiting(how: str, closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spectool_core.loops._CHECK_S", 0.02)
    loop = asyncio.new_event_loop()

    async def begin() -> Turn:
        return start(speculation_of(), toolbox_of(search(0)))

    turn = loop.run_until_complete(begin())
    claim = (lambda: turn.claim_blocking(call())) if how == "blocking" else lambda: asyncio.run(turn.claim(call()))
    claims: list[Claimed] = []
    claimer = threading.Thread(target=lambda: claims.append(claim()), daemon=True)
    claimer.start()
    if closed:
        loop.close()
    claimer.join(10)
    assert claims == [Claimed("miss")]
    if not closed:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    gc.collect()


def test_a_blocking_claim_outlasts_the_check_of_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spectool_core.loops._CHECK_S", 0.005)
    latch = Latch()
    tool = FakeTool("search", latch=latch, result=lambda _: "slow")
    speculation = speculation_of(call(), delay_s=0)
    turn = start(speculation, toolbox_of(tool), background=True)
    latch.wait_until_arrived(1)
    turn.answer([call(id="a"), call(id="b")])
    opener = threading.Timer(0.05, latch.open)
    opener.start()
    assert turn.claim_blocking(call(id="a")) == Claimed("join", "slow")
    assert in_thread(lambda: asyncio.run(turn.claim(call(id="b")))).result == "slow"
    speculation.close()


def test_a_keyboard_interrupt_in_a_blocking_claim_gets_through_and_frees_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latch = Latch()
    tool = FakeTool("search", latch=latch)
    speculation = speculation_of(call(), delay_s=0)
    turn = start(speculation, toolbox_of(tool), background=True)
    latch.wait_until_arrived(1)
    turn.answer([call()])
    submit = asyncio.run_coroutine_threadsafe

    def interrupted(claim: Any, loop: asyncio.AbstractEventLoop) -> Any:
        pending = submit(claim, loop)

        def result(timeout: float | None = None) -> Any:
            until_claiming(turn)
            raise KeyboardInterrupt

        monkeypatch.setattr(pending, "result", result)
        return pending

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        turn.claim_blocking(call())
    tool.wait_until(lambda statistics: statistics.num_cancelled == 1)
    speculation.close()


def test_turns_on_two_loops_share_a_budget_but_no_runs() -> None:
    tool = search(0.0)
    toolbox = toolbox_of(tool, policy=TTL)
    speculation = speculation_of(call(), delay_s=0, max_runs=2)

    async def run() -> str:
        return (await take_turn(speculation, toolbox, call(), generation_s=0.02))[0][0]

    first, second = EventLoopThread("first"), EventLoopThread("second")
    outcomes = [
        asyncio.run_coroutine_threadsafe(run(), thread.loop).result(10) for thread in (first, second, first, second)
    ]
    assert outcomes == ["hit"] * 4
    assert tool.statistics().num_started == 2
    for thread in (first, second):
        thread.close()

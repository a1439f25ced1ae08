from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cachetools import TLRUCache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from spectool_core.annotation import ToolPolicy
from spectool_core.cache import Run, Slots, ToolCache
from spectool_core.calls import ToolCall
from spectool_core.canonical import CallKey
from spectool_core.events import RunOutcome
from spectool_core.fences import Fences
from spectool_core.runs import NotReplayable, PreparedCall, Scope
from spectool_core.testing import Latch, virtual_event_loop
from spectool_core.threads import WorkerThreads
from tests.core.fakes import no_tasks, now, virtual


class Tool:
    """A tool object that holds nothing."""


TOOL = Tool()


class Ends:
    """Hears of ends, and checks that each run ends once."""

    def __init__(self) -> None:
        self.ended: dict[Run, tuple[RunOutcome, float]] = {}

    def __call__(self, run: Run, outcome: RunOutcome, ended_s: float) -> None:
        assert run not in self.ended
        self.ended[run] = (outcome, ended_s)

    @property
    def outcomes(self) -> list[RunOutcome]:
        return [outcome for outcome, _ in self.ended.values()]


def prepared_call(
    run: Callable[[], Any],
    *,
    tool: object = TOOL,
    owner: str = "owner",
    arguments: str = "x",
    policy: ToolPolicy | None = None,
    blocking: bool = False,
) -> PreparedCall:
    scope = Scope(owner, None)
    return PreparedCall(
        call=ToolCall("tool", {"query": arguments}),
        key=CallKey(tool, scope, arguments),
        scope=scope,
        policy=policy or ToolPolicy(),
        run=run,
        blocking=blocking,
    )


class Bench:
    """A cache with all that it needs."""

    def __init__(
        self,
        *,
        max_concurrency: int = 8,
        max_concurrency_per_tool: int = 8,
        ttl_s: float = 60.0,
        max_results: int = 16,
        loop: asyncio.AbstractEventLoop | None = None,
        workers: WorkerThreads | None = None,
    ) -> None:
        self.fences = Fences()
        self.ends = Ends()
        self.workers = workers or WorkerThreads(max_concurrency, "bench")
        self.cache = ToolCache(
            loop or asyncio.get_running_loop(),
            slots=Slots(max_concurrency, max_concurrency_per_tool),
            workers=self.workers,
            fences=self.fences,
            ttl_s=ttl_s,
            max_results=max_results,
        )

    def launch(self, run: Callable[[], Any], *, timeout_s: float | None = None, **options: Any) -> Run:
        prepared = prepared_call(run, **options)
        return self.cache.launch(prepared, source="test", timeout_s=timeout_s, on_end=self.ends)

    def get(self, run: Run, reads: frozenset[str] | None = None) -> Run | None:
        return self.cache.get(run.prepared.key, reads)


def taking(seconds: float, result: Any = "result") -> Callable[[], Any]:
    async def run() -> Any:
        await asyncio.sleep(seconds)
        if isinstance(result, BaseException):
            raise result
        return result

    return run


# One run


@virtual
async def test_a_run_goes_from_queue_to_result_in_its_own_time() -> None:
    bench = Bench()
    await asyncio.sleep(3)
    run = bench.launch(taking(2.5))
    assert (run.state, run.duration_s, bench.cache.num_live) == ("queued", 0.0, 1)
    await asyncio.sleep(1)
    assert run.state == "running"
    await run.join()
    assert (now(), run.state, run.result) == (5.5, "succeeded", "result")
    assert (run.started_s, run.ended_s, run.duration_s) == (3.0, 5.5, 2.5)
    assert bench.get(run) is run
    assert (bench.cache.num_live, bench.cache.num_results) == (0, 1)
    assert bench.ends.ended == {run: ("succeeded", 5.5)}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("no"), "failed"),
        (NotReplayable("emitted"), "not_replayable"),
        (TimeoutError(), "failed"),
        (SystemExit(2), "failed"),
        (GeneratorExit(), "failed"),
        (StopAsyncIteration(), "failed"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
@virtual
async def test_an_error_is_never_kept_and_harms_neither_joiner_nor_loop(error: BaseException, outcome: str) -> None:
    bench = Bench()
    run = bench.launch(taking(1, error))
    await run.join()
    assert now() == 1.0
    assert (run.state, run.outcome) == ("failed", outcome)
    assert bench.ends.outcomes == [outcome]
    assert bench.get(run) is None
    assert (bench.cache.num_live, bench.cache.num_results) == (0, 0)
    assert await slots_are_free(bench)


async def slots_are_free(bench: Bench) -> bool:
    """Whether as many runs as there may be begin at once."""
    num_slots = 8
    runs = [bench.launch(taking(1), tool=Tool(), arguments=f"probe-{number}") for number in range(num_slots)]
    await asyncio.sleep(0.5)
    free = all(run.state == "running" for run in runs)
    for run in runs:
        bench.cache.drop(run)
    await asyncio.sleep(1)
    return free


@virtual
async def test_a_tool_that_gives_no_awaitable_or_raises_before_it_awaits_is_a_failed_run() -> None:
    bench = Bench()
    runs = [bench.launch(lambda: "not awaitable", arguments="a"), bench.launch(lambda: 1 / 0, arguments="b")]
    for run in runs:
        await run.join()
        assert run.outcome == "failed"
    assert await slots_are_free(bench)


@virtual
async def test_the_end_is_heard_before_any_joiner_goes_on() -> None:
    bench = Bench()
    run = bench.launch(taking(1))

    async def join() -> int:
        await run.join()
        return len(bench.ends.ended)

    assert await asyncio.gather(*(join() for _ in range(3))) == [1, 1, 1]


@virtual
async def test_a_run_that_is_cancelled_before_its_first_step_ends_too() -> None:
    bench = Bench()
    run = bench.launch(taking(1))
    run.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bench.ends.outcomes == ["cancelled"]
    assert run.started_s is None
    assert bench.cache.num_live == 0


@virtual
async def test_a_tool_that_swallows_its_cancellation_gives_no_result() -> None:
    bench = Bench()

    async def stubborn() -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            await asyncio.sleep(5)
        return "too late"

    run = bench.launch(stubborn)
    await asyncio.sleep(1)
    bench.cache.drop(run)
    assert (run.state, bench.get(run)) == ("failed", None)
    await asyncio.sleep(10)
    assert bench.ends.ended == {run: ("cancelled", 1.0)}
    assert (bench.get(run), bench.cache.num_results) == (None, 0)
    assert await slots_are_free(bench)


# Joiners


@virtual
async def test_joiners_do_not_cancel_one_another() -> None:
    bench = Bench()
    run = bench.launch(taking(10))
    await asyncio.sleep(0)
    joiners = [asyncio.create_task(run.join()) for _ in range(3)]
    await asyncio.sleep(1)
    joiners[0].cancel()
    joiners[1].cancel()
    await asyncio.sleep(1)
    assert [joiner.cancelled() for joiner in joiners] == [True, True, False]
    assert run.state == "running"
    await joiners[2]
    assert (now(), run.outcome) == (10.0, "succeeded")


@virtual
async def test_the_last_waiter_to_be_cancelled_cancels_the_run() -> None:
    bench = Bench()
    run = bench.launch(taking(10))
    await asyncio.sleep(0)
    joiners = [asyncio.create_task(run.join()) for _ in range(2)]
    await asyncio.sleep(1)
    for joiner in joiners:
        joiner.cancel()
    await asyncio.sleep(0.5)
    assert bench.ends.ended == {run: ("cancelled", 1.0)}
    assert bench.get(run) is None


@virtual
async def test_a_waiter_that_is_cancelled_as_the_run_ends_takes_nothing_from_the_others() -> None:
    bench = Bench()
    run = bench.launch(taking(1))
    await asyncio.sleep(0)
    first, second = (asyncio.create_task(run.join()) for _ in range(2))
    asyncio.get_running_loop().call_at(1.0, first.cancel)
    await second
    assert run.outcome == "succeeded"
    assert bench.get(run) is run


@virtual
async def test_joining_a_run_that_has_ended_returns_at_once() -> None:
    bench = Bench()
    run = bench.launch(taking(1))
    await asyncio.sleep(2)
    await run.join()
    assert now() == 2.0


# Time limits


@virtual
async def test_a_run_that_nobody_joined_is_given_up_after_its_time() -> None:
    bench = Bench()
    run = bench.launch(taking(10), timeout_s=2.5)
    await asyncio.sleep(5)
    assert bench.ends.ended == {run: ("timed_out", 2.5)}
    assert bench.get(run) is None


@virtual
async def test_the_time_limit_starts_with_the_run_not_with_its_place_in_the_queue() -> None:
    bench = Bench(max_concurrency=1)
    first = bench.launch(taking(3), arguments="first")
    second = bench.launch(taking(3), arguments="second", timeout_s=2)
    await asyncio.sleep(10)
    assert bench.ends.ended == {first: ("succeeded", 3.0), second: ("timed_out", 5.0)}


@virtual
async def test_once_joined_no_time_limit_applies_even_when_a_joiner_leaves() -> None:
    bench = Bench()
    run = bench.launch(taking(10), timeout_s=2)
    await asyncio.sleep(1.999)
    first, second = (asyncio.create_task(run.join()) for _ in range(2))
    await asyncio.sleep(3)
    first.cancel()
    await second
    assert bench.ends.ended == {run: ("succeeded", 10.0)}


# Results


@virtual
async def test_a_result_is_served_until_its_time_to_live_is_over() -> None:
    bench = Bench(ttl_s=5)
    run = bench.launch(taking(1))
    await asyncio.sleep(5.999)
    assert bench.get(run) is run
    await asyncio.sleep(0.001)
    assert bench.get(run) is None
    assert bench.cache.num_results == 0


@virtual
async def test_the_mark_of_the_tool_overrides_the_time_to_live() -> None:
    bench = Bench(ttl_s=5)
    short = bench.launch(taking(1), policy=ToolPolicy(ttl_s=1), arguments="short")
    long = bench.launch(taking(1), policy=ToolPolicy(ttl_s=100), arguments="long")
    await asyncio.sleep(2.5)
    assert bench.get(short) is None
    await asyncio.sleep(98)
    assert bench.get(long) is long


@virtual
async def test_a_result_whose_time_ends_while_it_is_looked_up_is_not_there() -> None:
    bench = Bench(ttl_s=5)
    run = bench.launch(taking(1))
    await asyncio.sleep(2)

    # Each reading of the clock is later than the one before, as on a real one, and crosses the end of the result.
    readings: Iterator[float] = iter([])
    results: TLRUCache[CallKey, Run] = TLRUCache(16, ttu=lambda *_: 6.0, timer=lambda: next(readings, 7.0))
    bench.cache._finished = results
    for action in (
        lambda: bench.get(run),
        lambda: bench.cache.drop(run),
        lambda: bench.cache.drop_owner("owner"),
        lambda: bench.cache.num_results,
    ):
        for num_before_the_end in range(1, 8):
            readings = iter([1.0] * 10)
            results[run.prepared.key] = run
            readings = iter([5.9] * num_before_the_end)
            action()
            readings = iter([])
            assert bench.get(run) is None


@virtual
async def test_ten_thousand_results_are_bounded_and_the_latest_are_kept() -> None:
    class Result:
        pass

    bench = Bench(max_results=100)
    results: list[weakref.ref[Result]] = []

    async def run() -> Result:
        result = Result()
        results.append(weakref.ref(result))
        return result

    runs = []
    for number in range(10_000):
        runs.append(bench.launch(run, arguments=str(number)))
        if number % 500 == 499:
            await asyncio.sleep(1)
    assert bench.cache.num_results == 100
    assert [bench.get(run) is run for run in runs[-100:]] == [True] * 100
    assert bench.get(runs[0]) is None
    del runs
    bench.ends.ended.clear()
    gc.collect()
    assert sum(result() is not None for result in results) == 100
    bench.cache.drop_owner("owner")
    gc.collect()
    assert sum(result() is not None for result in results) == 0


@virtual
async def test_dropping_an_owner_spares_all_others_and_joined_runs() -> None:
    bench = Bench()
    done = bench.launch(taking(1), arguments="done")
    await asyncio.sleep(2)
    running = bench.launch(taking(10), arguments="running")
    joined = bench.launch(taking(10), arguments="joined")
    other = bench.launch(taking(10), arguments="done", owner="other")
    await asyncio.sleep(1)
    joiner = asyncio.create_task(joined.join())
    await asyncio.sleep(0)
    bench.cache.drop_owner("owner")
    assert [bench.get(run) for run in (done, running, joined, other)] == [None, None, None, other]
    await joiner
    assert running.outcome == "cancelled"
    assert joined.outcome == other.outcome == "succeeded"
    assert bench.get(joined) is None
    assert bench.get(other) is other


@virtual
async def test_a_dropped_run_does_not_displace_its_successor() -> None:
    bench = Bench()
    old = bench.launch(taking(10, "old"))
    await asyncio.sleep(1)
    joiner = asyncio.create_task(old.join())
    await asyncio.sleep(0)
    bench.cache.drop(old)
    new = bench.launch(taking(1, "new"))
    assert bench.get(old) is new
    await joiner
    assert (old.result, bench.get(old), new.result) == ("old", new, "new")
    bench.cache.drop(old)
    assert bench.get(new) is new


# Fences


@virtual
async def test_a_fence_drops_a_result_and_cancels_a_run_that_nobody_joined() -> None:
    bench = Bench()
    done = bench.launch(taking(1), arguments="done")
    await asyncio.sleep(2)
    running = bench.launch(taking(10), arguments="running")
    await asyncio.sleep(1)
    bench.fences.raise_(scope="owner", writes=None)
    assert bench.get(done) is None
    assert bench.get(running) is None
    await asyncio.sleep(1)
    assert running.outcome == "cancelled"
    assert bench.cache.num_results == 0


@virtual
async def test_a_run_that_was_launched_before_the_fence_is_stale_even_if_it_began_after() -> None:
    bench = Bench()
    run = bench.launch(taking(1))
    bench.fences.raise_(scope="owner", writes=None)
    await asyncio.sleep(2)
    assert bench.get(run) is None


@virtual
async def test_a_fence_of_another_scope_or_tag_drops_nothing() -> None:
    bench = Bench()
    run = bench.launch(taking(1))
    await asyncio.sleep(2)
    bench.fences.raise_(scope="other", writes=None)
    bench.fences.raise_(scope="owner", writes=frozenset({"mail"}))
    assert bench.get(run, frozenset({"docs"})) is run
    assert bench.get(run, None) is None


# Slots


@virtual
async def test_runs_beyond_the_limits_wait_in_order() -> None:
    bench = Bench(max_concurrency=3, max_concurrency_per_tool=2)
    other = Tool()
    runs = [bench.launch(taking(1), arguments=str(number)) for number in range(5)]
    others = [bench.launch(taking(1), tool=other, arguments=str(number)) for number in range(2)]
    await asyncio.sleep(10)
    assert [run.started_s for run in runs] == [0.0, 0.0, 1.0, 1.0, 2.0]
    assert [run.started_s for run in others] == [0.0, 1.0]


@virtual
async def test_the_mark_of_the_tool_limits_its_runs() -> None:
    bench = Bench(max_concurrency_per_tool=1)
    runs = [bench.launch(taking(1), policy=ToolPolicy(max_concurrency=3), arguments=str(n)) for n in range(4)]
    await asyncio.sleep(10)
    assert [run.started_s for run in runs] == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("num_cancelled", range(1, 6))
@virtual
async def test_cancelling_queued_and_running_runs_loses_no_slot(num_cancelled: int) -> None:
    bench = Bench(max_concurrency=2, max_concurrency_per_tool=1)
    tools = [Tool(), Tool(), Tool()]
    runs = [bench.launch(taking(1), tool=tools[n % 3], arguments=str(n)) for n in range(6)]
    await asyncio.sleep(0.5)
    for run in runs[:num_cancelled]:
        run.cancel()
    await asyncio.sleep(10)
    assert bench.ends.outcomes.count("cancelled") == num_cancelled
    assert bench.ends.outcomes.count("succeeded") == 6 - num_cancelled
    late = [bench.launch(taking(1), tool=Tool(), arguments=f"late-{n}") for n in range(2)]
    await asyncio.sleep(0.5)
    assert [run.state for run in late] == ["running", "running"]
    await asyncio.sleep(1)


@virtual
async def test_a_tool_that_takes_no_weak_references_runs_too() -> None:
    bench = Bench()
    run = bench.launch(taking(1), tool=7)
    await run.join()
    assert run.outcome == "succeeded"


# Threads


async def test_a_blocking_tool_runs_on_a_worker_and_its_result_is_kept() -> None:
    bench = Bench()
    run = bench.launch(threading.current_thread, blocking=True)
    await run.join()
    assert run.outcome == "succeeded"
    assert run.result.name == "bench-worker"
    assert run.result.daemon
    bench.workers.close()


async def test_a_cancelled_blocking_run_keeps_its_slot_until_its_thread_returns() -> None:
    bench = Bench(max_concurrency=1)
    latch = Latch()
    first = bench.launch(latch.wait, blocking=True, arguments="first")
    await latch.until_arrived(1)
    assert first.state == "running"
    second = bench.launch(taking(0), arguments="second")
    bench.cache.drop(first)
    for _ in range(10):
        await asyncio.sleep(0)
    assert bench.ends.outcomes == ["cancelled"]
    assert second.state == "queued"
    latch.open()
    await asyncio.wait_for(second.join(), 10)
    assert second.outcome == "succeeded"
    assert bench.cache.num_live == 0
    bench.workers.close()


async def test_a_blocking_run_that_waits_for_a_worker_has_not_begun_and_is_dropped_from_the_queue() -> None:
    """The workers are shared by all loops, so a free slot of this loop is not yet a thread."""
    workers = WorkerThreads(1, "shared")
    bench = Bench(workers=workers)
    latch = Latch()
    elsewhere = workers.submit(latch.wait)
    latch.wait_until_arrived(1)
    ran: list[str] = []
    run = bench.launch(lambda: ran.append("speculative"), blocking=True, timeout_s=60)
    for _ in range(10):
        await asyncio.sleep(0)
    assert run.state == "queued"
    bench.cache.drop(run)
    latch.open()
    elsewhere.result(10)  # the worker is free before the loop has come to the cancellation
    last = bench.launch(lambda: ran.append("last"), blocking=True, arguments="last")
    await asyncio.wait_for(last.join(), 10)
    assert ran == ["last"]
    workers.close()


async def test_the_time_limit_of_a_blocking_run_applies_until_it_is_joined() -> None:
    bench = Bench()
    latch = Latch()
    lonely = bench.launch(latch.wait, blocking=True, timeout_s=0.01, arguments="lonely")
    await asyncio.wait([lonely.task], timeout=10)
    assert lonely.outcome == "timed_out"
    joined = bench.launch(latch.wait, blocking=True, timeout_s=0.2, arguments="joined")
    await latch.until_arrived(2)
    joiner = asyncio.create_task(joined.join())
    await asyncio.sleep(0.3)
    assert joined.state == "running"
    latch.open()
    await joiner
    assert joined.outcome == "succeeded"
    bench.workers.close()


async def test_a_blocking_run_that_is_joined_as_it_begins_has_no_time_limit() -> None:
    bench = Bench()
    latch = Latch()
    run = bench.launch(latch.wait, blocking=True, timeout_s=0.02)
    await asyncio.sleep(0)
    latch.wait_until_arrived(1)  # it has begun, and the loop, which is held up here, has not heard of it
    assert run.state == "running"
    opener = threading.Timer(0.1, latch.open)
    opener.start()
    await run.join()
    assert run.outcome == "succeeded"
    bench.workers.close()
    opener.join()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), StopIteration()])
async def test_what_a_blocking_tool_raises_ends_its_run_as_failed(error: BaseException) -> None:
    def fail() -> None:
        raise error

    bench = Bench(max_concurrency=1)
    run = bench.launch(fail, blocking=True)
    await asyncio.wait_for(run.join(), 5)
    assert run.outcome == "failed"
    again = bench.launch(lambda: "free", blocking=True)
    await asyncio.wait_for(again.join(), 5)
    assert again.result == "free"
    bench.workers.close()


async def test_where_no_thread_can_be_started_the_run_fails_and_frees_its_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(function: object) -> None:
        raise RuntimeError("can't start new thread")

    bench = Bench(max_concurrency=1)
    with monkeypatch.context() as patch:
        patch.setattr(bench.workers, "submit", refuse)
        run = bench.launch(lambda: "never", blocking=True)
        await run.join()
    assert run.outcome == "failed"
    again = bench.launch(taking(0))
    await asyncio.wait_for(again.join(), 5)
    assert again.outcome == "succeeded"


def test_a_thread_that_outlives_its_loop_harms_nothing() -> None:
    latch = Latch()
    workers = WorkerThreads(2, "outlive")

    async def main() -> Run:
        bench = Bench(workers=workers)
        run = bench.launch(latch.wait, blocking=True)
        await latch.until_arrived(1)
        return run

    run = asyncio.run(main())
    assert run.outcome == "cancelled"
    latch.open()
    assert workers.submit(lambda: "alive").result(10) == "alive"
    workers.close()


def test_a_blocking_run_whose_loop_has_closed_in_the_queue_never_begins() -> None:
    latch = Latch()
    workers = WorkerThreads(1, "closed")
    held = workers.submit(latch.wait)
    latch.wait_until_arrived(1)
    ran: list[str] = []

    async def main() -> None:
        Bench(workers=workers).launch(lambda: ran.append("never"), blocking=True)
        await asyncio.sleep(0.001)

    asyncio.run(main())
    latch.open()
    held.result(10)
    workers.submit(lambda: ran.append("next")).result(10)
    assert ran == ["next"]
    workers.close()


# All interleavings


READS = {"x": None, "y": frozenset({"t"}), "z": frozenset({"u"})}


class _Body:
    """The inside of one run of a tool, which the machine ends when it likes."""

    def __init__(self, machine: CacheMachine, tool: int, key: tuple[int, str, str]) -> None:
        self.machine = machine
        self.tool = tool
        self.key = key
        self.end: asyncio.Future[Any] = machine.loop.create_future()
        self.swallows_cancellation = False

    async def __call__(self) -> Any:
        self.machine.active.append(self)
        try:
            return await self.end
        except asyncio.CancelledError:
            if not self.swallows_cancellation:
                raise
            return "swallowed"
        finally:
            self.machine.active.remove(self)


class CacheMachine(RuleBasedStateMachine):
    """A cache under launches, claims, joins, cancellations, fences, drops, time and every kind of end."""

    runs = Bundle("runs")
    joiners = Bundle("joiners")

    MAX_TOTAL, MAX_PER_TOOL, MAX_RESULTS, TTL_S = 3, 2, 3, 10.0

    @initialize()
    def set_up(self) -> None:
        self.loop = virtual_event_loop()
        self.problems: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.problems.append(context))
        self.bench = Bench(
            loop=self.loop,
            max_concurrency=self.MAX_TOTAL,
            max_concurrency_per_tool=self.MAX_PER_TOOL,
            max_results=self.MAX_RESULTS,
            ttl_s=self.TTL_S,
        )
        self.cache = self.bench.cache
        self.tools = [Tool(), Tool()]
        self.active: list[_Body] = []
        self.bodies: dict[Run, _Body] = {}
        self.launched_at: dict[Run, int] = {}
        self.reads: dict[Run, frozenset[str] | None] = {}
        self.fences: list[tuple[str | None, frozenset[str] | None]] = []
        self.dropped: set[Run] = set()
        self.waiting: dict[asyncio.Task[None], Run] = {}

    def spin(self) -> None:
        async def spin() -> None:
            for _ in range(6):
                await asyncio.sleep(0)

        self.loop.run_until_complete(spin())

    def is_fenced(self, run: Run) -> bool:
        scope, reads = run.prepared.scope.owner, self.reads[run]
        return any(
            (fenced is None or fenced == scope) if writes is None else (reads is None or bool(writes & reads))
            for fenced, writes in self.fences[self.launched_at[run] :]
        )

    def look_up(self, run: Run) -> Run | None:
        found = self.cache.get(run.prepared.key, self.reads[run])
        if found is not None:
            assert found.prepared.key == run.prepared.key
            assert found not in self.dropped
            assert not self.is_fenced(found), "stale"
            if found.state == "succeeded":
                assert found.outcome == "succeeded"
                assert found.ended_s is not None
                assert self.loop.time() < found.ended_s + self.TTL_S, "older than its time to live"
        else:
            self.dropped.update(
                known for known in self.bodies if known.prepared.key == run.prepared.key and self.is_fenced(known)
            )
        return found

    @rule(
        target=runs,
        tool=st.integers(0, 1),
        owner=st.sampled_from("pq"),
        arguments=st.sampled_from("xyz"),
        timeout_s=st.sampled_from([None, 3.0]),
        swallows=st.booleans(),
    )
    def launch(
        self,
        tool: int,
        owner: str,
        arguments: str,
        timeout_s: float | None,
        swallows: bool,
    ) -> Run:
        reads = READS[arguments]
        body = _Body(self, tool, (tool, owner, arguments))
        body.swallows_cancellation = swallows
        prepared = prepared_call(body, tool=self.tools[tool], owner=owner, arguments=arguments)
        present = self.cache.get(prepared.key, reads)
        if present is not None:
            return present
        for known in self.bodies:
            if known.prepared.key == prepared.key:
                self.dropped.add(known)
        run = self.cache.launch(prepared, source="machine", timeout_s=timeout_s, on_end=self.bench.ends)
        self.bodies[run] = body
        self.launched_at[run] = len(self.fences)
        self.reads[run] = reads
        return run

    @rule(target=joiners, run=runs)
    def join(self, run: Run) -> asyncio.Task[None] | None:
        found = self.look_up(run)
        if found is None or found.state != "running":
            return None

        async def join() -> None:
            await found.join()
            assert found in self.bench.ends.ended

        task = self.loop.create_task(join())
        self.waiting[task] = found
        self.loop.run_until_complete(asyncio.sleep(0))
        return task

    @rule(joiner=consumes(joiners))
    def cancel_joiner(self, joiner: asyncio.Task[None] | None) -> None:
        if joiner is None or joiner not in self.waiting:
            return
        run = self.waiting.pop(joiner)
        others = [task for task, joined in self.waiting.items() if joined is run]
        was_ended = run.outcome is not None
        joiner.cancel()
        self.spin()
        assert joiner.done()
        if not others and not was_ended:
            assert run.outcome == "cancelled", "a run that nobody wants goes on"
        if others and not was_ended:
            assert run.outcome is None, "one joiner cancelled another's run"

    @rule(run=runs, how=st.sampled_from(["result", "error", "not replayable", "exit"]))
    def end(self, run: Run, how: str) -> None:
        body = self.bodies.get(run)
        if body is None or body.end.done() or body not in self.active:
            return
        errors = {"error": ValueError(), "not replayable": NotReplayable(), "exit": SystemExit(1)}
        if how == "result":
            body.end.set_result("result")
        else:
            body.end.set_exception(errors[how])
        self.spin()
        if run.outcome in ("cancelled", "timed_out"):
            return
        expected = {"result": "succeeded", "not replayable": "not_replayable"}.get(how, "failed")
        assert run.outcome == expected
        if expected != "succeeded":
            assert self.look_up(run) is not run, "an error was kept"

    @rule(seconds=st.sampled_from([0.5, 2.0, 3.0, 9.5, 10.0]))
    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.spin()

    @rule(
        scope=st.sampled_from([None, "p", "q"]),
        writes=st.sampled_from([None, frozenset({"t"}), frozenset({"u"}), frozenset({"t", "u"})]),
    )
    def fence(self, scope: str | None, writes: frozenset[str] | None) -> None:
        self.bench.fences.raise_(scope=scope, writes=writes)
        self.fences.append((scope, writes))

    @rule(run=runs)
    def drop(self, run: Run) -> None:
        self.cache.drop(run)
        self.dropped.add(run)
        self.check_dropped(run)

    @rule(owner=st.sampled_from("pq"))
    def drop_owner(self, owner: str) -> None:
        owned = [run for run in self.bodies if run.prepared.scope.owner == owner]
        self.cache.drop_owner(owner)
        self.dropped.update(owned)
        assert all(self.cache.get(run.prepared.key, self.reads[run]) is None for run in owned)

    def check_dropped(self, run: Run) -> None:
        if run.num_waiters:
            assert run.outcome is None or run.task.done() or run.outcome == "succeeded"
        else:
            assert run.outcome is not None

    @invariant()
    def nothing_ran_past_the_limits(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.spin()
        assert self.problems == []
        assert len(self.active) <= self.MAX_TOTAL
        assert all(count <= self.MAX_PER_TOOL for count in Counter(body.tool for body in self.active).values())
        assert self.cache.num_results <= self.MAX_RESULTS
        wanted = Counter(run.prepared.key for run in self.bodies if run not in self.dropped and run.outcome is None)
        assert all(count == 1 for count in wanted.values()), "two live runs of one key"

    @invariant()
    def whoever_waits_gets_an_end_and_only_then(self) -> None:
        if not hasattr(self, "loop"):
            return
        for joiner, run in list(self.waiting.items()):
            if run.task.done():
                assert joiner.done()
                assert not joiner.cancelled()
                assert joiner.exception() is None
                assert run.outcome in ("succeeded", "failed", "not_replayable"), "a joined run was given up"
                del self.waiting[joiner]
            else:
                assert not joiner.done()
                assert run.outcome is None
        for run in self.bodies:
            assert (run.task.done()) == (run in self.bench.ends.ended)

    @invariant()
    def all_that_is_served_may_be_served(self) -> None:
        if hasattr(self, "loop"):
            for run in list(self.bodies):
                self.look_up(run)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for joiner in self.waiting:
            joiner.cancel()
        self.cache.drop_owner("p")
        self.cache.drop_owner("q")
        self.spin()
        for body in list(self.active):
            if not body.end.done():
                body.end.set_result("late")  # what is left was joined and dropped
        self.spin()
        self.spin()
        assert self.problems == []
        assert asyncio.all_tasks(self.loop) == set()
        assert (self.cache.num_live, self.cache.num_results, len(self.active)) == (0, 0, 0)
        self.loop.run_until_complete(self._check_that_all_slots_are_free())
        self.loop.close()

    async def _check_that_all_slots_are_free(self) -> None:
        probes = [
            self.bench.launch(taking(1), tool=tool, arguments=str(number))
            for tool in self.tools
            for number in range(self.MAX_PER_TOOL)
        ]
        await asyncio.sleep(0.5)
        assert sum(run.state == "running" for run in probes) == self.MAX_TOTAL
        assert [run.state for run in probes[:2]] == ["running", "running"]
        await asyncio.sleep(2)
        await no_tasks()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)

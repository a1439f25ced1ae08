"""The tool cache: at most one live run for a key, joined by whoever needs it, and its result for a while.

It holds futures, not values, and lives on one event loop. Errors are never kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeAlias

from cachetools import TLRUCache

from spectool_core.bounds import Bound
from spectool_core.canonical import CallKey
from spectool_core.decision import RunState
from spectool_core.events import RunOutcome
from spectool_core.fences import Fences
from spectool_core.identity import WeakIdentityMap
from spectool_core.loops import run_on
from spectool_core.runs import NotReplayable, PreparedCall
from spectool_core.threads import WorkerThreads

__all__ = ["Run", "Slots", "ToolCache"]


OnEnd: TypeAlias = Callable[["Run", RunOutcome, float], None]
"""Hears of a run's end: the run, how it ended and when (seconds of the loop's clock)."""


class Slots:
    """Bounds the runs in flight on one event loop: in total, for each tool, and for an agent run that has a cap."""

    def __init__(self, max_concurrency: int, max_concurrency_per_tool: int) -> None:
        self._total = Bound(max_concurrency)
        self._per_tool = max_concurrency_per_tool
        self._tools: WeakIdentityMap[Bound] = WeakIdentityMap()

    async def acquire(self, prepared: PreparedCall, worth_s: float) -> Callable[[], None]:
        """Wait for a free slot, the worthiest first; returns what frees it again, to be called once."""
        limit = prepared.policy.max_concurrency or self._per_tool
        tool = self._tools.get(prepared.key.tool) or self._tools.set(prepared.key.tool, Bound(limit))
        # In this order: what waits holds only what others of its own agent run, or of its tool, could use.
        bounds = (tool, self._total) if prepared.cap is None else (prepared.cap, tool, self._total)
        held: list[Bound] = []

        def release() -> None:
            for bound in held:
                bound.release()

        try:
            for bound in bounds:
                await bound.acquire(worth_s)
                held.append(bound)
        except BaseException:
            release()
            raise
        return release


class Run:
    """One speculative run of a tool, from the queue to its result.

    Args:
        prepared: what to run.
        source: the speculator that predicted it; None where the main model's answer itself began it.
        stamp: reading of the fence clock when the run was launched.
        timeout_s: seconds after which a run that nobody has joined is cancelled.
        worth_s: seconds that it is expected to save; what is worth more leaves the queue first.
    """

    def __init__(
        self, prepared: PreparedCall, source: str | None, stamp: int, timeout_s: float | None, worth_s: float = 0.0
    ) -> None:
        self.prepared = prepared
        self.source = source
        self.stamp = stamp
        self.timeout_s = timeout_s
        self.worth_s = worth_s
        self.num_waiters = 0
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self.outcome: RunOutcome | None = None
        self.result: Any = None
        self.task: asyncio.Task[None]  # set by the cache as it launches the run
        self.on_begin: Callable[[Run], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def duration_s(self) -> float:
        """Seconds that the tool ran; 0 until it has ended."""
        return 0.0 if self.started_s is None or self.ended_s is None else self.ended_s - self.started_s

    @property
    def state(self) -> RunState:
        """Where the run stands."""
        if self.outcome is not None:
            return "succeeded" if self.outcome == "succeeded" else "failed"
        return "queued" if self.started_s is None else "running"

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Mark the run as begun; on whatever thread the tool runs."""
        self.started_s = loop.time()
        if self.on_begin is not None:
            run_on(loop, self.on_begin, self)

    def start_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Limit a run that has begun and that nobody has joined."""
        if self.timeout_s is None or self.started_s is None or self.outcome is not None or self.num_waiters:
            return
        self._timer = loop.call_at(self.started_s + self.timeout_s, self.cancel, "timed_out")

    def end(self, outcome: RunOutcome, loop: asyncio.AbstractEventLoop) -> tuple[RunOutcome, float]:
        """Record how and when the run ended; the first word counts, and is returned."""
        if self.outcome is None or self.ended_s is None:
            self.outcome = outcome
            self.ended_s = loop.time()
            self._stop_timer()
        return self.outcome, self.ended_s

    def cancel(self, outcome: RunOutcome = "cancelled") -> None:
        """End the run now: a coroutine is cancelled, a thread's result is dropped when it comes."""
        if self.outcome is None:
            self.end(outcome, self.task.get_loop())
            self.task.cancel()

    async def join(self) -> None:
        """Wait until the run has ended; the last waiter to be cancelled cancels it."""
        self.num_waiters += 1
        self._stop_timer()
        try:
            await asyncio.wait([self.task])
        finally:
            self.num_waiters -= 1
            if self.num_waiters == 0 and not self.task.done():
                self.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ToolCache:
    """Runs and results of one event loop.

    Args:
        loop: the loop; its clock is the cache's clock.
        slots: bounds on runs in flight.
        workers: threads for blocking tools.
        fences: writes that make results stale.
        ttl_s: seconds that a finished result is kept unless its tool's mark says otherwise.
        max_results: finished results kept; the least recently used goes first.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        slots: Slots,
        workers: WorkerThreads,
        fences: Fences,
        ttl_s: float,
        max_results: int,
    ) -> None:
        self._loop = loop
        self._slots = slots
        self._workers = workers
        self._fences = fences
        self._live: dict[CallKey, Run] = {}
        self._finished: TLRUCache[CallKey, Run] = TLRUCache(
            max_results,
            ttu=lambda _key, run, now: now + (run.prepared.policy.ttl_s or ttl_s),
            timer=loop.time,
        )

    def get(self, key: CallKey, reads: frozenset[str] | None) -> Run | None:
        """The usable run or result for `key`; one that a write made stale is dropped."""
        run = self._live.get(key) or self._result_of(key)
        if run is not None and self._fences.is_stale(run.stamp, scope=run.prepared.scope.owner, reads=reads):
            self.drop(run)
            return None
        return run

    def is_being_written(self, prepared: PreparedCall) -> bool:
        """Whether a write is under way that makes stale whatever is read now."""
        return self._fences.is_being_written(scope=prepared.scope.owner, reads=prepared.policy.reads)

    def launch(
        self,
        prepared: PreparedCall,
        *,
        source: str | None,
        timeout_s: float | None,
        on_end: OnEnd,
        worth_s: float = 0.0,
        on_begin: Callable[[Run], None] | None = None,
    ) -> Run:
        """Start a run for a key that has none; `on_end` hears of its end before anyone that joined it.

        `on_begin` hears, on the loop, that it has left the queue.
        """
        run = Run(prepared, source, self._fences.stamp(), timeout_s, worth_s)
        run.on_begin = on_begin
        self._live[prepared.key] = run
        run.task = self._loop.create_task(self._execute(run), name=f"spectool:{prepared.call.name}")
        # A done callback, not a finally: a task that is cancelled before its first step never enters its body.
        run.task.add_done_callback(lambda task: self._close(run, task, on_end))
        return run

    def drop(self, run: Run) -> None:
        """Forget a run; cancel it unless someone has joined it."""
        key = run.prepared.key
        if self._live.get(key) is run:
            del self._live[key]
        if self._result_of(key) is run:
            with contextlib.suppress(KeyError):
                del self._finished[key]
        if run.num_waiters == 0:
            run.cancel()

    def drop_owner(self, owner: Hashable) -> None:
        """Forget all that belongs to `owner`."""
        results = [self._result_of(key) for key in list(self._finished)]
        for run in [*self._live.values(), *results]:
            if run is not None and run.prepared.scope.owner == owner:
                self.drop(run)

    @property
    def num_live(self) -> int:
        """Runs queued or in flight."""
        return len(self._live)

    @property
    def num_results(self) -> int:
        """Finished results that could still be served."""
        self._finished.expire()
        return len(self._finished)

    def _result_of(self, key: CallKey) -> Run | None:
        # Not `get`, which reads the clock twice and raises if the result expires in between.
        try:
            return self._finished[key]
        except KeyError:
            return None

    async def _execute(self, run: Run) -> None:
        try:
            run.result = await self._run_in_slot(run)
        except NotReplayable:
            run.end("not_replayable", self._loop)
        except (Exception, SystemExit):  # a SystemExit that leaves a task stops the whole loop
            run.end("failed", self._loop)
        else:
            run.end("succeeded", self._loop)

    def _close(self, run: Run, task: asyncio.Task[None], on_end: OnEnd) -> None:
        # Without an outcome it was cancelled, or raised what `_execute` does not catch.
        outcome, ended_s = run.end(
            "cancelled" if task.cancelled() or task.exception() is None else "failed", self._loop
        )
        key = run.prepared.key
        if self._live.get(key) is run:
            del self._live[key]
            if run.outcome == "succeeded":
                self._finished[key] = run
        on_end(run, outcome, ended_s)

    async def _run_in_slot(self, run: Run) -> Any:
        release = await self._slots.acquire(run.prepared, run.worth_s)
        if run.prepared.blocking:
            return await self._run_on_worker(run, release)
        try:
            run.begin(self._loop)
            run.start_timer(self._loop)
            return await run.prepared.run()
        finally:
            release()

    async def _run_on_worker(self, run: Run, release: Callable[[], None]) -> Any:
        def free_slot(_future: Future[Any]) -> None:
            # A thread cannot be stopped: a cancelled run keeps its slot until the tool returns.
            try:
                self._loop.call_soon_threadsafe(release)
            except RuntimeError:
                return  # the loop was closed first, and its slots with it

        def work() -> Any:
            if run.outcome is not None:  # dropped, and the loop has not come to cancel this yet
                return None
            # Here, not at the hand-over: while every worker is busy with runs of other loops, it has not begun.
            run.begin(self._loop)
            if run.timeout_s is not None:
                self._loop.call_soon_threadsafe(run.start_timer, self._loop)
            return run.prepared.run()

        try:
            future = self._workers.submit(work)
        except BaseException:
            release()
            raise
        future.add_done_callback(free_slot)
        return await asyncio.wrap_future(future)

"""A thousand runs that end in every way leave no record, task, thread or result behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

from workflows.errors import WorkflowCancelledByUser, WorkflowRuntimeError, WorkflowTimeoutError

from spectool_core import Speculation, ToolCall, speculatable
from spectool_core.testing import LeakCheck
from spectool_llamaindex._agent_run import RUNS
from tests.guessing import Call, Guess, GuessingSpeculator, Reply
from tests.llamaindex.agents import GiveUp, alone, ended, function_agent, settle
from tests.llamaindex.clock import run_virtual

NUM_RUNS = 1000


class Result(dict[str, str]):
    """A result of a tool, of which it is known whether anybody holds it."""

    __hash__ = object.__hash__


def test_a_thousand_runs_leave_nothing_behind() -> None:
    results: weakref.WeakSet[Result] = weakref.WeakSet()
    handlers: weakref.WeakSet[Any] = weakref.WeakSet()
    num_started, numended = [0], [0]

    @speculatable(reuse="ttl")
    async def lookup(q: str) -> Result:
        """Look something up."""
        num_started[0] += 1
        try:
            await asyncio.sleep(1.0)
        finally:
            numended[0] += 1
        result = Result(q=q)
        results.add(result)
        return result

    asked = Reply((Call("lookup", {"q": "a"}, "1"),))
    guesses = [Guess((ToolCall("lookup", {"q": "a"}), ToolCall("lookup", {"q": "b"})))] * 2
    never = GuessingSpeculator([Guess(after_s=None)] * 2)
    speculation = Speculation(
        [GuessingSpeculator(guesses), never], adaptive=False, max_concurrency=512, max_concurrency_per_tool=512
    )

    def agent(**settings: Any) -> Any:
        return function_agent([asked, Reply(text="done")], [lookup], speculation, streaming=False, **settings)

    # Each way to end, at every kind of moment: before the guess, with an early run in flight, in a join.
    moments_s = (0.1, 0.5, 1.1)
    given_up = [GiveUp(s, how) for s in moments_s for how in ("cancel_run", "stop_awaiting", "abort")]
    endings: list[tuple[Any, GiveUp | None, dict[str, Any]]] = [
        *((agent(), give_up, {}) for give_up in given_up),
        *((alone(agent()), give_up, {}) for give_up in given_up),
        *((agent(timeout=moment_s), None, {}) for moment_s in moments_s),
        (agent(), None, {"max_iterations": 1}),
        (agent(), None, {"max_iterations": 1}),
        (agent(early_stopping_method="generate"), None, {"max_iterations": 1}),
        (agent(), None, {}),
        (alone(agent()), None, {}),
    ]
    seen: set[type] = set()

    async def play(number: int) -> None:
        running, give_up, options = endings[number % len(endings)]
        handler = running.run(user_msg="go", **options)
        handlers.add(handler)
        try:
            seen.add(type(await ended(handler, give_up)))
        except (Exception, asyncio.CancelledError) as exc:
            seen.add(type(exc))

    async def main() -> None:
        num_threads = threading.active_count()
        async with LeakCheck():
            for first in range(0, NUM_RUNS, 50):
                await asyncio.gather(*(play(number) for number in range(first, first + 50)))
            await asyncio.sleep(2.0)  # a step that stock forgets to cancel goes on to its end
            await settle()
        assert threading.active_count() == num_threads
        for _ in range(3):
            gc.collect()
        assert len(RUNS) == 0
        assert len(handlers) == 0
        assert len(results) == 0

    run_virtual(main)
    assert seen >= {WorkflowCancelledByUser, WorkflowRuntimeError, WorkflowTimeoutError, TimeoutError}
    assert num_started == numended
    statistics = speculation.statistics()
    assert statistics.num_settled_turns == statistics.num_turns > NUM_RUNS
    assert statistics.num_launched > NUM_RUNS
    assert statistics.total.num_hits + statistics.total.num_joins > 50

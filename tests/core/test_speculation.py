from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectool_core.annotation import ToolPolicy
from spectool_core.calls import ToolCall
from spectool_core.config import SpeculationConfig
from spectool_core.errors import ConfigurationError
from spectool_core.events import Event
from spectool_core.runs import RunContext
from spectool_core.speculation import Speculation
from spectool_core.statistics import SourceStatistics, SpeculationStatistics, ToolStatistics
from spectool_core.testing import FakeTool, Latch, LeakCheck
from spectool_core.turn import Claimed
from tests.core.fakes import (
    FakeToolbox,
    FromFunction,
    Predicts,
    call,
    observed,
    search,
    start,
    take_turn,
    toolbox_of,
    virtual,
)

# Configuration


class PredictIsACoroutine:
    async def predict(self, prompt: object, tools: object) -> list[object]:
        return []


class NoPredict:
    pass


class PredictIsNoMethod:
    predict = "yes"


async def async_function(*_: object) -> bool:
    return False


class AsyncCallable:
    async def __call__(self, *_: object) -> bool:
        return False


BAD_CALLABLES = [3, "name", [], async_function, AsyncCallable()]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("mode", value) for value in ("on", "", None, "Client", 1, True)),
        *(
            (field, value)
            for field in ("max_runs_per_turn", "max_runs_per_tool", "max_concurrency", "max_concurrency_per_tool")
            for value in (0, -1, True, False, 1.5, float("nan"), None, "8")
        ),
        *(("max_results", value) for value in (0, -5, True, 2.0)),
        *(("max_runs", value) for value in (-1, True, 0.5, float("nan"))),
        *(("ttl_s", value) for value in (0, -1, float("nan"), float("inf"), True, None, "60")),
        *(("timeout_s", value) for value in (0, -1, float("nan"), float("inf"), True, "60")),
        *(("scope", value) for value in BAD_CALLABLES),
        *(("may_speculate", value) for value in BAD_CALLABLES),
    ],
)
def test_a_bad_setting_fails_at_construction_with_field_value_and_what_is_allowed(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Speculation(**{field: value})
    assert caught.value.field == field
    assert caught.value.value is value
    assert caught.value.allowed
    assert field in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("hook", [*BAD_CALLABLES, None])
def test_a_hook_that_cannot_be_called_is_refused(hook: object) -> None:
    with pytest.raises(ConfigurationError, match="callable") as caught:
        Speculation(hooks=[print, hook])  # type: ignore[list-item]
    assert caught.value.field == "hooks"
    assert caught.value.value is hook


@pytest.mark.parametrize("field", ["speculators", "hooks"])
@pytest.mark.parametrize("value", ["openai:gpt-5-nano", 7, None, Predicts(), SpeculationConfig()])
def test_what_is_no_list_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match="a list") as caught:
        Speculation(**{field: value})
    assert caught.value.field == field
    assert caught.value.value is value


@pytest.mark.parametrize(
    "speculator",
    [
        None,
        7,
        NoPredict(),
        PredictIsACoroutine(),
        PredictIsNoMethod(),
        NoPredict,
        Predicts,
        "gpt-5-nano",
        "openai:",
        "",
        "bedrock:nova",
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_speculator_is_refused_and_what_is_one_is_said(speculator: object) -> None:
    with pytest.raises(ConfigurationError, match="allowed") as caught:
        Speculation([Predicts(), speculator])
    assert caught.value.field == "speculators"
    assert caught.value.value is speculator
    assert "openai:MODEL" in caught.value.allowed


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="max_run"):
        Speculation(max_run=3)  # type: ignore[call-arg]


def test_the_defaults_speculate() -> None:
    speculation = Speculation()
    assert speculation.is_on
    assert speculation.config.mode == "client"
    assert not Speculation(mode="off").is_on
    assert Speculation(mode="shadow").is_on


def test_any_iterable_of_speculators_will_do() -> None:
    given = [Predicts(), Predicts()]
    assert Speculation(iter(given)).speculators == tuple(given)


@virtual
async def test_speculators_have_distinct_names_in_events() -> None:
    names: list[str] = []

    def hook(event: Event) -> None:
        if hasattr(event, "speculator"):
            names.append(event.speculator)

    given = [Predicts(name="a"), Predicts(name="a-2"), Predicts(name="a"), Predicts(name="a"), FromFunction(_silent)]
    speculation = Speculation(given, hooks=[hook])
    await take_turn(speculation, toolbox_of(search()))
    assert len(set(names)) == 5
    assert names[:2] == ["a", "a-2"]
    assert names[4] == "FromFunction"


async def _silent() -> AsyncIterator[ToolCall]:
    return
    yield


def test_making_one_starts_nothing() -> None:
    with LeakCheck(grace_s=0):
        speculation = Speculation([Predicts(call())])
        assert speculation.statistics() == SpeculationStatistics()
        speculation.close()
        speculation.close()


# Statistics


@virtual
async def test_the_counts_of_several_turns() -> None:
    toolbox = toolbox_of(search(0.5), search(2.0, name="slow"))
    speculation = Speculation([Predicts(call(), call("slow"), call(query="wrong"), delay_s=0.25), Predicts(delay_s=9)])
    assert [outcome for outcome, _ in await take_turn(speculation, toolbox, call(), call("slow"))] == ["hit", "join"]
    assert [outcome for outcome, _ in await take_turn(speculation, toolbox, call(query="z"))] == ["miss"]
    speculation.observe(toolbox.tool("search"), observed(succeeded=True))
    statistics = speculation.statistics()
    assert replace(statistics, assessments=()) == SpeculationStatistics(
        num_turns=2,
        num_answered_turns=2,
        num_settled_turns=2,
        num_launched=6,
        num_wasted=4,
        num_predictions=6,
        tools={
            "search": ToolStatistics(
                num_hits=1,
                num_misses=1,
                num_predicted=1,
                num_runs_succeeded=2,
                num_runs_cancelled=2,
                num_real_runs=1,
                saved_s=0.5,
            ),
            "slow": ToolStatistics(
                num_joins=1, num_predicted=1, num_runs_succeeded=1, num_runs_cancelled=1, saved_s=0.5
            ),
        },
        speculators={
            "fake": SourceStatistics(num_turns=2, num_predictions=6, num_right=2, num_hits=2, saved_s=1.0),
            "fake-2": SourceStatistics(num_turns=2),
        },
    )
    with pytest.raises(TypeError):
        statistics.tools["search"] = ToolStatistics()  # type: ignore[index]
    with pytest.raises(AttributeError):
        statistics.num_turns = 7  # type: ignore[misc]


# Event loops


def test_fifty_event_loops_leave_no_cache_no_task_and_no_thread_behind() -> None:
    class Result:
        pass

    results: list[weakref.ref[Result]] = []

    def result(_: object) -> Result:
        results.append(weakref.ref(made := Result()))
        return made

    tools = [FakeTool("a", result=result), FakeTool("b", result=result)]
    toolbox = FakeToolbox()
    toolbox.add(tools[0], ToolPolicy(reuse="ttl"))
    toolbox.add(tools[1], blocking=True)
    hang = FakeTool("hang", latency_s=3600)
    toolbox.add(hang, ToolPolicy(reuse="ttl"))
    with LeakCheck():
        speculation = Speculation([Predicts(call("a"), call("b"), call("hang"), delay_s=0)], adaptive=False)
        loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

        async def run() -> None:
            loops.append(weakref.ref(asyncio.get_running_loop()))
            turn = start(speculation, toolbox)
            await tools[1].until(lambda counts: counts.num_finished == len(loops))
            turn.answer([call("a")])
            assert (await turn.claim(call("a"))).outcome in ("hit", "join")

        for _ in range(50):
            asyncio.run(run())
            assert len(speculation._caches) == 1
        assert hang.statistics().num_running == 0
        speculation.close()
        assert len(speculation._caches) == 0
        gc.collect()
        assert sum(loop() is not None for loop in loops) == 0
        assert sum(made() is not None for made in results) == 0


def test_close_ends_the_threads_and_cancels_what_runs_on_the_background_loop() -> None:
    tool, latch = FakeTool("search", latency_s=3600), Latch()
    blocked = FakeTool("blocked", latch=latch)
    toolbox = toolbox_of(tool)
    toolbox.add(blocked, blocking=True)
    with LeakCheck():
        speculation = Speculation([Predicts(call(), call("blocked"), delay_s=0)])
        start(speculation, toolbox, background=True)
        tool.wait_until(lambda counts: counts.num_started == 1)
        latch.wait_until_arrived(1)
        names = {thread.name for thread in threading.enumerate()}
        assert {"spectool-loop", "spectool-worker"} <= names
        started_s = time.monotonic()
        speculation.close()
        assert time.monotonic() - started_s < 5
        assert tool.statistics().num_cancelled == 1
        assert "spectool-loop" not in {thread.name for thread in threading.enumerate()}
        latch.open()


@pytest.mark.parametrize("blocking", [False, True])
def test_after_close_it_works_again(blocking: bool) -> None:
    tool = search(0)
    toolbox = toolbox_of(tool, blocking=blocking)
    with LeakCheck():
        speculation = Speculation([Predicts(call(), delay_s=0)])
        for number in range(1, 4):
            turn = start(speculation, toolbox, background=True)
            tool.wait_until(lambda counts, number=number: counts.num_finished == number)  # type: ignore[misc]
            turn.answer([call()])
            assert turn.claim_blocking(call()).result == f"x#{number}"
            if blocking:
                time.sleep(0.005)  # its worker is idle when it is closed
            speculation.close()


def test_close_from_a_hook_on_the_background_loop_does_not_hang() -> None:
    closed = threading.Event()

    def hook(event: Event) -> None:
        if threading.current_thread().name == "spectool-loop" and not closed.is_set():
            closed.set()
            speculation.close()

    speculation = Speculation([Predicts(call(), delay_s=0)], hooks=[hook])
    turn = start(speculation, toolbox_of(search(0)), background=True)
    assert closed.wait(10)
    assert turn.claim_blocking(call()) == Claimed("miss")
    speculation.close()


def test_sync_runs_of_many_threads_share_one_background_loop() -> None:
    with LeakCheck():
        speculation = Speculation()
        barrier = threading.Barrier(8)
        loops: list[asyncio.AbstractEventLoop] = []

        def run() -> None:
            barrier.wait()
            loops.append(speculation.background.loop)

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(loops)) == 1
        speculation.close()


def test_agents_in_many_threads_each_get_their_own_results() -> None:
    """Sync runs, async runs and runs on own loops at once, all of one `Speculation`."""
    tool = FakeTool("search", result=lambda arguments: object())
    toolbox = toolbox_of(tool)
    speculation = Speculation([Predicts(call(), delay_s=0)])
    seen: list[Claimed] = []
    errors: list[BaseException] = []

    def sync_agent(number: int) -> None:
        for _ in range(5):
            turn = start(speculation, toolbox, RunContext(number), background=True)
            time.sleep(0.002)
            turn.answer([call()])
            seen.append(turn.claim_blocking(call()))
        speculation.end_run(RunContext(number))

    async def async_agent(number: int) -> None:
        for _ in range(5):
            turn = start(speculation, toolbox, RunContext(number))
            await asyncio.sleep(0.002)
            turn.answer([call()])
            seen.append(await turn.claim(call()))
        speculation.end_run(RunContext(number))

    def guarded(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    agents = [lambda number=number: sync_agent(number) for number in range(6)]
    agents += [lambda number=number: asyncio.run(async_agent(number)) for number in range(6, 12)]  # type: ignore[misc]
    with LeakCheck():
        threads = [threading.Thread(target=guarded, args=(agent,)) for agent in agents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        speculation.close()
    assert errors == []
    assert len(seen) == 60
    served = [claimed.result for claimed in seen if claimed.outcome != "miss"]
    assert len(set(map(id, served))) == len(served)
    statistics = speculation.statistics()
    assert statistics.num_turns == statistics.num_settled_turns == 60
    assert statistics.total.num_hits + statistics.total.num_joins == len(served)
    assert statistics.num_launched - statistics.num_wasted == len(served)


@virtual
async def test_one_thousand_runs_leave_nothing_of_theirs_behind() -> None:
    tool = search(0.1)
    toolbox = toolbox_of(tool, policy=ToolPolicy(reuse="ttl"))
    speculation = Speculation([Predicts(call(), delay_s=0)], adaptive=False)

    class Identity:
        pass

    runs: list[weakref.ref[Identity]] = []

    async def agent() -> None:
        identity = Identity()
        runs.append(weakref.ref(identity))
        context = RunContext(identity)
        await take_turn(speculation, toolbox, call(), context=context)
        speculation.end_run(context)

    for _ in range(1000):
        await agent()
    assert speculation._caches[asyncio.get_running_loop()].num_results == 0
    gc.collect()
    assert sum(identity() is not None for identity in runs) == 0
    assert speculation.statistics().total.num_hits == 1000


@virtual
async def test_the_end_of_a_run_keeps_what_a_scope_of_the_user_shares() -> None:
    tool = search(0.1)
    speculation = Speculation([Predicts(call(), delay_s=0)], scope=lambda call, context: None)
    toolbox = toolbox_of(tool, policy=ToolPolicy(reuse="ttl"))
    for number in range(3):
        await take_turn(speculation, toolbox, call(), context=RunContext(number))
        speculation.end_run(RunContext(number))
    assert tool.statistics().num_started == 1
    speculation._caches[asyncio.get_running_loop()].drop_owner(None)


# The end of the process

PREAMBLE = """
import asyncio, sys, threading, time
from spectool_core.annotation import ToolPolicy
from spectool_core.speculation import Speculation
from spectool_core.testing import FakeTool, Latch
from tests.core.fakes import Predicts, call, start, toolbox_of
hang = FakeTool("hang", latency_s=3600)
quick = FakeTool("quick")
"""

EXITS = {
    "async": """
        async def main():
            speculation = Speculation([Predicts(call("hang"), delay_s=0)])
            turn = start(speculation, toolbox_of(hang, policy=ToolPolicy(reuse="ttl")))
            await hang.until(lambda counts: counts.num_started == 1)
            turn.answer([])
        asyncio.run(main())
    """,
    "async, tools in threads": """
        async def main():
            speculation = Speculation([Predicts(call("hang"), delay_s=0)])
            turn = start(speculation, toolbox_of(hang, blocking=True))
            await hang.until(lambda counts: counts.num_started == 1)
            turn.answer([])
        asyncio.run(main())
    """,
    "sync, tools on the background loop": """
        speculation = Speculation([Predicts(call("hang"), delay_s=0)])
        turn = start(speculation, toolbox_of(hang), background=True)
        hang.wait_until(lambda counts: counts.num_started == 1)
    """,
    "sync, tools in threads": """
        speculation = Speculation([Predicts(call("hang"), delay_s=0)])
        turn = start(speculation, toolbox_of(hang, blocking=True), background=True)
        hang.wait_until(lambda counts: counts.num_started == 1)
    """,
    "sync, a speculator that hangs": """
        speculator = Predicts(call("hang"), delay_s=3600)
        turn = start(Speculation([speculator]), toolbox_of(hang), background=True)
        while not speculator.num_active:
            time.sleep(0.001)
    """,
    "sync, closed": """
        speculation = Speculation([Predicts(call("hang"), delay_s=0)])
        turn = start(speculation, toolbox_of(hang, blocking=True), background=True)
        hang.wait_until(lambda counts: counts.num_started == 1)
        speculation.close()
    """,
    "an uncaught error of the user": """
        speculation = Speculation([Predicts(call("hang"), delay_s=0)])
        turn = start(speculation, toolbox_of(hang), background=True)
        hang.wait_until(lambda counts: counts.num_started == 1)
        sys.exit(0)
    """,
    "a claim in another thread": """
        speculation = Speculation([Predicts(call("hang"), delay_s=0)])
        turn = start(speculation, toolbox_of(hang), background=True)
        hang.wait_until(lambda counts: counts.num_started == 1)
        turn.answer([call("hang")])
        threading.Thread(target=turn.claim_blocking, args=(call("hang"),), daemon=True).start()
        while not turn._num_claiming:
            time.sleep(0.001)
    """,
}


def run_script(body: str, *, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    script = PREAMBLE + textwrap.dedent(body) + '\nprint("end", flush=True)\n'
    environment = {**os.environ, "PYTHONWARNINGS": "error", "PYTHONASYNCIODEBUG": "0"}
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
    )


@pytest.mark.parametrize("case", EXITS)
def test_a_process_exits_at_once_and_silently_with_runs_in_flight(case: str) -> None:
    done = run_script(EXITS[case])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout in ("end\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_process_gets_its_own_background_loop() -> None:
    """Servers that fork after a first run at import: the parent's loop is not served in the child."""
    done = run_script(
        """
        import os, warnings
        warnings.simplefilter("ignore")
        speculation = Speculation([Predicts(call("quick"), delay_s=0)])
        def run(num_runs):
            turn = start(speculation, toolbox_of(quick), background=True)
            deadline = time.monotonic() + 5
            while quick.statistics().num_finished < num_runs and time.monotonic() < deadline:
                time.sleep(0.001)
            turn.answer([call("quick")])
            return turn.claim_blocking(call("quick")).outcome
        assert run(1) in ("hit", "join")
        child = os.fork()
        if child == 0:
            os._exit(0 if run(2) in ("hit", "join") else 3)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                assert os.waitstatus_to_exitcode(status) == 0, status
                break
            time.sleep(0.01)
        else:
            os.kill(child, 9)
            raise SystemExit("the child hangs")
        """
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "end\n")


def test_a_speculation_that_is_dropped_ends_its_background_loop() -> None:
    speculation = Speculation()
    background = speculation.background
    del speculation
    gc.collect()
    background._thread.join(10)
    assert not background.is_alive
    assert background.loop.is_closed()


def test_statistics_know_what_a_sync_run_has_done() -> None:
    speculation = Speculation()
    toolbox = toolbox_of(search(0))
    for number in range(1, 50):
        turn = start(speculation, toolbox, background=True)
        turn.answer([])
        statistics = speculation.statistics()
        assert (statistics.num_answered_turns, statistics.num_settled_turns) == (number, number)
    speculation.close()

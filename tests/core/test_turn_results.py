from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from spectool_core.annotation import ToolPolicy
from spectool_core.calls import ToolCall
from spectool_core.runs import RunContext
from spectool_core.speculation import Speculation
from spectool_core.turn import Claimed
from tests.core.fakes import (
    RUN,
    TTL,
    FakeToolbox,
    FromFunction,
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

# Writes in the same answer, and fences


@pytest.mark.parametrize(
    ("reads", "writes", "outcome"),
    [
        (None, None, "miss"),
        (["docs"], None, "miss"),
        ([], None, "miss"),
        (None, ["docs"], "miss"),
        (["docs"], ["docs", "mail"], "miss"),
        (["docs"], ["mail"], "hit"),
        ([], ["mail"], "hit"),
    ],
)
@virtual
async def test_a_write_in_the_same_answer_makes_a_read_that_meets_it_a_miss(
    reads: list[str] | None, writes: list[str] | None, outcome: str
) -> None:
    toolbox = FakeToolbox()
    tool = toolbox.add(search(0.5), ToolPolicy(reads=reads))  # type: ignore[arg-type]
    toolbox.add(search(0.5, name="write"), None if writes is None else ToolPolicy(writes=writes))  # type: ignore[arg-type]
    for asked in itertools.permutations([call(), call("write")]):
        speculation = speculation_of(call())
        turn = start(speculation, toolbox)
        await asyncio.sleep(1)
        turn.answer(asked)
        assert (await turn.claim(call())).outcome == outcome
        assert (await turn.claim(call("write"))).outcome == "miss"
        await no_tasks()
    assert tool.statistics().num_started == 2


@virtual
async def test_identical_reads_beside_a_write_each_run() -> None:
    toolbox = FakeToolbox()
    toolbox.add(search(1), ToolPolicy())
    toolbox.add(search(1, name="write"), None)
    outcomes = await take_turn(speculation_of(), toolbox, call(id="a"), call("write"), call(id="b"))
    assert [outcome for outcome, _ in outcomes] == ["miss"] * 3


@virtual
async def test_a_read_after_a_write_sees_the_write() -> None:
    """Case 17: a speculated read, then a write, then the same read."""
    files = {"x": "old"}
    toolbox = FakeToolbox()

    async def read(query: str) -> str:
        return files[query]

    toolbox.add_function("read", read, TTL)
    speculation = speculation_of(call("read"))
    assert await take_turn(speculation, toolbox, call("read")) == [("hit", "old")]
    files["x"] = "new"
    assert await take_turn(speculation, toolbox, call("read")) == [("hit", "old")]  # nobody has said that it wrote
    speculation.begin_write(RUN, None).end()
    assert await take_turn(speculation, toolbox, call("read")) == [("hit", "new")]  # a new run, after the write
    files["x"] = "newer"
    turn = start(speculation, toolbox)
    await asyncio.sleep(1)
    speculation.begin_write(RUN, None).end()  # a write of a parallel branch
    turn.answer([call("read")])
    assert await turn.claim(call("read")) == Claimed("miss")


@virtual
async def test_a_fence_between_answer_and_claim_is_a_miss_and_cancels_the_run() -> None:
    tool = search(10)
    speculation = speculation_of(call())
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call()])
    speculation.begin_write(RUN, frozenset({"docs"})).end()
    assert await turn.claim(call()) == Claimed("miss")
    await no_tasks()
    assert tool.statistics().num_cancelled == 1


# Reuse


@virtual
async def test_reuse_ttl_serves_later_turns_of_the_run_and_reuse_turn_does_not() -> None:
    for policy, num_runs, outcomes in ((TTL, 1, ["hit", "hit"]), (ToolPolicy(), 1, ["hit", "miss"])):
        tool = search(0.5)
        toolbox = toolbox_of(tool, policy=policy)
        predictions = iter([[call()], []])

        async def predict(predictions: Any = predictions) -> AsyncIterator[ToolCall]:
            for predicted in next(predictions):
                yield predicted

        speculation = Speculation([FromFunction(predict)])
        seen = []
        for _ in range(2):
            turn = start(speculation, toolbox)
            await asyncio.sleep(1)
            turn.answer([call()])
            seen.append((await turn.claim(call())).outcome)
        assert seen == outcomes
        assert tool.statistics().num_started == num_runs
        speculation.end_run(RUN)


@pytest.mark.parametrize(("policy", "num_runs"), [(TTL, 1), (ToolPolicy(), 2)])
@virtual
async def test_turns_of_one_run_at_once_share_only_what_may_be_reused(policy: ToolPolicy, num_runs: int) -> None:
    tool = search(1)
    toolbox = toolbox_of(tool, policy=policy)
    speculation = speculation_of(call())
    outcomes = await asyncio.gather(*(take_turn(speculation, toolbox, call()) for _ in range(2)))
    assert [outcome for ((outcome, _),) in outcomes] == ["join", "join"]
    assert now() == 1.25
    assert tool.statistics().num_started == num_runs
    speculation.end_run(RUN)


@virtual
async def test_a_read_beside_a_write_is_forgotten_even_if_it_could_be_reused() -> None:
    toolbox = FakeToolbox()
    tool = toolbox.add(search(10), TTL)
    toolbox.add(search(1, name="write"), None)
    turn = start(speculation_of(call()), toolbox)
    await asyncio.sleep(1)
    turn.answer([call("write"), call()])
    await asyncio.sleep(0.5)
    assert tool.statistics().num_cancelled == 1
    turn.settle()


@virtual
async def test_a_loser_that_may_be_reused_goes_on_and_serves_the_next_turn() -> None:
    tool, hook = search(3), Recorder()
    speculation = speculation_of(call(), hooks=[hook])
    toolbox = toolbox_of(tool, policy=TTL)
    turn = start(speculation, toolbox)
    await asyncio.sleep(1)
    turn.answer([call(query="other")])
    await turn.claim(call(query="other"))
    assert await take_turn(speculation, toolbox, call()) == [("join", "x#1")]
    assert now() == 3.25
    assert skips(hook) == ["duplicate"]
    assert tool.statistics().num_started == 1


@virtual
async def test_after_its_turn_is_settled_no_call_is_served_even_from_a_result_that_is_kept() -> None:
    speculation = speculation_of(call())
    turn = start(speculation, toolbox_of(search(0.5), policy=TTL))
    await asyncio.sleep(1)
    turn.answer([call()])
    turn.settle()
    assert await turn.claim(call()) == Claimed("miss")


@virtual
async def test_a_result_is_too_old_after_its_time_to_live() -> None:
    tool = search(0.5)
    speculation = speculation_of(call(), ttl_s=5)
    turn = start(speculation, toolbox_of(tool))
    await asyncio.sleep(1)
    turn.answer([call()])
    await asyncio.sleep(4.75)  # a human looks at it; the result came at 0.75
    assert await turn.claim(call()) == Claimed("miss")


@virtual
async def test_the_end_of_a_run_forgets_its_results_and_spares_those_of_others() -> None:
    tool = search(0.5)
    toolbox = toolbox_of(tool, policy=TTL)
    speculation = speculation_of(call())
    mine, other = RunContext("mine"), RunContext("other")
    for context in (mine, other):
        await take_turn(speculation, toolbox, call(), context=context)
    speculation.end_run(mine)
    assert speculation._caches[asyncio.get_running_loop()].num_results == 1
    await take_turn(speculation, toolbox, call(), context=other)
    assert tool.statistics().num_started == 2
    await take_turn(speculation, toolbox, call(), context=mine)
    assert tool.statistics().num_started == 3


# Who may share


@pytest.mark.parametrize(
    "others",
    [
        RunContext(run="run", thread_id="other thread"),
        RunContext(run="other run", thread_id="thread"),
        RunContext(run="other run", thread_id="thread", configurable={"tenant": "b"}),
        RunContext(run=1, thread_id=None),
    ],
)
@pytest.mark.parametrize("policy", [ToolPolicy(), TTL])
@virtual
async def test_two_threads_or_runs_never_share_by_default(others: RunContext, policy: ToolPolicy) -> None:
    """Case 20."""
    tool = search(1)
    toolbox = toolbox_of(tool, policy=policy)
    speculation = speculation_of(call())
    outcomes = await asyncio.gather(
        *(take_turn(speculation, toolbox, call(), context=context) for context in (RUN, others))
    )
    assert outcomes == [[("join", "x#1")], [("join", "x#2")]]
    assert tool.statistics().num_started == 2


@virtual
async def test_where_no_run_can_be_identified_nothing_is_shared_beyond_the_turn() -> None:
    tool = search(0.5)
    toolbox = toolbox_of(tool, policy=TTL)
    speculation = speculation_of(call())
    nobody = RunContext(run=None)
    assert await take_turn(speculation, toolbox, call(), context=nobody) == [("hit", "x#1")]
    assert await take_turn(speculation, toolbox, call(), context=nobody) == [("hit", "x#2")]
    turn = start(speculation, toolbox, nobody)
    await asyncio.sleep(1)
    speculation.begin_write(nobody, None).end()
    turn.answer([call()])
    assert await turn.claim(call()) == Claimed("miss")


@virtual
async def test_a_scope_of_the_user_shares_what_may_be_reused() -> None:
    asked: list[tuple[ToolCall, RunContext]] = []

    def tenant(call: ToolCall, context: RunContext) -> str:
        asked.append((call, context))
        return str(context.configurable["tenant"])

    contexts = [RunContext(run=number, configurable={"tenant": tenant}) for number, tenant in enumerate("aab")]
    for policy, num_runs in ((TTL, 2), (ToolPolicy(), 3)):
        tool = search(0.5)
        toolbox = toolbox_of(tool, policy=policy)
        speculation = speculation_of(call(), scope=tenant)
        for context in contexts:
            assert (await take_turn(speculation, toolbox, call(), context=context))[0][0] == "hit"
            speculation.end_run(context)  # others may still use what it left
        assert tool.statistics().num_started == num_runs
    assert asked[0] == (call(), contexts[0])


@virtual
async def test_a_write_fences_every_scope_where_the_user_chose_scopes() -> None:
    tool = search(0.5)
    toolbox = toolbox_of(tool, policy=TTL)
    speculation = speculation_of(call(), scope=lambda call, context: "all")
    await take_turn(speculation, toolbox, call(), context=RunContext(1))
    speculation.begin_write(RunContext(2), None).end()
    turn = start(speculation, toolbox, RunContext(1))
    turn.answer([call()])
    assert await turn.claim(call()) == Claimed("miss")

"""Runs that wait for a human, are saved while they run, and go on in another run."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.workflow import Context, Event
from workflows.events import HumanResponseEvent

from spectool_core import Speculation, speculatable
from tests.guessing import Call, Reply, outcomes, predicting
from tests.llamaindex.agents import GiveUp, Seen, alone, function_agent, not_stock, opened, run, settle
from tests.llamaindex.clock import run_virtual
from tests.llamaindex.comparing import assert_equal, compare
from tests.llamaindex.tools import confirmation, make_tools
from tests.tool_log import ToolLog

LOOKUP, CONFIRM = Call("lookup", {"q": "a"}, "1"), Call("confirm", {"q": "sure"}, "2")
SEARCH = Call("search", {"input": "b"}, "3")


def yes(event: Event) -> Event:
    return HumanResponseEvent(response="yes", q=event.get("prefix"))


def with_confirmation(replies: list[Reply], log: ToolLog, given: Speculation | None, **policy: Any) -> Any:
    """An agent whose `confirm` waits for a human; with a `policy`, of known reads and writes."""
    confirm, tools = confirmation(log), make_tools(log)
    if policy:
        speculatable(confirm, writes=["approvals"])
        speculatable(tools[0], reads=["docs"], **policy)
    return function_agent(replies, [*tools, confirm], given)


@pytest.mark.parametrize("in_workflow", [False, True])
def test_waiting_for_a_human_between_speculated_tools(in_workflow: bool) -> None:
    replies = [Reply((LOOKUP,)), Reply((CONFIRM,)), Reply((SEARCH,)), Reply(text="done")]
    speculation = predicting(replies)

    def make(log: ToolLog, given: Speculation | None) -> Any:
        agent = with_confirmation(replies, log, given)
        return alone(agent) if in_workflow else agent

    compared = compare(make, speculation, answer=yes, answer_after_s=600.0)
    assert compared.ours.tools_said == ["lookup of a1", "yes", "search of b"]
    assert compared.log.counts("started") == {("lookup", "a1"): 1, ("confirm", "sure"): 1, ("search", "b"): 1}
    assert outcomes(speculation) == (2, 0, 0)
    assert compared.saved_s == pytest.approx(0.8)


@pytest.mark.parametrize("reuse", ["turn", "ttl"])
def test_waiting_for_a_human_beside_a_speculated_tool(reuse: str) -> None:
    """In one answer, with `confirm` known not to write what `lookup` reads."""
    replies = [Reply((LOOKUP, CONFIRM)), Reply((SEARCH,)), Reply(text="done")]
    speculation = predicting(replies)
    compared = compare(
        lambda log, given: with_confirmation(replies, log, given, reuse=reuse),
        speculation,
        answer=yes,
        answer_after_s=600.0,
        in_order=False,
    )
    assert compared.ours.tools_said == ["lookup of a1", "yes", "search of b"]
    assert compared.log.counts("started") == {("lookup", "a1"): 1, ("confirm", "sure"): 1, ("search", "b"): 1}
    assert outcomes(speculation, "lookup") == outcomes(speculation, "search") == (1, 0, 0)


def test_waiting_for_a_human_beside_a_read_that_it_may_change() -> None:
    """Nothing is known of `confirm`: the read beside it is run as stock runs it."""
    replies = [Reply((LOOKUP, CONFIRM)), Reply(text="done")]
    speculation = predicting(replies)
    compared = compare(
        lambda log, given: with_confirmation(replies, log, given), speculation, answer=yes, answer_after_s=600.0
    )
    assert compared.log.counts("returned") == {("lookup", "a1"): 2, ("confirm", "sure"): 1}
    assert outcomes(speculation, "lookup") == (0, 0, 1)


def test_nothing_is_pending_while_a_human_thinks() -> None:
    replies = [Reply((LOOKUP, CONFIRM)), Reply(text="done")]
    speculation = predicting([Reply((LOOKUP, SEARCH, Call("lookup", {"q": "b"})))])
    log = ToolLog(lambda name, _: 3600.0 if name == "search" else 0.4)

    async def main() -> None:
        handler = with_confirmation(replies, log, speculation, reuse="turn").run(user_msg="go")
        await asyncio.sleep(60.0)
        assert [task.get_name() for task in asyncio.all_tasks() if "spectool" in task.get_name()] == []
        assert log.counts("cancelled") == {("search", "b"): 1}
        handler.ctx.send_event(HumanResponseEvent(response="yes", q="sure"))
        await handler

    run_virtual(main)
    assert outcomes(speculation, "lookup") == (1, 0, 0)


async def saved(agent: Any, after_s: float) -> tuple[dict[str, Any], list[Any], list[str]]:
    """What can be kept of a run `after_s` seconds after its start, which is then ended: its context and memory."""
    handler = agent.run(user_msg="go")
    await asyncio.sleep(after_s)
    kept = json.loads(json.dumps(handler.ctx.to_dict()))
    memory = (await handler.ctx.store.get("memory")).get_all()
    running = [str(task.get_coro()) for task in asyncio.all_tasks()]
    await handler.cancel_run()
    await settle()
    return kept, memory, running


async def restored(agent: Any, kept: dict[str, Any], memory: list[Any], **options: Any) -> Seen:
    in_memory = ChatMemoryBuffer.from_defaults(chat_history=memory)
    return await run(agent, None, ctx=Context.from_dict(agent, kept), restored_memory=in_memory, **options)


REPLIES = [Reply((LOOKUP,)), Reply((SEARCH,)), Reply(text="done")]

# While the model is asked: before the guess, and with an early run in flight; and while its call is joined to that.
MOMENTS_S = [0.1, 0.4, 0.8, 1.1]


@pytest.mark.parametrize("moment_s", MOMENTS_S)
@pytest.mark.parametrize("in_workflow", [False, True])
def test_a_context_saved_while_a_speculation_is_pending(moment_s: float, in_workflow: bool) -> None:
    def play(given: tuple[Speculation, Speculation] | None) -> tuple[Any, Seen, ToolLog]:
        log = ToolLog(lambda *_: 0.9)

        def agent(number: int) -> Any:
            made = function_agent(REPLIES, make_tools(log), given[number] if given else None)
            return alone(made) if in_workflow else made

        async def main() -> tuple[Any, Seen]:
            kept, memory, running = await saved(agent(0), moment_s)
            assert any("ToolCache._execute" in task for task in running) == (given is not None and moment_s > 0.25)
            return opened(kept), await restored(agent(1), kept, memory)

        return *run_virtual(main), log

    first, second = predicting(REPLIES), predicting(REPLIES)
    stock_kept, stock, _ = play(None)
    kept, ours, log = play((first, second))
    assert kept == stock_kept
    assert_equal(ours, stock, in_order=True)
    assert ours.tasks_left == []
    assert first.statistics().num_settled_turns == first.statistics().num_turns
    # What the first run had started was its own; the second run begins with an empty hand.
    again = moment_s < 1.0  # the model is asked once more; after its answer, its call is run once more
    assert outcomes(second) == ((0, 2, 0) if again else (0, 1, 0))
    assert log.counts("returned")["search", "b"] == 1


def test_waiting_for_a_human_in_another_run() -> None:
    replies = [Reply((LOOKUP,)), Reply((CONFIRM,)), Reply((SEARCH,)), Reply(text="done")]

    said = HumanResponseEvent(response="yes", q="sure")

    def play(given: tuple[Speculation, Speculation] | None) -> tuple[Any, Seen]:
        log = ToolLog(lambda *_: 0.4)

        async def main() -> tuple[Any, Seen]:
            agents = [with_confirmation(replies, log, given[number] if given else None) for number in (0, 1)]
            kept, memory, _ = await saved(agents[0], 60.0)
            return opened(kept), await restored(agents[1], kept, memory, answer=said, answer_after_s=1.0)

        return run_virtual(main)

    first, second = predicting(replies), predicting(replies)
    stock_kept, stock = play(None)
    kept, ours = play((first, second))
    assert kept == stock_kept
    assert_equal(ours, stock, in_order=True)
    assert ours.tools_said == ["yes", "search of b"]
    assert outcomes(first) == outcomes(second) == (1, 0, 0)


def test_a_second_run_with_the_context_of_the_first() -> None:
    """A conversation: memory and state go on, results do not."""
    replies = [Reply((LOOKUP,)), Reply(text="done"), Reply((LOOKUP,)), Reply(text="done again")]

    def play(given: Speculation | None) -> tuple[Seen, Seen, ToolLog]:
        log = ToolLog(lambda *_: 0.4)

        async def main() -> tuple[Seen, Seen]:
            tools = make_tools(log)
            speculatable(tools[0], reuse="ttl")
            agent = function_agent(replies, tools, given)
            context, memory = Context(agent), ChatMemoryBuffer.from_defaults()
            first = await run(agent, "go", ctx=context, memory=memory)
            return first, await run(agent, "go on", ctx=context, memory=memory)

        return *run_virtual(main), log

    speculation = predicting(replies)
    *stock, _ = play(None)
    *ours, log = play(speculation)
    for mine, theirs in zip(ours, stock, strict=True):
        assert_equal(mine, theirs, in_order=True)
    assert len(ours[1].memory) == 8
    assert log.counts("started") == {("lookup", "a1"): 2}
    assert outcomes(speculation) == (2, 0, 0)


@pytest.mark.parametrize("how", ["cancel_run", "stop_awaiting", "abort"])
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("in_workflow", [True, False])
@pytest.mark.parametrize("moment_s", MOMENTS_S)
def test_a_run_that_is_given_up_takes_its_early_runs_with_it(
    how: Any, in_workflow: bool, turn: int, moment_s: float
) -> None:
    """Also where stock forgets the step that asks the model, which goes on then."""
    speculation = predicting(REPLIES)
    log = ToolLog(lambda *_: 0.9)
    give_up = GiveUp(turn * 1.15 + moment_s, how)

    async def main() -> None:
        agent = function_agent(REPLIES, make_tools(log), speculation)
        seen = await run(alone(agent) if in_workflow else agent, give_up=give_up)
        assert not_stock(seen.tasks_left, give_up) == []
        started, ended = log.counts("started"), log.counts("cancelled") + log.counts("returned")
        assert started == ended
        assert started.total() == turn + (moment_s > 0.25)  # none by a speculator that answered later
        statistics = speculation.statistics()
        assert statistics.num_settled_turns == statistics.num_turns == turn + 1
        await asyncio.sleep(10.0)
        assert log.counts("started") == started
        assert speculation.statistics().num_launched == statistics.num_launched

    run_virtual(main)

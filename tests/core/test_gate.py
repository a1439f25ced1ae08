from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from spectool_core.config import validated_config
from spectool_core.gate import Gate, TurnBudget
from spectool_core.identity import WeakIdentityMap


class Tool:
    """An unhashable tool that equals every other one, as pydantic tools may."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class SlottedTool:
    __slots__ = ()


def test_each_limit_is_named_when_it_is_used_up() -> None:
    gate = Gate(validated_config(max_runs_per_turn=3, max_runs_per_tool=2, max_runs=4))
    first = TurnBudget()
    assert gate.limit_reached(first, "a") is None
    assert gate.spend(first, "a")
    assert gate.spend(first, "a")
    assert gate.limit_reached(first, "a") == "max_runs_per_tool"
    assert gate.limit_reached(first, "b") is None
    assert gate.spend(first, "b")
    assert gate.limit_reached(first, "c") == "max_runs_per_turn"

    second = TurnBudget()
    assert gate.limit_reached(second, "a") is None
    assert gate.spend(second, "a")
    assert gate.limit_reached(second, "b") == "max_runs"
    assert gate.limit_reached(TurnBudget(), "z") == "max_runs"


def test_no_runs_at_all() -> None:
    gate = Gate(validated_config(max_runs=0))
    assert gate.limit_reached(TurnBudget(), "a") == "max_runs"
    assert not gate.spend(TurnBudget(), "a")


def test_threads_together_never_spend_more_than_max_runs() -> None:
    gate = Gate(validated_config(max_runs=50))
    num_threads = 8
    barrier = threading.Barrier(num_threads)

    def spend() -> int:
        budget = TurnBudget()
        barrier.wait()
        # Every thread saw room before any has spent, which is what a race does.
        assert gate.limit_reached(budget, "a") is None
        barrier.wait()
        granted = sum(gate.spend(budget, "a") for _ in range(50))
        assert budget.num_runs == budget.num_runs_of_tool.get("a", 0) == granted
        return granted

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            granted = [future.result() for future in [pool.submit(spend) for _ in range(num_threads)]]
    finally:
        sys.setswitchinterval(interval)
    assert sum(granted) == 50


def test_a_tool_rests_until_it_is_woken() -> None:
    gate = Gate(validated_config())
    tool, other = Tool(), Tool()
    assert not gate.is_resting(tool)
    gate.rest(tool, for_good=False)
    assert gate.is_resting(tool)
    assert not gate.is_resting(other)
    gate.wake(other)
    assert gate.is_resting(tool)
    gate.wake(tool)
    assert not gate.is_resting(tool)


def test_a_tool_that_rests_for_good_is_never_woken() -> None:
    gate = Gate(validated_config())
    tool = Tool()
    gate.rest(tool, for_good=True)
    gate.rest(tool, for_good=False)
    gate.wake(tool)
    assert gate.is_resting(tool)


@pytest.mark.parametrize("tool", [SlottedTool(), object(), 7], ids=["slots", "object", "int"])
def test_a_tool_that_takes_no_weak_references_can_rest_too(tool: object) -> None:
    gate = Gate(validated_config())
    gate.rest(tool, for_good=False)
    assert gate.is_resting(tool)
    gate.wake(tool)
    assert not gate.is_resting(tool)


def test_tools_that_are_gone_take_no_room_and_leave_no_rest_to_others() -> None:
    values: WeakIdentityMap[str] = WeakIdentityMap()
    for _ in range(1000):
        tool = Tool()
        assert values.get(tool) is None
        values.set(tool, "first")
        values.set(tool, "second")
        assert values.get(tool) == "second"
    del tool
    gc.collect()
    assert len(values) == 0


def test_a_discarded_tool_can_be_remembered_again() -> None:
    values: WeakIdentityMap[int] = WeakIdentityMap()
    tool = Tool()
    values.discard(tool)
    values.set(tool, 1)
    values.discard(tool)
    assert values.get(tool) is None
    assert values.set(tool, 2) == 2
    assert values.get(tool) == 2
    assert len(values) == 1

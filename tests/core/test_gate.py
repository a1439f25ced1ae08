from __future__ import annotations

import gc

import pytest

from spectool_core.config import validated_config
from spectool_core.gate import Gate
from spectool_core.identity import WeakIdentityMap


class Tool:
    """An unhashable tool that equals every other one, as pydantic tools may."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class SlottedTool:
    __slots__ = ()


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

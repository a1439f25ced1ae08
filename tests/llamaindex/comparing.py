"""A speculative run held against the stock one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from spectool_core import Speculation
from tests.llamaindex.agents import Seen, run
from tests.llamaindex.clock import run_virtual
from tests.llamaindex.recording import per_event, per_span, without_order
from tests.tool_log import ToolLog


def assert_equal(ours: Seen, stock: Seen, *, in_order: bool) -> None:
    """Equal per call and, with `in_order`, in total order: where no two tools run at once, stock's is determined."""
    for name in ("result", "error", "memory", "state", "context", "requests"):
        assert without_order(getattr(ours, name)) == without_order(getattr(stock, name)), name
    assert by_call(ours.events) == by_call(stock.events)
    assert per_span(ours.trace) == per_span(stock.trace)
    assert per_event(ours.callbacks) == per_event(stock.callbacks)
    if in_order:
        for each in fields(Seen):
            if each.name != "duration_s":
                assert getattr(ours, each.name) == getattr(stock, each.name), each.name


def by_call(events: list[Any]) -> tuple[Any, Counter[str]]:
    """The events of the agent in order, and those of its tools per call."""
    of_tools = [each for each in events if each["type"] in ("ToolCall", "ToolCallResult")]
    others = [without_order(each) for each in events if each["type"] not in ("ToolCall", "ToolCallResult")]
    return others, Counter(map(repr, of_tools))


@dataclass
class Compared:
    """Two equal runs, and the runs of their tools."""

    ours: Seen
    stock: Seen
    log: ToolLog
    stock_log: ToolLog

    @property
    def saved_s(self) -> float:
        return self.stock.duration_s - self.ours.duration_s


def compare(
    make: Callable[[ToolLog, Speculation | None], Any],
    speculation: Speculation,
    *,
    latency_s: Callable[[str, str], float] = lambda *_: 0.4,
    broken: frozenset[str] = frozenset(),
    in_order: bool = True,
    **options: Any,
) -> Compared:
    """Run what `make` builds, stock and with `speculation`, and hold one against the other; `options` are `run`'s."""

    def play(given: Speculation | None) -> tuple[Seen, ToolLog]:
        log = ToolLog(latency_s, broken)

        async def main() -> Seen:
            return await run(make(log, given), **options)

        return run_virtual(main), log

    stock, stock_log = play(None)
    ours, log = play(speculation)
    assert_equal(ours, stock, in_order=in_order)
    assert ours.tasks_left == []
    assert broken or ours.duration_s <= stock.duration_s
    statistics = speculation.statistics()
    assert statistics.num_settled_turns == statistics.num_turns
    return Compared(ours, stock, log, stock_log)

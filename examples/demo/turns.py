"""The turns of one agent run: when they began, were answered and ended, and what ran in them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from examples.demo.tools import ToolLog, ToolRun

__all__ = ["Call", "Early", "Turn", "TurnLog"]

Call: TypeAlias = tuple[str, Mapping[str, Any]]
"""A tool's name and the arguments that it receives, defaults included."""

Early: TypeAlias = Literal["hit", "join", "wasted"]
"""What became of a tool run that began before the main model had answered."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: the main model generates, then the tools that it asked for run. Times are on the event loop's clock.

    Args:
        number: from 1.
        started_s: the prompt goes to the main model.
        answered_s: it has answered.
        ended_s: its tools are done; `answered_s` in a turn without calls.
        calls: what it asked for.
        tool_runs: what ran in this time, asked for or not.
    """

    number: int
    started_s: float
    answered_s: float
    ended_s: float
    calls: Sequence[Call]
    tool_runs: Sequence[ToolRun]

    def early(self, run: ToolRun) -> Early | None:
        """What became of a run that began before the main model had answered; None if it began after."""
        if run.started_s >= self.answered_s:
            return None
        call = run.tool, run.arguments
        if run.is_cancelled or call not in self.calls or self._ran_after_all(call):
            return "wasted"
        return "hit" if run.ended_s <= self.answered_s else "join"

    def served(self, call: Call) -> Early | None:
        """How one of `calls` was served: by an early run, finished or joined, or by the tool itself (None)."""
        fates = [self.early(run) for run in self.tool_runs if (run.tool, run.arguments) == call]
        return next((fate for fate in fates if fate in ("hit", "join")), None)

    def _ran_after_all(self, call: Call) -> bool:
        # An early result is not used when the same answer also writes: the read has to see the write.
        return any(run.started_s >= self.answered_s and (run.tool, run.arguments) == call for run in self.tool_runs)


@dataclass(slots=True)
class _TurnTimes:
    started_s: float
    answered_s: float = math.inf
    ended_s: float = math.inf
    calls: Sequence[Call] = ()


class TurnLog:
    """Told by an agent's framework of each turn as it goes; tells `on_turn` of each that ended with tools.

    Args:
        tools: where the tools' runs are written down.
        on_turn: hears of a turn when its tools are done.
    """

    def __init__(self, tools: ToolLog, on_turn: Callable[[Turn], None]) -> None:
        self._tools = tools
        self._on_turn = on_turn
        self._times: list[_TurnTimes] = []

    def begin(self) -> None:
        """A prompt goes to the main model."""
        self._times.append(_TurnTimes(_now()))

    def answer(self, calls: Sequence[Call]) -> None:
        """The main model has answered and asks for `calls`."""
        times = self._times[-1]
        times.answered_s = times.ended_s = _now()
        times.calls = calls

    def end(self) -> None:
        """All tools of the turn are done."""
        self._times[-1].ended_s = _now()
        self._on_turn(self.turns()[-1])

    def turns(self) -> list[Turn]:
        """The turns so far, with the tool runs that have ended."""
        next_starts = [times.started_s for times in self._times[1:]] + [math.inf]
        return [
            Turn(
                number,
                times.started_s,
                times.answered_s,
                times.ended_s,
                times.calls,
                [run for run in self._tools.runs if times.started_s <= run.started_s < next_start_s],
            )
            for number, (times, next_start_s) in enumerate(zip(self._times, next_starts, strict=True), 1)
        ]


def _now() -> float:
    return asyncio.get_running_loop().time()

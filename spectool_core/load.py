"""How busy an event loop is, measured as turns start on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from spectool_core.estimates import RunningMean

__all__ = ["IDLE", "Load", "LoopLoad"]

# Shorter spans tell of single callbacks, not of the loop.
_MIN_SPAN_S = 0.2


@dataclass(frozen=True, slots=True)
class Load:
    """How busy an event loop is.

    Args:
        num_agents: turns open at once.
        cpu_per_turn_s: the loop's CPU time for one turn, with all that is done in it; 0 where it is not known.
    """

    num_agents: int = 1
    cpu_per_turn_s: float = 0.0


IDLE = Load()


class LoopLoad:
    """Measures one event loop, on whose thread it is called.

    Args:
        loop: the loop; its clock gives the spans.
        cpu_clock: seconds of CPU time that this thread has used.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self._loop = loop
        self._cpu_clock = cpu_clock
        self._since_s = loop.time()
        self._cpu_s: float | None = None
        self._num_open = 0
        self._num_started = 0
        self._cpu_per_turn = RunningMean()
        self._open = RunningMean()

    def turn_started(self) -> Load:
        """One more turn has started: how busy the loop is."""
        self._num_open += 1
        self._num_started += 1
        self._open.add(self._num_open)
        span_s = self._loop.time() - self._since_s
        if self._cpu_s is None:
            self._begin()
        elif span_s >= _MIN_SPAN_S:
            busy_s = self._cpu_clock() - self._cpu_s
            self._cpu_per_turn.add(min(busy_s, span_s) / self._num_started)
            self._begin()
        return Load(max(1, round(self._open.value or 1)), self._cpu_per_turn.value or 0.0)

    def turn_ended(self) -> None:
        """A turn has been settled."""
        self._num_open -= 1

    def _begin(self) -> None:
        self._since_s = self._loop.time()
        self._cpu_s = self._cpu_clock()
        self._num_started = 0

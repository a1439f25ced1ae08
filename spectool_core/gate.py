"""Whether a speculative run may start: until the gate learns, a budget of runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from spectool_core.config import SpeculationConfig
from spectool_core.identity import WeakIdentityMap

__all__ = ["Gate", "TurnBudget"]


@dataclass(slots=True)
class TurnBudget:
    """The runs that one turn has started."""

    num_runs: int = 0
    num_runs_of_tool: dict[str, int] = field(default_factory=dict)


class Gate:
    """Counts runs against the limits of the config, and lets tools rest. Thread-safe.

    A tool whose speculative run failed rests until a call of the main model to it succeeded; one that emits what
    cannot be replayed rests for good.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._num_runs = 0
        self._resting: WeakIdentityMap[bool] = WeakIdentityMap()

    def limit_reached(self, turn: TurnBudget, tool: str) -> str | None:
        """The name of the limit that forbids one more run, if any."""
        config = self._config
        if config.max_runs is not None and self._num_runs >= config.max_runs:
            return "max_runs"
        if turn.num_runs >= config.max_runs_per_turn:
            return "max_runs_per_turn"
        if turn.num_runs_of_tool.get(tool, 0) >= config.max_runs_per_tool:
            return "max_runs_per_tool"
        return None

    def spend(self, turn: TurnBudget, tool: str) -> bool:
        """Count one started run; False, and nothing counted, if another thread took the last of `max_runs`."""
        with self._lock:
            if self._config.max_runs is not None and self._num_runs >= self._config.max_runs:
                return False
            self._num_runs += 1
        turn.num_runs += 1
        turn.num_runs_of_tool[tool] = turn.num_runs_of_tool.get(tool, 0) + 1
        return True

    def is_resting(self, tool: object) -> bool:
        """Whether this tool object must not be run early now."""
        return self._resting.get(tool) is not None

    def rest(self, tool: object, *, for_good: bool) -> None:
        """Stop running the tool early, until a real call succeeds or `for_good`."""
        with self._lock:
            self._resting.set(tool, for_good or self._resting.get(tool) is True)

    def wake(self, tool: object) -> None:
        """A real call of the tool succeeded."""
        with self._lock:
            if self._resting.get(tool) is False:
                self._resting.discard(tool)

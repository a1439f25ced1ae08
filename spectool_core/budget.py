"""Limits on what speculation may use: runs of a turn and of all, and runs, tokens and money of a minute."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from spectool_core.config import SpeculationConfig

__all__ = ["Budget", "TurnBudget"]

_MINUTE_S = 60.0


@dataclass(slots=True)
class TurnBudget:
    """The runs that one turn has started."""

    num_runs: int = 0
    num_runs_of_tool: dict[str, int] = field(default_factory=dict)

    def give_back(self, tool: str) -> None:
        """A run that was counted has not begun, and will not."""
        self.num_runs -= 1
        self.num_runs_of_tool[tool] -= 1


class Budget:
    """Counts against the limits of the config. Thread-safe."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._num_runs = 0
        self._minute = {
            "max_runs_per_minute": _LastMinute(config.max_runs_per_minute),
            "max_tokens_per_minute": _LastMinute(config.max_tokens_per_minute),
            "max_cost_per_minute": _LastMinute(config.max_cost_per_minute),
        }

    def run_limit(self, turn: TurnBudget, tool: str, now_s: float) -> str | None:
        """The name of the limit that forbids one more run, if any."""
        config = self._config
        if config.max_runs is not None and self._num_runs >= config.max_runs:
            return "max_runs"
        if turn.num_runs >= config.max_runs_per_turn:
            return "max_runs_per_turn"
        if turn.num_runs_of_tool.get(tool, 0) >= config.max_runs_per_tool:
            return "max_runs_per_tool"
        with self._lock:
            return self._used_up(("max_runs_per_minute", "max_cost_per_minute"), now_s)

    def prediction_limit(self, now_s: float) -> str | None:
        """The name of the limit that forbids to ask a speculator, if any."""
        with self._lock:
            return self._used_up(("max_tokens_per_minute", "max_cost_per_minute"), now_s)

    def spend_run(self, turn: TurnBudget, tool: str, cost: float, now_s: float) -> bool:
        """Count one started run; False, and nothing counted, if another thread took the last of `max_runs`."""
        with self._lock:
            if self._config.max_runs is not None and self._num_runs >= self._config.max_runs:
                return False
            self._num_runs += 1
            self._minute["max_runs_per_minute"].add(1, now_s)
            self._minute["max_cost_per_minute"].add(cost, now_s)
        turn.num_runs += 1
        turn.num_runs_of_tool[tool] = turn.num_runs_of_tool.get(tool, 0) + 1
        return True

    def spend_prediction(self, num_tokens: int, cost: float, now_s: float) -> None:
        """Count what a speculator has used."""
        with self._lock:
            self._minute["max_tokens_per_minute"].add(num_tokens, now_s)
            self._minute["max_cost_per_minute"].add(cost, now_s)

    def _used_up(self, limits: tuple[str, ...], now_s: float) -> str | None:
        return next((name for name in limits if self._minute[name].is_used_up(now_s)), None)


class _LastMinute:
    """A sum over the last minute, and its limit."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._entries: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, amount: float, now_s: float) -> None:
        if self._limit is not None and amount:
            self._entries.append((now_s, amount))
            self._sum += amount

    def is_used_up(self, now_s: float) -> bool:
        if self._limit is None:
            return False
        while self._entries and self._entries[0][0] <= now_s - _MINUTE_S:
            self._sum -= self._entries.popleft()[1]
        return bool(self._entries) and self._sum >= self._limit

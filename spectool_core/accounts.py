"""What speculators have used, as they report it, charged to the budget as it grows."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spectool_core.budget import Budget
from spectool_core.speculators.protocol import Speculator, SpeculatorStatistics

__all__ = ["Accounts"]


class Accounts:
    """Reads the statistics of speculators that keep any. Thread-safe."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._charged: dict[str, tuple[int, float]] = {}

    def charge(self, name: str, speculator: Speculator, now_s: float) -> None:
        """Charge what `speculator` has used since the last time."""
        statistics: Callable[[], object] | None = getattr(speculator, "statistics", None)
        used = statistics() if callable(statistics) else None
        if not isinstance(used, SpeculatorStatistics):
            return
        num_tokens, cost = used.num_prompt_tokens + used.num_completion_tokens, used.cost
        with self._lock:
            before_tokens, before_cost = self._charged.get(name, (0, 0.0))
            self._charged[name] = num_tokens, cost
        self._budget.spend_prediction(max(0, num_tokens - before_tokens), max(0.0, cost - before_cost), now_s)

"""Counts of one speculator, added up from any thread."""

from __future__ import annotations

import threading
from dataclasses import replace

from spectool_core.speculators.protocol import SpeculatorStatistics

__all__ = ["Tally"]


class Tally:
    """Holds the latest `SpeculatorStatistics`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = SpeculatorStatistics()

    def add(self, **amounts: int) -> None:
        """Add to the named counts."""
        with self._lock:
            value = self._value
            self._value = replace(value, **{name: getattr(value, name) + n for name, n in amounts.items()})

    def value(self) -> SpeculatorStatistics:
        """The counts so far."""
        return self._value

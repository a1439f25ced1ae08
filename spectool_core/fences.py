"""What a write makes stale: a log of fences that every event loop's cache reads."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from cachetools import LRUCache

__all__ = ["Fences"]

_MAX_SCOPES = 4096


class Fences:
    """Orders runs against writes. A result is stale if a fence that meets its reads came after the run began.

    A write with declared `writes` fences, in every scope, the runs whose `reads` meet them; a run or a write that
    declares nothing meets everything. A write that declares nothing fences its own scope, or all scopes when it
    cannot be known which one holds what it changed. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clock = 0
        self._everything = 0
        self._any_tag = 0
        self._tags: dict[str, int] = {}
        self._scopes: LRUCache[Hashable, int] = LRUCache(_MAX_SCOPES)

    def stamp(self) -> int:
        """A reading of the fence clock, to be taken when a run begins."""
        return self._clock

    def raise_(self, *, scope: Hashable | None, writes: frozenset[str] | None) -> None:
        """Record that a write ended; `writes` None means undeclared, `scope` None means any scope."""
        with self._lock:
            self._clock += 1
            if writes is not None:
                self._any_tag = self._clock
                self._tags.update(dict.fromkeys(writes, self._clock))
            elif scope is None:
                self._everything = self._clock
            else:
                if len(self._scopes) == _MAX_SCOPES and scope not in self._scopes:
                    # A forgotten fence must not let a stale result through, so it becomes a fence over everything.
                    self._everything = max(self._everything, self._scopes.popitem()[1])
                self._scopes[scope] = self._clock

    def is_stale(self, stamp: int, *, scope: Hashable, reads: frozenset[str] | None) -> bool:
        """Whether a run that began at `stamp` in `scope` and reads `reads` has been fenced since."""
        if stamp == self._clock:
            return False
        with self._lock:
            tagged = self._any_tag if reads is None else max((self._tags.get(tag, 0) for tag in reads), default=0)
            return stamp < max(self._everything, tagged, self._scopes.get(scope, 0))

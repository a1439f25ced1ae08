"""What a write makes stale: a log of fences, and of the writes under way, that every event loop's cache reads."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from cachetools import LRUCache

__all__ = ["Fences", "Write", "meet"]

_MAX_SCOPES = 4096


def meet(writes: frozenset[str] | None, reads: frozenset[str] | None) -> bool:
    """Whether a write may change what is read; None is everything."""
    return writes is None or reads is None or not writes.isdisjoint(reads)


class Write:
    """A write under way, until its `end`."""

    def __init__(self, fences: Fences, scope: Hashable | None, writes: frozenset[str] | None) -> None:
        self._fences: Fences | None = fences
        self.scope = scope
        self.writes = writes

    def end(self) -> None:
        """The write has ended, or failed: it may have changed things. Once is enough."""
        fences, self._fences = self._fences, None
        if fences is not None:
            fences.end(self)

    def meets(self, scope: Hashable, reads: frozenset[str] | None) -> bool:
        """Whether it may change what is read in `scope`."""
        if self.writes is None:
            return self.scope is None or self.scope == scope
        return meet(self.writes, reads)


class Fences:
    """Orders runs against writes. A result is stale if a fence that meets its reads came after the run began.

    Nobody knows when within its time a write takes effect: it fences as it begins and as it ends, and what is read in
    between is stale as long as it lasts.

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
        self._under_way: dict[Write, None] = {}

    def begin(self, *, scope: Hashable | None, writes: frozenset[str] | None) -> Write:
        """A write begins; `writes` None means undeclared, `scope` None means any scope."""
        write = Write(self, scope, writes)
        with self._lock:
            self._under_way[write] = None
        self.raise_(scope=scope, writes=writes)
        return write

    def end(self, write: Write) -> None:
        """See `Write.end`."""
        self.raise_(scope=write.scope, writes=write.writes)
        with self._lock:
            self._under_way.pop(write, None)

    def is_being_written(self, *, scope: Hashable, reads: frozenset[str] | None) -> bool:
        """Whether a write is under way that may change what is read in `scope`."""
        if not self._under_way:
            return False
        with self._lock:
            return any(write.meets(scope, reads) for write in self._under_way)

    def stamp(self) -> int:
        """A reading of the fence clock, to be taken when a run begins."""
        return self._clock

    def raise_(self, *, scope: Hashable | None, writes: frozenset[str] | None) -> None:
        """Set a fence; `writes` None means undeclared, `scope` None means any scope."""
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
        """Whether a run that began at `stamp` in `scope` and reads `reads` has been fenced since, or is just now."""
        if self.is_being_written(scope=scope, reads=reads):
            return True
        if stamp == self._clock:
            return False
        with self._lock:
            tagged = self._any_tag if reads is None else max((self._tags.get(tag, 0) for tag in reads), default=0)
            return stamp < max(self._everything, tagged, self._scopes.get(scope, 0))

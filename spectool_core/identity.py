"""A weak mapping by identity: tool objects of frameworks are often unhashable, and two equal ones are two tools."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["WeakIdentityMap"]

V = TypeVar("V")


class WeakIdentityMap(Generic[V]):
    """Maps objects to values for as long as the objects live; each operation is atomic under the GIL."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Callable[[], object], V]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: object) -> V | None:
        """The value for this very object, or None."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None else None

    def set(self, key: object, value: V) -> V:
        """Remember `value` for this very object, and return it."""
        identity, entries = id(key), self._entries
        try:
            reference: Callable[[], object] = weakref.ref(key, lambda _: entries.pop(identity, None))
        except TypeError:  # it takes no weak references: kept alive, so that its identity is not used again

            def reference() -> object:
                return key

        entries[identity] = (reference, value)
        return value

    def discard(self, key: object) -> None:
        """Forget this object."""
        self._entries.pop(id(key), None)

"""Counts that one thread changes and others wait for: on a blocked thread or on any event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Tally"]

S = TypeVar("S")


class Tally(Generic[S]):
    """A frozen value that is replaced under a lock, and whose changes can be waited for.

    Args:
        value: the value to start from.
    """

    def __init__(self, value: S) -> None:
        self._value = value
        self._changed = threading.Condition()
        self._watchers: list[Callable[[S], None]] = []

    @property
    def value(self) -> S:
        """The latest value."""
        return self._value

    def update(self, transition: Callable[[S], S]) -> S:
        """Replace the value by `transition(value)`, wake whoever waits, and return the new value."""
        with self._changed:
            self._value = transition(self._value)
            self._changed.notify_all()
            for watch in self._watchers:
                watch(self._value)
            return self._value

    def wait_until(self, predicate: Callable[[S], bool], timeout_s: float) -> S:
        """Block until `predicate(value)` holds and return that value; raise TimeoutError after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: predicate(self._value), timeout_s):
                raise TimeoutError(f"not reached within {timeout_s} s: {self._value}")
            return self._value

    async def until(self, predicate: Callable[[S], bool], timeout_s: float | None) -> S:
        """Await `predicate(value)` and return that value; raise TimeoutError after `timeout_s` on the loop's clock."""
        loop = asyncio.get_running_loop()
        reached: asyncio.Future[S] = loop.create_future()

        def settle(value: S) -> None:
            if not reached.done():
                reached.set_result(value)

        def watch(value: S) -> None:
            if predicate(value):
                loop.call_soon_threadsafe(settle, value)

        with self._changed:
            if predicate(self._value):
                return self._value
            self._watchers.append(watch)
        try:
            async with asyncio.timeout(timeout_s):
                return await reached
        except TimeoutError:
            raise TimeoutError(f"not reached within {timeout_s} s: {self._value}") from None
        finally:
            with self._changed:
                self._watchers.remove(watch)

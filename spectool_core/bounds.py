"""A bound on how many may do something at once, in which the most urgent goes first."""

from __future__ import annotations

import asyncio
import heapq
import itertools

__all__ = ["Bound"]


class Bound:
    """A semaphore whose places go to the most urgent who wait, and to the first of equals. For one event loop.

    Args:
        capacity: places.
    """

    def __init__(self, capacity: int) -> None:
        self._num_free = capacity
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    async def acquire(self, urgency: float = 0.0) -> None:
        """Wait for a place; the greater the urgency, the sooner."""
        if self._num_free > 0:
            self._num_free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-urgency, next(self._order), place))
        try:
            await place
        except BaseException:
            if place.done() and not place.cancelled():
                self.release()  # it was given one in the moment that it was cancelled
            raise

    def release(self) -> None:
        """Give a place back."""
        while self._waiting:
            _, _, place = heapq.heappop(self._waiting)
            if not place.done():
                place.set_result(None)
                return
        self._num_free += 1

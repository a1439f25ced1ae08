"""A latch that a test opens: it puts events in order without any wait on the clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spectool_core.errors import ConfigurationError
from spectool_core.testing.tally import Tally

__all__ = ["Latch", "LatchStatistics"]


@dataclass(frozen=True, slots=True)
class LatchStatistics:
    """Who has come to a latch so far."""

    is_open: bool = False
    num_arrived: int = 0


class Latch:
    """Holds back a scripted answer or a fake tool until the test opens it, from any thread or event loop.

    Args:
        num_parties: the latch opens by itself when so many have arrived, which proves that they ran at once;
            None leaves it to `open()`.
        timeout_s: how long one waits at the latch before a TimeoutError; a bound for failing tests. On an event
            loop it is measured by the loop's own clock.

    Raises:
        ConfigurationError: `num_parties` is below one.
    """

    def __init__(self, num_parties: int | None = None, *, timeout_s: float = 30.0) -> None:
        if num_parties is not None and num_parties < 1:
            raise ConfigurationError("num_parties", num_parties, "None or an integer of at least 1")
        self._num_parties = num_parties
        self._timeout_s = timeout_s
        self._tally = Tally(LatchStatistics())

    def open(self) -> None:
        """Let through everyone who waits and everyone who comes later."""
        self._tally.update(lambda state: replace(state, is_open=True))

    def close(self) -> None:
        """Hold back everyone who comes from now on."""
        self._tally.update(lambda state: replace(state, is_open=False))

    def wait(self) -> None:
        """Arrive and block until the latch is open."""
        self._tally.update(self._arrive)
        self._tally.wait_until(_is_open, self._timeout_s)

    async def pass_through(self) -> None:
        """Arrive and await the latch's opening."""
        self._tally.update(self._arrive)
        await self._tally.until(_is_open, self._timeout_s)

    def wait_until_arrived(self, num_arrived: int, *, timeout_s: float = 10.0) -> None:
        """Block until `num_arrived` have come to the latch, open or not."""
        self._tally.wait_until(lambda state: state.num_arrived >= num_arrived, timeout_s)

    async def until_arrived(self, num_arrived: int, *, timeout_s: float = 10.0) -> None:
        """Await that `num_arrived` have come to the latch, open or not."""
        await self._tally.until(lambda state: state.num_arrived >= num_arrived, timeout_s)

    def statistics(self) -> LatchStatistics:
        """Whether the latch is open and how many have come."""
        return self._tally.value

    def _arrive(self, state: LatchStatistics) -> LatchStatistics:
        num_arrived = state.num_arrived + 1
        is_full = self._num_parties is not None and num_arrived >= self._num_parties
        return LatchStatistics(is_open=state.is_open or is_full, num_arrived=num_arrived)


def _is_open(state: LatchStatistics) -> bool:
    return state.is_open

"""The virtual clock: no wall time, exact times, and an end for code that waits for ever."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectool_core.errors import ConfigurationError
from spectool_core.testing import run_virtual, sleep_until, virtual_event_loop


def test_a_day_passes_at_once_and_exactly():
    async def main() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    started_s = time.perf_counter()
    assert run_virtual(main) == 86_400
    assert time.perf_counter() - started_s < 10


@given(st.lists(st.floats(0, 100), max_size=30))
def test_times_are_exact_to_the_nanosecond_for_each_wait(delays_s):
    async def main() -> float:
        for delay_s in delays_s:
            await asyncio.sleep(delay_s)
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == pytest.approx(sum(delays_s), abs=2e-9 * (len(delays_s) + 1))


def test_long_chains_of_awaits_take_no_time():
    async def main() -> float:
        async def chain(length: int) -> None:
            for _ in range(length):
                await asyncio.sleep(0)

        # Time must not move to the timer while anything is left to run.
        timer = asyncio.create_task(asyncio.sleep(1))
        await asyncio.gather(*(chain(1000) for _ in range(3)))
        reached_s = asyncio.get_running_loop().time()
        await timer
        return reached_s

    assert run_virtual(main) == 0


def test_order_is_that_of_times_then_of_creation():
    async def main() -> list[str]:
        seen: list[str] = []

        async def note(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            seen.append(name)

        async with asyncio.TaskGroup() as group:
            for name, delay_s in (("late", 0.3), ("first", 0.1), ("second", 0.1), ("sum", 0.1 + 0.2)):
                group.create_task(note(name, delay_s))
        return seen

    assert run_virtual(main) == ["first", "second", "late", "sum"]


def test_timeouts_run_on_the_virtual_clock():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 2.5


def test_code_that_waits_for_ever_ends_at_the_limit():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run_virtual(main)


def test_sleep_until_is_absolute():
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        reached = []
        for step in range(1, 4):
            await sleep_until(100 + step / 10)
            reached.append(loop.time())
        await sleep_until(50)
        return [*reached, loop.time()]

    assert run_virtual(main, start_s=100) == [100.1, 100.2, 100.3, 100.3]


def test_cancelled_sleep_leaves_nothing_behind():
    async def main() -> float:
        sleeper = asyncio.create_task(sleep_until(5))
        await asyncio.sleep(1)
        sleeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeper
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 1


def test_loop_can_be_used_on_its_own():
    loop = virtual_event_loop(start_s=7)
    try:
        loop.run_until_complete(asyncio.sleep(3))
        assert loop.time() == 10
    finally:
        loop.close()


def test_limit_must_be_positive():
    with pytest.raises(ConfigurationError, match="limit_s"):
        run_virtual(lambda: asyncio.sleep(0), limit_s=0)

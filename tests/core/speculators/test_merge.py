from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from spectool_core.speculators._merge import merged
from spectool_core.testing import LeakCheck


class Source:
    """Yields what it is given, when it is given; None ends it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str | None] = asyncio.Queue()
        self.is_closed = False

    async def items(self) -> AsyncGenerator[str]:
        try:
            while (item := await self.queue.get()) is not None:
                yield item
        finally:
            self.is_closed = True


async def test_items_come_in_order_of_arrival() -> None:
    one, two = Source(), Source()
    async with LeakCheck(), aclosing(merged([one.items(), two.items()])) as items:
        for source, item in [(two, "a"), (one, "b"), (two, "c")]:
            source.queue.put_nowait(item)
            assert await anext(items) == item
        one.queue.put_nowait(None)
        two.queue.put_nowait("d")
        assert await anext(items) == "d"
        two.queue.put_nowait(None)
        with pytest.raises(StopAsyncIteration):
            await anext(items)


async def test_closing_closes_the_sources_before_it_returns() -> None:
    one, two = Source(), Source()
    async with LeakCheck():
        async with aclosing(merged([one.items(), two.items()])) as items:
            one.queue.put_nowait("a")
            await anext(items)
        assert one.is_closed
        assert two.is_closed


async def test_cancelling_closes_the_sources_before_it_returns() -> None:
    one, two = Source(), Source()
    async with LeakCheck():
        task = asyncio.ensure_future(anext(merged([one.items(), two.items()])))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert one.is_closed
        assert two.is_closed


async def test_a_failed_source_ends_alone() -> None:
    async def failing() -> AsyncGenerator[str]:
        yield "a"
        raise RuntimeError

    async with LeakCheck():
        assert [item async for item in merged([failing()])] == ["a"]

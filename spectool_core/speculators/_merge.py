"""Several async generators as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

__all__ = ["merged"]

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield what `sources` yield, in order of arrival; closing it closes them, and has done so when it returns."""
    arrived: asyncio.Queue[T | _End] = asyncio.Queue()
    tasks = [asyncio.create_task(_drain(source, arrived)) for source in sources]
    num_open = len(tasks)
    try:
        while num_open:
            item = await arrived.get()
            if isinstance(item, _End):
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _End:
    """A source has ended."""


async def _drain(source: AsyncGenerator[T], arrived: asyncio.Queue[T | _End]) -> None:
    try:
        async for item in source:
            arrived.put_nowait(item)
    finally:
        arrived.put_nowait(_End())

"""The virtual clock for LlamaIndex, whose memory does everything in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from spectool_core import testing

T = TypeVar("T")


class _AtOnce(ThreadPoolExecutor):
    """Runs what it is given before `submit` returns: a virtual clock does not wait for threads."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as exc:
            future.set_exception(exc)
        return future


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` on a virtual clock; what goes to the loop's default executor takes no time."""

    async def threadless() -> T:
        asyncio.get_running_loop().set_default_executor(_AtOnce())
        return await main()

    return testing.run_virtual(threadless)

"""A virtual clock: event loops whose waits take no wall time and whose times are exact (looptime)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from spectool_core.errors import ConfigurationError, MissingExtraError

__all__ = ["run_virtual", "sleep_until", "virtual_event_loop"]

T = TypeVar("T")


def virtual_event_loop(*, start_s: float = 0.0) -> asyncio.AbstractEventLoop:
    """Make an event loop on a virtual clock, which moves to the next timer as soon as nothing is left to run.

    `loop.time()` starts at `start_s` and counts in nanoseconds. For code without sockets and threads: they would be
    given no time. The caller closes the loop.

    Raises:
        MissingExtraError: the extra `testing` is not installed.
    """
    try:
        import looptime
    except ImportError as error:
        raise MissingExtraError("looptime", "testing") from error
    # No empty cycles before time moves: looptime's default of 42 is for input from outside.
    loop: asyncio.AbstractEventLoop = looptime.new_event_loop(start=start_s, resolution=1e-9, noop_cycles=0)
    join_threads = loop.shutdown_default_executor

    async def shutdown_default_executor(timeout: float | None = None) -> None:  # noqa: ARG001 - asyncio's own name
        # Without asyncio's time limit: on this clock it would be over before a thread has ended.
        await join_threads()

    loop.shutdown_default_executor = shutdown_default_executor  # type: ignore[method-assign]
    return loop


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], *, start_s: float = 0.0, limit_s: float = 1_000_000.0) -> T:
    """Run `main()` on a virtual clock and return its result, like `asyncio.run`.

    Args:
        main: an async function without arguments.
        start_s: the loop's time at the start.
        limit_s: virtual seconds after which a TimeoutError is raised; code that waits for ever gets there at once.

    Raises:
        TimeoutError: `main` was not done within `limit_s`.
        MissingExtraError: the extra `testing` is not installed.
    """
    if limit_s <= 0:
        raise ConfigurationError("limit_s", limit_s, "a number above 0")

    async def limited() -> T:
        async with asyncio.timeout(limit_s):
            return await main()

    with asyncio.Runner(loop_factory=lambda: virtual_event_loop(start_s=start_s)) as runner:
        return runner.run(limited())


async def sleep_until(when_s: float) -> None:
    """Wait until the running loop's time is `when_s`; absolute, so that a sequence of waits does not drift."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()
    timer = loop.call_at(when_s, lambda: None if woken.done() else woken.set_result(None))
    try:
        await woken
    finally:
        timer.cancel()

"""Between event loops: call a function on another loop, wait for a coroutine there, and outlive that loop's end."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["run_on", "running_loop", "wait_in_thread", "wait_on_loop"]

T = TypeVar("T")

# A loop that stops in the middle of a wait says nothing: this often it is looked at.
_CHECK_S = 1.0


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def run_on(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Call `function` on `loop`: now if this is its thread, else soon; not at all if the loop has closed."""
    if running_loop() is loop:
        function(*args)
        return
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


def wait_in_thread(coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, *, gone: T) -> T:
    """Run `coroutine` on `loop`, which must not be this thread's, and block for its result; `gone` if the loop ends.

    Interrupting the wait cancels the coroutine.
    """
    pending = _submitted(coroutine, loop)
    if pending is None:
        return gone
    try:
        while True:
            try:
                return pending.result(_CHECK_S)
            except TimeoutError:
                if not loop.is_running():
                    _close_if_not_begun(coroutine)
                    return gone
    except FutureCancelledError:  # the loop has ended, and its tasks with it
        return gone
    except BaseException:  # a KeyboardInterrupt, say: nobody waits any more
        pending.cancel()
        raise


async def wait_on_loop(coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, *, gone: T) -> T:
    """Run `coroutine` on another `loop` and wait for its result on this one; `gone` if that loop ends.

    Cancelling the wait cancels the coroutine.
    """
    pending = _submitted(coroutine, loop)
    if pending is None:
        return gone
    result = asyncio.wrap_future(pending)
    try:
        while not (await asyncio.wait([result], timeout=_CHECK_S))[0] and loop.is_running():
            pass
    except BaseException:
        result.cancel()
        raise
    _close_if_not_begun(coroutine)
    return gone if result.cancelled() or not result.done() else result.result()


def _submitted(coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> Future[T] | None:
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:  # the loop has closed
        coroutine.close()
        return None


def _close_if_not_begun(coroutine: Coroutine[Any, Any, Any]) -> None:
    # The loop ended before it came to it; Python would warn that it was never awaited.
    if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
        coroutine.close()

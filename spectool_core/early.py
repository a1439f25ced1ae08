"""A tool's own code, run early by an adapter: what it raises is contained, and what it returns is copied."""

from __future__ import annotations

import asyncio
import copy
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

from spectool_core.runs import NotReplayable

__all__ = ["acontained", "check_reusable", "contained", "copied"]

T = TypeVar("T")

_IMMUTABLE = frozenset({str, int, float, bool, bytes, type(None)})


def contained(function: Callable[[], T]) -> T:
    """Call `function`; what would end the thread or its loop becomes a RuntimeError."""
    try:
        return function()
    except (SystemExit, asyncio.CancelledError) as error:
        raise _as_failure(error) from error


async def acontained(awaitable: Awaitable[T]) -> T:
    """Await; a SystemExit, or a CancelledError that nobody asked for, becomes a RuntimeError."""
    try:
        return await awaitable
    except SystemExit as error:  # would end the loop
        raise _as_failure(error) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _as_failure(error) from error


def copied(value: Any) -> Any:
    """A value that shares nothing mutable with `value`. Raises NotReplayable where there is no such copy."""
    if type(value) in _IMMUTABLE or (type(value) is tuple and all(type(item) in _IMMUTABLE for item in value)):
        return value
    if type(value) is object:
        raise NotReplayable("a plain object is known by its identity, which no copy has")
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise NotReplayable(f"{type(value).__name__} cannot be copied: {error}") from error


def check_reusable(value: Any) -> None:
    """Raise NotReplayable for what can be used only once: an iterator, an awaitable, an open file."""
    if isinstance(value, Iterator | AsyncIterator | Awaitable | io.IOBase):
        raise NotReplayable(f"the tool returned {type(value).__name__}, which can be used only once")


def _as_failure(error: BaseException) -> Exception:
    return RuntimeError(f"the tool raised {type(error).__name__}")

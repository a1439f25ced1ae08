"""Work that waits for a network, written once for sync and async callers.

A generator yields what is to be called, and is sent what the call returned or thrown what it raised. A sync driver
calls; an async driver awaits what the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

__all__ = ["Steps", "arun_steps", "run_steps"]

T = TypeVar("T")

Steps: TypeAlias = Generator[Callable[[], Any], Any, T]


def run_steps(steps: Steps[T]) -> T:
    """Do each step in this thread, and return what the generator returns."""
    try:
        step = next(steps)
        while True:
            try:
                result = step()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value


async def arun_steps(steps: Steps[T]) -> T:
    """Await each step, and return what the generator returns."""
    try:
        step = next(steps)
        while True:
            try:
                result = await step()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value

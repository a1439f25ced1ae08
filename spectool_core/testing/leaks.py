"""What a block of code leaves behind: tasks, threads, and open files and sockets."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["LeakCheck", "LeakError"]

_POLL_S = 0.005


class LeakError(AssertionError):
    """Something is left over; the message lists it.

    Args:
        leaked: one line for each task, thread or descriptor.
    """

    def __init__(self, leaked: Sequence[str]) -> None:
        self.leaked = leaked
        super().__init__("left over:\n  " + "\n  ".join(leaked))


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What exists at one moment, each with the words for it."""

    tasks: Mapping[asyncio.Task[Any], str]
    threads: Mapping[threading.Thread, str]
    descriptors: Mapping[tuple[int, str], str]

    @classmethod
    def take(cls, allowed_threads: tuple[str, ...]) -> Self:
        return cls(
            tasks={task: f"task {task.get_name()}: {task.get_coro()!r}" for task in _tasks()},
            threads={
                thread: f"{'daemon ' if thread.daemon else ''}thread {thread.name}"
                for thread in threading.enumerate()
                if not thread.name.startswith(allowed_threads)
            },
            descriptors={(number, what): f"descriptor {number}: {what}" for number, what in _descriptors().items()},
        )

    def since(self, before: _Snapshot) -> list[str]:
        """List what is here and was not `before`."""
        new = [words for task, words in self.tasks.items() if task not in before.tasks]
        new += [words for thread, words in self.threads.items() if thread not in before.threads]
        new += [words for descriptor, words in self.descriptors.items() if descriptor not in before.descriptors]
        return new


class LeakCheck:
    """Raises LeakError if its block, `with` or `async with`, leaves behind tasks, threads or descriptors.

    Inside a running event loop the loop's tasks count; descriptors count where the system lists them (Linux, macOS).
    Nothing is checked after an exception.

    Args:
        grace_s: how long what is just ending may take; a clean block is not delayed.
        allowed_threads: beginnings of the names of threads that may stay; by default those of event loops' default
            executors, which live as long as their loop.
    """

    def __init__(self, *, grace_s: float = 2.0, allowed_threads: Sequence[str] = ("asyncio_",)) -> None:
        self._grace_s = grace_s
        self._allowed_threads = tuple(allowed_threads)
        self._before = _Snapshot({}, {}, {})

    def leaked(self) -> list[str]:
        """List what is left over at this moment."""
        return _Snapshot.take(self._allowed_threads).since(self._before)

    def __enter__(self) -> Self:
        self._before = _Snapshot.take(self._allowed_threads)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        deadline_s = time.monotonic() + self._grace_s
        while leaked := self.leaked():
            if time.monotonic() >= deadline_s:
                raise LeakError(leaked)
            time.sleep(_POLL_S)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        # By the loop's clock, so that under a virtual one the grace costs nothing.
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._grace_s
        while leaked := self.leaked():
            if loop.time() >= deadline_s:
                raise LeakError(leaked)
            await asyncio.sleep(_POLL_S)


def _tasks() -> set[asyncio.Task[Any]]:
    try:
        return asyncio.all_tasks()
    except RuntimeError:
        return set()


def _descriptors() -> Mapping[int, str]:
    for listing in (Path("/proc/self/fd"), Path("/dev/fd")):
        if listing.is_dir():
            # Listed first, so that the listing's own descriptor is closed again before it is looked at.
            numbers = [path.name for path in listing.iterdir()]
            return dict(filter(None, map(_described, numbers)))
    return {}


def _described(number: str) -> tuple[int, str] | None:
    """Tell what a descriptor is; None if it is closed again."""
    try:
        status = os.fstat(int(number))
    except OSError:
        return None
    try:
        what = str(Path("/proc/self/fd", number).readlink())
    except OSError:
        what = f"device {status.st_dev}, inode {status.st_ino}"
    return int(number), what

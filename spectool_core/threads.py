"""The library's own threads: workers for blocking tools, and one event loop for sync runs.

All are daemons: a process exits without waiting for them. The default executor is left to the framework, where a
wrong guess would delay real calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["EventLoopThread", "WorkerThreads"]

T = TypeVar("T")

_MAX_CLOSE_S = 1.0


class WorkerThreads:
    """Daemon threads that run blocking calls; at most `max_workers`, started when first needed."""

    def __init__(self, max_workers: int, name: str) -> None:
        self._max_workers = max_workers
        self._name = name
        self._changed = threading.Condition()
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._generation = 0
        self._num_workers = 0
        self._num_idle = 0

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on a worker; the future can be cancelled until a worker has taken it.

        Raises RuntimeError where no thread can be started and none is there.
        """
        future: Future[T] = Future()
        with self._changed:
            self._work.append((future, function))
            if self._num_idle >= len(self._work):
                self._changed.notify()
            elif self._num_workers < self._max_workers:
                self._start_worker()
        return future

    def close(self) -> None:
        """Let every worker end once its work is done; does not wait. Work that comes later gets new workers."""
        with self._changed:
            self._generation += 1
            self._num_workers = 0
            self._changed.notify_all()

    def _start_worker(self) -> None:
        name = f"{self._name}-worker"
        try:
            threading.Thread(target=self._serve, args=(self._generation,), name=name, daemon=True).start()
        except RuntimeError:  # the system allows no more threads
            if self._num_workers == 0:
                self._work.pop()
                raise
        else:
            self._num_workers += 1

    def _serve(self, generation: int) -> None:
        while (item := self._next(generation)) is not None:
            _fulfil(*item)
            del item  # an idle worker keeps no result alive

    def _next(self, generation: int) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            while not self._work:
                if generation != self._generation:
                    return None
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1
            return self._work.popleft()


def _fulfil(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except StopIteration as exc:  # asyncio carries no StopIteration: whoever awaits the future would wait for ever
        future.set_exception(RuntimeError(f"{type(exc).__name__} was raised"))
    except BaseException as exc:
        future.set_exception(exc)
    else:
        future.set_result(result)


class EventLoopThread:
    """An event loop on a daemon thread, where the turns of sync runs live."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=f"{name}-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self._finish())
            self.loop.close()

    @property
    def is_alive(self) -> bool:
        """Whether the loop is served; not in a forked child, which has the loop but not its thread."""
        return self._thread.is_alive()

    async def _finish(self) -> None:
        deadline_s = self.loop.time() + _MAX_CLOSE_S
        while tasks := asyncio.all_tasks(self.loop) - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            # Not gather: a task that ignores its cancellation would keep the thread for ever.
            await asyncio.wait(tasks, timeout=max(0.0, deadline_s - self.loop.time()))
            if self.loop.time() >= deadline_s:
                break
        await self.loop.shutdown_asyncgens()

    def stop(self) -> None:
        """Cancel what runs on the loop and close it, without waiting; once is enough."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)

    def close(self) -> None:
        """Cancel what runs on the loop, close it and wait for its thread, but not for ever."""
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _MAX_CLOSE_S)

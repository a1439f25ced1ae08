from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import Future
from concurrent.futures import wait as wait_all

import pytest

from spectool_core.loops import run_on, running_loop
from spectool_core.testing import Latch, LeakCheck
from spectool_core.threads import EventLoopThread, WorkerThreads


def workers_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"{name}-worker"]


def test_no_thread_is_started_before_it_is_needed() -> None:
    with LeakCheck(grace_s=0):
        WorkerThreads(4, "lazy")


def test_work_is_done_on_daemon_threads_that_are_used_again() -> None:
    with LeakCheck():
        workers = WorkerThreads(4, "again")
        threads = {workers.submit(threading.current_thread).result(10) for _ in range(20)}
        assert all(thread.daemon for thread in threads)
        # The result is there a moment before its worker is idle, so a second one may have been started.
        assert len(threads) <= 2
        workers.close()


@pytest.mark.parametrize("num_jobs", [1, 3, 4])
def test_as_many_jobs_run_at_once_as_there_may_be_workers(num_jobs: int) -> None:
    with LeakCheck():
        workers = WorkerThreads(4, "once")
        for _ in range(100):
            together = Latch(num_jobs)  # opens when all are there at once
            jobs = [workers.submit(together.wait) for _ in range(num_jobs)]
            assert not wait_all(jobs, timeout=10).not_done
            assert len(workers_of("once")) <= 4
        workers.close()


def test_more_jobs_than_workers_wait_their_turn() -> None:
    workers = WorkerThreads(2, "queue")
    latch = Latch()
    order: list[int] = []
    held = [workers.submit(latch.wait) for _ in range(2)]
    latch.wait_until_arrived(2)
    queued = [workers.submit(lambda number=number: order.append(number)) for number in range(5)]  # type: ignore[misc]
    assert len(workers_of("queue")) == 2
    assert not any(job.running() or job.done() for job in queued)
    latch.open()
    assert not wait_all(held + queued, timeout=10).not_done
    assert sorted(order) == list(range(5))
    workers.close()


def test_a_job_that_is_cancelled_in_the_queue_never_runs() -> None:
    workers = WorkerThreads(1, "cancel")
    latch = Latch()
    ran: list[str] = []
    held = workers.submit(latch.wait)
    latch.wait_until_arrived(1)
    assert not held.cancel()
    cancelled = workers.submit(lambda: ran.append("cancelled"))
    assert cancelled.cancel()
    last = workers.submit(lambda: ran.append("last"))
    latch.open()
    last.result(10)
    assert ran == ["last"]
    workers.close()


class ToolError(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), ToolError()])
def test_what_a_job_raises_is_kept_and_its_worker_goes_on(error: BaseException) -> None:
    def fail() -> None:
        raise error

    workers = WorkerThreads(1, "raise")
    assert workers.submit(fail).exception(10) is error
    assert workers.submit(lambda: "next").result(10) == "next"
    workers.close()


async def test_a_job_that_raises_stop_iteration_keeps_nobody_waiting() -> None:
    workers = WorkerThreads(1, "stop")
    job = workers.submit(lambda: next(iter([])))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(asyncio.wrap_future(job), 5)
    workers.close()


def test_closed_workers_finish_their_work_and_end() -> None:
    with LeakCheck():
        workers = WorkerThreads(2, "close")
        latch = Latch()
        held = [workers.submit(latch.wait) for _ in range(2)]
        queued = workers.submit(lambda: "done")
        latch.wait_until_arrived(2)
        started_s = time.monotonic()
        workers.close()
        assert time.monotonic() - started_s < 1
        latch.open()
        assert queued.result(10) == "done"
        assert not wait_all(held, timeout=10).not_done


def test_work_after_close_is_done() -> None:
    with LeakCheck():
        workers = WorkerThreads(2, "reopen")
        for number in range(50):
            jobs = [workers.submit(lambda number=number: number) for _ in range(3)]  # type: ignore[misc]
            assert [job.result(10) for job in jobs] == [number] * 3
            if number % 3:
                time.sleep(0.001)  # workers that are idle when they are closed, and some that are not
            workers.close()


def test_an_idle_worker_keeps_no_result_alive() -> None:
    class Result:
        pass

    workers = WorkerThreads(1, "result")
    job: Future[Result] = workers.submit(Result)
    result = weakref.ref(job.result(10))
    workers.submit(lambda: None).result(10)
    del job
    gc.collect()
    assert result() is None
    workers.close()


def test_where_no_thread_can_be_started_the_first_job_is_refused_and_a_later_one_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = WorkerThreads(4, "scarce")
    ran: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            workers.submit(lambda: ran.append("refused"))
    latch = Latch()
    held = workers.submit(latch.wait)
    latch.wait_until_arrived(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        later = workers.submit(lambda: ran.append("later"))
    latch.open()
    later.result(10)
    held.result(10)
    assert ran == ["later"]
    workers.close()


def test_many_threads_submit_at_once_and_nothing_is_lost() -> None:
    workers = WorkerThreads(3, "many")
    jobs: list[Future[int]] = []

    def submit(start: int) -> None:
        jobs.extend(workers.submit(lambda number=number: number) for number in range(start, start + 250))  # type: ignore[misc]

    threads = [threading.Thread(target=submit, args=(start,)) for start in range(0, 1000, 250)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(job.result(10) for job in jobs) == list(range(1000))
    assert len(workers_of("many")) <= 3
    workers.close()


# The loop's thread


def test_a_closed_loop_thread_has_cancelled_its_tasks_and_is_gone() -> None:
    with LeakCheck():
        thread = EventLoopThread("test")
        ended: list[str] = []
        begun = threading.Event()

        async def hold() -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.append("cleaned up")

        pending = asyncio.run_coroutine_threadsafe(hold(), thread.loop)
        assert begun.wait(10)
        assert thread.is_alive
        thread.close()
        assert ended == ["cleaned up"]
        assert pending.cancelled()
        assert thread.loop.is_closed()
        assert not thread.is_alive


def test_tasks_that_start_while_the_loop_ends_are_cancelled_too() -> None:
    thread = EventLoopThread("test")
    ended: list[str] = []
    begun = threading.Event()

    async def second() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("second")

    async def first() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            tasks.append(asyncio.get_running_loop().create_task(second()))
            await asyncio.sleep(0)
            ended.append("first")

    tasks: list[asyncio.Task[None]] = []
    asyncio.run_coroutine_threadsafe(first(), thread.loop)
    assert begun.wait(10)
    thread.close()
    assert sorted(ended) == ["first", "second"]


def test_a_task_that_ignores_its_cancellation_does_not_hold_up_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spectool_core.threads._MAX_CLOSE_S", 0.05)
    thread = EventLoopThread("test")
    thread.loop.set_exception_handler(lambda *_: None)
    begun = threading.Event()
    stubborn = True

    async def ignore() -> None:
        begun.set()
        while stubborn:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    pending = asyncio.run_coroutine_threadsafe(ignore(), thread.loop)
    assert begun.wait(10)
    started_s = time.monotonic()
    thread.close()
    assert time.monotonic() - started_s < 5
    assert thread.loop.is_closed()
    stubborn = False
    del pending
    gc.collect()


def test_the_loop_can_be_closed_from_its_own_thread() -> None:
    with LeakCheck():
        thread = EventLoopThread("test")
        run_on(thread.loop, thread.close)
        deadline_s = time.monotonic() + 10
        while thread.is_alive and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert thread.loop.is_closed()


# Where a function runs


async def test_on_its_own_loop_a_function_runs_at_once() -> None:
    ran: list[object] = []
    run_on(asyncio.get_running_loop(), ran.append, running_loop())
    assert ran == [asyncio.get_running_loop()]


def test_from_another_thread_functions_run_on_the_loop_in_order() -> None:
    thread = EventLoopThread("test")
    ran: list[tuple[int, bool]] = []
    done = threading.Event()
    for number in range(100):
        run_on(thread.loop, lambda number=number: ran.append((number, running_loop() is thread.loop)))
    run_on(thread.loop, done.set)
    assert done.wait(10)
    assert ran == [(number, True) for number in range(100)]
    thread.close()


def test_on_a_closed_loop_a_function_does_not_run_and_nothing_is_raised() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    ran: list[int] = []
    run_on(loop, ran.append, 1)
    assert ran == []
    assert running_loop() is None

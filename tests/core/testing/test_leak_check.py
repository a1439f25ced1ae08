"""The leak check finds what is left over, names it, and lets clean code pass."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest

from spectool_core.testing import LeakCheck, LeakError, run_virtual


def test_clean_block_passes():
    with LeakCheck(), socket.socket():
        thread = threading.Thread(target=lambda: None)
        thread.start()


async def test_clean_async_block_passes_with_a_default_executor():
    async with LeakCheck():
        await asyncio.to_thread(lambda: None)
        await asyncio.create_task(asyncio.sleep(0))


async def test_task_is_found_and_named():
    forgotten = asyncio.Event()
    with pytest.raises(LeakError, match=r"task forgotten: <coroutine object Event\.wait"):
        async with LeakCheck(grace_s=0):
            task = asyncio.create_task(forgotten.wait(), name="forgotten")
    forgotten.set()
    await task


@pytest.mark.parametrize("daemon", [False, True])
def test_thread_is_found_and_named(daemon):
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="forgotten", daemon=daemon)
    with pytest.raises(LeakError) as caught, LeakCheck(grace_s=0):
        thread.start()
    release.set()
    thread.join()
    assert caught.value.leaked == ["daemon thread forgotten" if daemon else "thread forgotten"]


def test_threads_can_be_allowed():
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="pool-1")
    with LeakCheck(grace_s=0, allowed_threads=["pool-"]):
        thread.start()
    release.set()
    thread.join()


def test_socket_is_found():
    with pytest.raises(LeakError, match="descriptor"), LeakCheck(grace_s=0):
        forgotten = socket.socket()
    forgotten.close()


def test_what_is_just_ending_gets_its_grace():
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    with LeakCheck(grace_s=30) as check:
        thread.start()
        assert check.leaked()
        # Ends while the check is waiting already.
        threading.Timer(0.01, release.set).start()


def test_grace_costs_nothing_on_a_virtual_clock():
    async def main() -> float:
        async with LeakCheck(grace_s=1):
            task = asyncio.create_task(asyncio.sleep(0.5))
        assert task.done()
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == pytest.approx(0.5, abs=0.01)


def test_error_of_the_block_is_not_hidden():
    opened = contextlib.ExitStack()
    with opened, pytest.raises(KeyError), LeakCheck(grace_s=0):
        raise KeyError(opened.enter_context(socket.socket()))


async def test_async_error_of_the_block_is_not_hidden():
    with pytest.raises(KeyError):
        async with LeakCheck(grace_s=0):
            raise KeyError

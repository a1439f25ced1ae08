from __future__ import annotations

import asyncio
import gc

import pytest

from spectool_core.speculators._endpoint import Endpoint
from spectool_core.speculators._sessions import SessionPerLoop, session_opener
from spectool_core.testing import Answer, LeakCheck, ModelServer

ENDPOINT = Endpoint("http://127.0.0.1:1/v1/chat/completions", {}, None)


def sessions() -> SessionPerLoop:
    return SessionPerLoop(session_opener(ENDPOINT, 30.0))


async def test_a_loop_has_one_session() -> None:
    held = sessions()
    first = await held.current()
    assert await held.current() is first
    await held.aclose()
    assert first.closed
    second = await held.current()
    assert second is not first
    await held.aclose()


def test_a_session_ends_with_its_loop() -> None:
    held = sessions()
    opened = [asyncio.run(held.current()) for _ in range(3)]
    assert all(session.closed for session in opened)
    assert len(set(opened)) == 3
    assert len(held._held) == 1, "only the last loop is remembered, until the next one comes"


async def test_a_session_that_is_dropped_in_a_cycle_is_closed_by_its_loop() -> None:
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["message"]))
    with ModelServer({"s": Answer()}) as server:
        held = sessions()
        session = await held.current()
        async with session.get(f"{server.base_url}/models") as response:
            await response.read()
        cycle: list[object] = [held]
        cycle.append(cycle)
        del held, session, response, cycle
        num_tasks = len(asyncio.all_tasks())
        gc.collect()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == num_tasks + 1, "it is being closed"
        while len(asyncio.all_tasks()) > num_tasks:
            await asyncio.sleep(0)
    assert problems == []


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_loops_that_are_closed_without_notice_do_not_pile_up() -> None:
    """Their asyncio transports warn, as they always do; nothing of ours holds them."""
    with ModelServer({"s": Answer()}) as server, LeakCheck():
        held = sessions()

        async def ask() -> None:
            session = await held.current()
            async with session.get(f"{server.base_url}/models") as response:
                await response.read()

        for _ in range(20):
            loop = asyncio.new_event_loop()
            loop.run_until_complete(ask())
            loop.close()
            assert len(held._held) == 1
        del loop
        asyncio.run(ask())
        gc.collect()

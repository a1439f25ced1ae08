"""How listening to a speculator ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from spectool_core.calls import ToolCall
from spectool_core.listening import listen
from tests.core.fakes import PROMPT, FromFunction, Predicts, call, virtual

CALLS = [call(query=query) for query in "abc"]


@virtual
async def test_every_call_is_taken_as_it_is_named() -> None:
    taken: list[tuple[float, ToolCall]] = []

    def take(named: ToolCall) -> bool:
        taken.append((asyncio.get_running_loop().time(), named))
        return True

    assert await listen(Predicts(*CALLS, delay_s=1.0), PROMPT, (), take) == (3, "finished")
    assert taken == list(zip([1.0, 2.0, 3.0], CALLS, strict=True))


@virtual
async def test_a_speculator_of_no_further_use_is_ended() -> None:
    speculator = Predicts(*CALLS)
    assert await listen(speculator, PROMPT, (), lambda named: named != CALLS[1]) == (2, "finished")
    assert speculator.num_active == 0


@virtual
async def test_what_a_speculator_raises_goes_no_further() -> None:
    async def failing() -> AsyncIterator[ToolCall]:
        yield CALLS[0]
        raise ConnectionError("down")

    def refusing() -> AsyncIterator[ToolCall]:
        raise TypeError("no iterator")

    assert await listen(FromFunction(failing), PROMPT, (), lambda _: True) == (1, "failed")
    assert await listen(FromFunction(refusing), PROMPT, (), lambda _: True) == (0, "failed")


@virtual
async def test_a_cancellation_is_an_outcome() -> None:
    speculator = Predicts(*CALLS, delay_s=1.0)
    listening = asyncio.create_task(listen(speculator, PROMPT, (), lambda _: True))
    await asyncio.sleep(1.5)
    listening.cancel()
    assert await listening == (1, "cancelled")
    assert (speculator.num_active, speculator.num_cancelled) == (0, 1)

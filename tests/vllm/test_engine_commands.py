from __future__ import annotations

import asyncio
from typing import Any

import pytest

from spectool_core.vllm.engine_commands import EngineCommands, EngineGoneError


class SilentEngine:
    """An engine client whose engine core answers once `answer` is set."""

    def __init__(self) -> None:
        self.errored = False
        self.engine_core = self
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.sent: list[tuple[Any, ...]] = []

    async def call_utility_async(self, method: str, command: str, arguments: list[Any]) -> Any:
        self.sent.append((method, command, arguments))
        return await self.answer


async def test_a_command_returns_what_the_engine_core_answers() -> None:
    engine = SilentEngine()
    calling = asyncio.create_task(EngineCommands(engine).call("release", "chatcmpl-a", 1))
    await asyncio.sleep(0.05)
    assert not calling.done()

    engine.answer.set_result(True)

    assert await calling is True
    assert engine.sent == [("spectool", "release", ["chatcmpl-a", 1])]


async def test_a_command_does_not_wait_for_an_engine_that_has_died() -> None:
    engine = SilentEngine()
    calling = asyncio.create_task(EngineCommands(engine).call("turns", "chatcmpl-a"))
    await asyncio.sleep(0.05)
    assert not calling.done()

    engine.errored = True

    with pytest.raises(EngineGoneError, match="turns"):
        async with asyncio.timeout(2):
            await calling

"""The way from the API server to the scheduler: commands of the engine core, called between two of its steps."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

__all__ = ["CallsEngine", "EngineCommands", "EngineGoneError"]

COMMAND_TIMEOUT_S = 60.0
# Why polling: where the engine core dies, vLLM leaves open the calls that it has not answered.
_LOOK_S = 0.2


class EngineGoneError(Exception):
    """The engine core does not answer any more."""


class CallsEngine(Protocol):
    """Calls commands of the engine core; see `EngineCommands`."""

    async def call(self, command: str, *arguments: Any) -> Any:
        """Call one."""
        ...


class EngineCommands:
    """The one utility method that the general plugin adds to EngineCore.

    Args:
        engine_client: vLLM's.
    """

    def __init__(self, engine_client: Any) -> None:
        self._engine_client = engine_client

    def begin(self, command: str, *arguments: Any) -> asyncio.Task[Any]:
        """Call a command; it is sent in the task's first step, so ahead of what is sent by tasks made later."""
        calling = self._engine_client.engine_core.call_utility_async("spectool", command, list(arguments))
        return asyncio.get_running_loop().create_task(calling)

    async def call(self, command: str, *arguments: Any) -> Any:
        """Call a command of `commands.Commands`, between two steps of the engine.

        Raises:
            EngineGoneError: no answer; where the engine dies, vLLM leaves such calls open.
        """
        answer = self.begin(command, *arguments)
        try:
            for _ in range(round(COMMAND_TIMEOUT_S / _LOOK_S)):
                await asyncio.wait((answer,), timeout=_LOOK_S)
                if answer.done() or self._engine_client.errored:
                    break
            if not answer.done():
                raise EngineGoneError(f"the engine does not answer the command {command}")
            return answer.result()
        finally:
            answer.cancel()

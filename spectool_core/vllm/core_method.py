"""The one method that the plugin adds to vLLM's EngineCore, by which the API server reaches the scheduler.

Utility calls find methods of EngineCore by name (vllm/v1/engine/core.py); `collective_rpc` would reach workers only.
"""

from __future__ import annotations

from typing import Any

from spectool_core.vllm.commands import Commands
from spectool_core.vllm.scheduler import ToolCacheMixin

__all__ = ["COMMANDS", "install"]

COMMANDS = frozenset({"announce", "expect", "level", "plan", "release", "resume", "statistics", "turns"})


def spectool(self: Any, command: str, arguments: list[Any]) -> Any:
    """Call one of `COMMANDS`, between two steps."""
    scheduler = self.scheduler
    if not isinstance(scheduler, ToolCacheMixin):
        raise TypeError(
            f"scheduler_cls: {type(scheduler).__name__}; allowed: a scheduler of spectool_core.vllm.scheduler"
        )
    if command not in COMMANDS:
        raise ValueError(f"command: {command!r}; allowed: {', '.join(sorted(COMMANDS))}")
    return getattr(Commands(scheduler), command)(*arguments)


def install(engine_core: type[Any]) -> None:
    """Add the method to `EngineCore`; a second time changes nothing."""
    engine_core.spectool = spectool

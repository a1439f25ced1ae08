"""Replay: on a hit the stock tool node executes a tool that returns what an early run returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.config import get_stream_writer
from pydantic import BaseModel

from spectool_langgraph._recording import CustomEvent, Emission, Recorded

__all__ = ["replaying"]

ToolT = TypeVar("ToolT", bound=BaseTool)


def replaying(tool: ToolT, recorded: Recorded) -> ToolT:
    """A tool that is `tool` in all but its own code, which gives out `recorded` instead of running.

    Raises NotReplayable where `recorded` cannot be copied; then the call is a miss.
    """
    first = [recorded.copied()]  # made now: inside the tool node it would be too late to fall back to a real run

    def take() -> Recorded:
        return first.pop() if first else recorded.copied()

    # pydantic's own copy: shallow, and not what a subclass may have made of `copy`. Attributes of the instance come
    # before methods of the class, so everything above `_run` stays the tool's, its class included.
    replay = BaseModel.__copy__(tool)
    needs_config = any(isinstance(emission, CustomEvent) and emission.of_caller for emission in recorded.emissions)
    run, arun = _with_config(take) if needs_config else _without_config(take)
    replay.__dict__.update(_run=run, _arun=arun)
    return replay


def _without_config(take: Callable[[], Recorded]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def run(*_: Any, **__: Any) -> Any:
        recorded = take()
        for emission in recorded.emissions:
            _emit(emission, None)
        return recorded.value

    async def arun(*_: Any, **__: Any) -> Any:
        recorded = take()
        for emission in recorded.emissions:
            await _aemit(emission, None)
        return recorded.value

    return run, arun


def _with_config(take: Callable[[], Recorded]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def run(*_: Any, config: RunnableConfig, **__: Any) -> Any:
        recorded = take()
        for emission in recorded.emissions:
            _emit(emission, config)
        return recorded.value

    async def arun(*_: Any, config: RunnableConfig, **__: Any) -> Any:
        recorded = take()
        for emission in recorded.emissions:
            await _aemit(emission, config)
        return recorded.value

    return run, arun


def _emit(emission: Emission, config: RunnableConfig | None) -> None:
    if isinstance(emission, CustomEvent):
        dispatch_custom_event(emission.name, emission.data, config=config if emission.of_caller else None)
    else:
        get_stream_writer()(emission.value)


async def _aemit(emission: Emission, config: RunnableConfig | None) -> None:
    if isinstance(emission, CustomEvent):
        await adispatch_custom_event(emission.name, emission.data, config=config if emission.of_caller else None)
    else:
        get_stream_writer()(emission.value)

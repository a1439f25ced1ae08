"""How the kinds of tools run: what their own code receives, how it is run early, and how a hit is handed out.

Where a tool wraps a function, only the function runs early; on a hit the stock tool runs, with a function that hands
out the recorded value. So the defaults, callbacks, content blocks, `raw_input` and spans are the stock tool's. Other
tools run as a whole, and their output is handed out with all that they said to observers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from llama_index.core.tools import AsyncBaseTool, FunctionTool
from llama_index.core.tools.function_tool import sync_to_async
from llama_index.core.tools.types import BaseToolAsyncAdapter
from pydantic.fields import FieldInfo

from spectool_core.canonical import canonicalize
from spectool_core.early import copied
from spectool_llamaindex._engine import content_of, text_of
from spectool_llamaindex._isolation import Recorded
from spectool_llamaindex._observers import replay

__all__ = ["Execution", "execution_of", "is_converted"]

# Every function that `sync_to_async` makes shares this code.
_CONVERTED = sync_to_async(len).__code__


class Execution(Protocol):
    """One tool's way to run."""

    blocking: bool

    def received(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the tool's own code would receive, as far as it tells; raises TypeError for what it does not take."""
        ...

    def run(self, arguments: dict[str, Any]) -> Any:
        """Run the tool's own code: the value that it returns or, unless `blocking`, an awaitable of it."""
        ...

    def content(self, recorded: Recorded) -> str | None:
        """The content of the tool message that agents make of `recorded`; None where that is no text, or not known."""
        ...

    def stand_in(self, recorded: Recorded) -> AsyncBaseTool:
        """A tool that is this one but hands out `recorded`. Raises NotReplayable where that cannot be copied."""
        ...


def execution_of(tool: AsyncBaseTool, exclude_args: frozenset[str]) -> Execution:
    """How `tool` runs; the arguments in `exclude_args` do not affect what it returns."""
    if isinstance(tool, FunctionTool) and all(_defines(tool, method) is FunctionTool for method in ("call", "acall")):
        return _FunctionExecution(tool, exclude_args)
    if type(tool) is BaseToolAsyncAdapter:
        return _AdaptedExecution(tool)
    return _WholeExecution(tool)


class _FunctionExecution:
    """A FunctionTool: its function runs early, without the tool's callback."""

    def __init__(self, tool: FunctionTool, exclude_args: frozenset[str]) -> None:
        self._tool = tool
        self._excluded = exclude_args
        self.blocking = is_converted(tool)
        self.function: Callable[..., Any] = tool.fn if self.blocking else tool.async_fn
        self._signature = _signature(self.function)
        self._defaults = _defaults(self._signature)

    def received(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        given = self._filled(arguments)
        further: dict[str, Any] = {}
        if self._signature is not None:
            given = self._defaults | self._signature.bind(**given).arguments
            for name, parameter in self._signature.parameters.items():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    further = given.pop(name, {})
        named = {name: value for name, value in given.items() if name not in self._excluded}
        # The function sees in which order further keyword arguments come.
        return {"named": named, "further": [item for item in further.items() if item[0] not in self._excluded]}

    def run(self, arguments: dict[str, Any]) -> Any:
        return self.function(**self._filled(arguments))

    def content(self, recorded: Recorded) -> str | None:
        if self._tool._callback is not None or self._tool._async_callback is not None:
            return None  # it may put another content in
        return text_of(self._tool._parse_tool_output(recorded.value))

    def stand_in(self, recorded: Recorded) -> AsyncBaseTool:
        take = _takes(recorded)

        async def hand_out_async(*_: Any, **__: Any) -> Any:
            return take()

        stand_in = copy.copy(self._tool)
        stand_in._fn = lambda *_, **__: take()
        stand_in._async_fn = hand_out_async
        return stand_in

    def _filled(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        # In stock's order.
        return {**self._tool._field_defaults, **self._tool.partial_params, **arguments}


class _AdaptedExecution:
    """A sync tool that LlamaIndex adapts, with one argument, `input`."""

    blocking = True

    def __init__(self, tool: BaseToolAsyncAdapter) -> None:
        self._tool = tool

    def received(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if arguments.keys() != {"input"}:
            raise TypeError("the tool takes one argument, input")
        return dict(arguments)

    def run(self, arguments: dict[str, Any]) -> Any:
        return self._tool.base_tool(arguments["input"])

    def content(self, recorded: Recorded) -> str | None:
        return content_of(recorded.value)

    def stand_in(self, recorded: Recorded) -> AsyncBaseTool:
        take = _takes(recorded)
        stand_in = copy.copy(self._tool)
        stand_in.base_tool = _Answering(self._tool, take)  # type: ignore[assignment]
        return stand_in


class _WholeExecution:
    """Any other tool: all of its `acall` runs early, on the event loop."""

    blocking = False

    def __init__(self, tool: AsyncBaseTool) -> None:
        self._tool = tool

    def received(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        # In order, and with nothing excluded: what such a tool makes of its keyword arguments may show both.
        return {"in order": list(arguments.items())}

    def run(self, arguments: dict[str, Any]) -> Any:
        return self._tool.acall(**arguments)

    def content(self, recorded: Recorded) -> str | None:
        return content_of(recorded.value)

    def stand_in(self, recorded: Recorded) -> AsyncBaseTool:
        return _Answering(self._tool, _takes(recorded))  # type: ignore[return-value]


class _Answering:
    """Answers every call with a recorded output. No tool class: that would emit spans of its own."""

    def __init__(self, tool: AsyncBaseTool, take: Callable[[], Any]) -> None:
        self.metadata = tool.metadata
        self._take = take

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._take()

    call = __call__

    async def acall(self, *_: Any, **__: Any) -> Any:
        return self._take()


def _takes(recorded: Recorded) -> Callable[[], Any]:
    first = [copied(recorded.value)]  # made now: inside the tool it would be too late to fall back to a real run

    def take() -> Any:
        replay(recorded.emissions)
        return first.pop() if first else copied(recorded.value)

    return take


def is_converted(tool: FunctionTool) -> bool:
    """Whether `async_fn` only runs `fn` in a thread."""
    function = tool.async_fn
    if getattr(function, "__code__", None) is not _CONVERTED:
        return False
    return any(cell.cell_contents is tool.fn for cell in getattr(function, "__closure__", None) or ())


def _defines(tool: AsyncBaseTool, method: str) -> Any:
    if method in vars(tool):
        return tool
    return next(cls for cls in type(tool).__mro__ if method in vars(cls))


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        # Not of what it wraps, whose defaults need not be its own.
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some built-in functions have none
        return None


def _defaults(signature: inspect.Signature | None) -> dict[str, Any]:
    """Python's defaults that can be part of a key: a call that spells one out is the call that does not."""
    defaults: dict[str, Any] = {}
    for name, parameter in signature.parameters.items() if signature is not None else ():
        if parameter.default is not inspect.Parameter.empty and not isinstance(parameter.default, FieldInfo):
            try:
                canonicalize({name: parameter.default})
            except Exception:  # noqa: S112 - a sentinel, say, that no model can spell out
                continue
            defaults[name] = parameter.default
    return defaults

"""Marked tools as agents hold them: the tools themselves, but for calls that an early run has already served."""

from __future__ import annotations

import copy
import logging
import time
from typing import Any, Self, cast

from llama_index.core.tools import AsyncBaseTool, BaseTool, ToolOutput

from spectool_core.calls import ToolCall
from spectool_core.errors import NotSpeculatableError
from spectool_core.events import ToolObserved
from spectool_core.loops import running_loop
from spectool_core.speculation import Speculation
from spectool_core.turn import Claimed, Turn
from spectool_llamaindex._agent_run import RUNS
from spectool_llamaindex._binding import ToolBinding
from spectool_llamaindex._observers import is_early
from spectool_llamaindex._proxy import Proxy

__all__ = ["SpeculativeRetriever", "SpeculativeTool", "marked", "with_early_runs"]

_logger = logging.getLogger("spectool")


class SpeculativeTool(Proxy):
    """A marked tool that serves calls of the main model from early runs; in all else the tool itself.

    Args:
        binding: the marked tool.
        speculation: whose early runs may serve it.
    """

    def __init__(self, binding: ToolBinding, speculation: Speculation) -> None:
        super().__init__(binding.target)
        self._self_binding = binding
        self._self_speculation = speculation

    @property
    def binding(self) -> ToolBinding:
        """The tool and its mark."""
        return self._self_binding

    @property
    def speculation(self) -> Speculation:
        """Whose early runs may serve it."""
        return self._self_speculation

    async def acall(self, *args: Any, **kwargs: Any) -> ToolOutput:
        """Serve the call from an early run, or run the tool."""
        call = ToolCall(self._self_binding.name, kwargs)
        turn = self._turn_of(call, args)
        if turn is not None and (stand_in := self._stand_in(await turn.claim(call))) is not None:
            return await stand_in.acall(**kwargs)
        with self._observed() as observation:
            return observation.of(await self.__wrapped__.acall(*args, **kwargs))

    def call(self, *args: Any, **kwargs: Any) -> ToolOutput:
        """Serve the call from an early run, or run the tool; on an event loop's thread it does not wait for one."""
        served = self._served_now(args, kwargs)
        if served is not None:
            return served.call(**kwargs)
        with self._observed() as observation:
            return observation.of(self.__wrapped__.call(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> ToolOutput:
        """See `call`."""
        served = self._served_now(args, kwargs)
        if served is not None:
            return served(**kwargs)
        with self._observed() as observation:
            return observation.of(self.__wrapped__(*args, **kwargs))

    def __copy__(self) -> SpeculativeTool:
        return SpeculativeTool(self._self_binding, self._self_speculation)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)  # another tool, which no binding knows

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)

    def _turn_of(self, call: ToolCall, args: tuple[Any, ...]) -> Turn | None:
        if args or is_early():
            return None
        run = RUNS.current()
        return run.turn_of(call, self._self_binding.tool, self._self_speculation) if run is not None else None

    def _stand_in(self, claimed: Claimed) -> AsyncBaseTool | None:
        return None if claimed.outcome == "miss" else self._self_binding.stand_in(claimed.result)

    def _served_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncBaseTool | None:
        call = ToolCall(self._self_binding.name, kwargs)
        turn = self._turn_of(call, args)
        return self._stand_in(turn.claim_blocking(call)) if turn is not None else None

    def _observed(self) -> _Observation:
        return _Observation(self._self_binding, self._self_speculation)


class SpeculativeRetriever(Proxy):
    """A retriever of tools whose marked tools serve calls from early runs; in all else the retriever itself."""

    def __init__(self, retriever: Any, speculation: Speculation) -> None:
        super().__init__(retriever)
        self._self_speculation = speculation

    @classmethod
    def around(cls, retriever: Any, speculation: Speculation) -> SpeculativeRetriever:
        """One around `retriever`, which may be one for another `Speculation`."""
        if isinstance(retriever, SpeculativeRetriever):
            if retriever._self_speculation is speculation:
                return retriever
            retriever = retriever.__wrapped__
        return cls(retriever, speculation)

    async def aretrieve(self, *args: Any, **kwargs: Any) -> list[BaseTool]:
        """The retrieved tools."""
        retrieved = await self.__wrapped__.aretrieve(*args, **kwargs)
        return [with_early_runs(tool, self._self_speculation) for tool in retrieved]

    def retrieve(self, *args: Any, **kwargs: Any) -> list[BaseTool]:
        """The retrieved tools."""
        retrieved = self.__wrapped__.retrieve(*args, **kwargs)
        return [with_early_runs(tool, self._self_speculation) for tool in retrieved]


class _Observation:
    """What the library learns when LlamaIndex itself runs a marked tool: one that works again may be run early."""

    def __init__(self, binding: ToolBinding, speculation: Speculation) -> None:
        self._binding = binding
        self._speculation = speculation
        self._succeeded = False

    def __enter__(self) -> Self:
        self._started_s = _now_s()
        return self

    def of(self, output: ToolOutput) -> ToolOutput:
        """Take note of the tool's output, and return it."""
        self._succeeded = not getattr(output, "is_error", False)  # a tool may return anything
        return output

    def __exit__(self, *_: object) -> None:
        event = ToolObserved(
            self._binding.name, marked=True, started_s=self._started_s, ended_s=_now_s(), succeeded=self._succeeded
        )
        self._speculation.observe(self._binding.tool, event)


def with_early_runs(tool: BaseTool, speculation: Speculation, *, refuse: bool = False) -> BaseTool:
    """`tool` if it is never run early, else one that serves its calls from early runs.

    A marked tool that cannot be run early stays stock, with a warning; with `refuse`, NotSpeculatableError is raised.
    """
    if isinstance(tool, SpeculativeTool):
        if tool.speculation is speculation and tool.binding.is_current:
            return tool
        tool = tool.binding.tool
    binding = marked(tool, refuse=refuse)
    if binding is None or not binding.policy.runs_early:
        return tool
    return cast("BaseTool", SpeculativeTool(binding, speculation))


def marked(tool: BaseTool, *, refuse: bool = False) -> ToolBinding | None:
    """The binding of a marked tool; None for one without a mark or, unless `refuse`, that cannot be run early."""
    if isinstance(tool, SpeculativeTool):
        if tool.binding.is_current:
            return tool.binding
        tool = tool.binding.tool
    try:
        return ToolBinding.of(tool)
    except NotSpeculatableError as error:
        if refuse:
            raise
        _logger.warning("%s", error)
        return None


def _now_s() -> float:
    """The time of the event loop that runs here; elsewhere the monotonic clock, which the background loop has."""
    loop = running_loop()
    return loop.time() if loop is not None else time.monotonic()

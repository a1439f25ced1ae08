"""The tools of one graph, bound for early runs of one agent run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextvars import copy_context
from types import MappingProxyType

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool

from spectool_core.annotation import ToolPolicy
from spectool_core.calls import ToolCall
from spectool_core.runs import NotPrepared, PreparedCall, Scope
from spectool_langgraph._binding import ToolBinding
from spectool_langgraph._pregel import EVERY_TOOL

__all__ = ["RunToolbox", "marked_tools"]

_logger = logging.getLogger("spectool")


def marked_tools(tools: Iterable[BaseTool]) -> Mapping[str, ToolBinding]:
    """The marked ones of `tools` by name; raises NotSpeculatableError for one that cannot be run early."""
    bindings = (ToolBinding.of(tool) for tool in tools)
    return MappingProxyType({binding.tool.name: binding for binding in bindings if binding is not None})


class RunToolbox:
    """A `spectool_core.runs.Toolbox` over marked tools, for one agent run.

    Args:
        marked: the marked tools by name.
        waiting: names of the tools that wait for a human's approval in this run; EVERY_TOOL for all.
        config: the config of the node that calls the main model.
        asynchronous: whether the run is async, so that its coroutine tools run on its event loop.
    """

    def __init__(
        self,
        marked: Mapping[str, ToolBinding],
        *,
        waiting: frozenset[str],
        config: RunnableConfig,
        asynchronous: bool,
    ) -> None:
        self._marked = marked
        self._waiting = waiting
        self._config = config
        self._asynchronous = asynchronous
        # Of the model's node, not of whoever claims: what a tool sees must not depend on who asks.
        self._context = copy_context()

    def policy(self, name: str) -> ToolPolicy | None:
        """See `Toolbox.policy`."""
        binding = self._marked.get(name)
        return binding.policy if binding is not None else None

    def prepare(self, call: ToolCall, scope: Scope) -> PreparedCall:
        """See `Toolbox.prepare`."""
        binding = self._marked.get(call.name)
        if binding is None:
            raise NotPrepared("unmarked")
        if self._waiting is EVERY_TOOL or call.name in self._waiting:
            raise NotPrepared("needs_approval")
        try:
            return binding.prepare(
                call, scope=scope, config=self._config, asynchronous=self._asynchronous, context=self._context
            )
        except NotPrepared:
            raise
        except Exception as exc:
            _logger.warning("%s cannot be prepared for an early run (%s)", call.name, type(exc).__name__)
            raise NotPrepared("unprepared") from exc

"""The tools that the main model may call in one step of an agent."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from llama_index.core.agent.workflow import multi_agent_workflow
from llama_index.core.tools import BaseTool, FunctionTool

from spectool_core.annotation import ToolPolicy
from spectool_core.bounds import Bound
from spectool_core.calls import ToolCall, ToolSchema
from spectool_core.identity import WeakIdentityMap
from spectool_core.runs import NotPrepared, PreparedCall, Scope
from spectool_llamaindex._binding import ToolBinding

__all__ = ["StepToolbox", "schema_of"]

_logger = logging.getLogger("spectool")

# LlamaIndex's own handoff changes which agent runs next, and nothing that a tool reads.
_HARMLESS = ToolPolicy(writes=frozenset())


class StepToolbox:
    """A `spectool_core.runs.Toolbox` over the tools of one step.

    Args:
        bindings: the marked tools.
        served: names of those whose calls can be served from an early run.
        offered: all tools that the main model may call.
        cap: bounds the early runs in flight of the agent run.
    """

    def __init__(
        self,
        bindings: Mapping[str, ToolBinding],
        served: Collection[str],
        offered: Iterable[BaseTool],
        cap: Bound | None,
    ) -> None:
        self.bindings = bindings
        self._served = served
        self._cap = cap
        self._harmless = {tool.metadata.name for tool in offered if _is_stock_handoff(tool)}

    @property
    def can_run_early(self) -> bool:
        """Whether any call that the main model may make could be run early."""
        return any(self.bindings[name].policy.runs_early for name in self._served)

    def policy(self, name: str) -> ToolPolicy | None:
        """See `Toolbox.policy`."""
        binding = self.bindings.get(name)
        if binding is not None:
            return binding.policy
        return _HARMLESS if name in self._harmless else None

    def prepare(self, call: ToolCall, scope: Scope) -> PreparedCall:
        """See `Toolbox.prepare`."""
        binding = self.bindings.get(call.name)
        if binding is None:
            raise NotPrepared("unmarked")
        if call.name not in self._served:
            raise NotPrepared("not_served")
        try:
            return binding.prepare(call, scope, self._cap)
        except NotPrepared:
            raise
        except Exception as exc:
            _logger.warning("%s cannot be prepared for an early run (%s)", call.name, type(exc).__name__)
            raise NotPrepared("unprepared") from exc


def schema_of(tool: BaseTool) -> ToolSchema:
    """The tool in OpenAI format, as LlamaIndex gives it to the main model; made once for a tool."""
    known = _schemas.get(tool)
    if known is None or known[0] is not tool.metadata:
        known = _schemas.set(tool, (tool.metadata, tool.metadata.to_openai_tool(skip_length_check=True)))
    return known[1]


_schemas: WeakIdentityMap[tuple[object, ToolSchema]] = WeakIdentityMap()


def _is_stock_handoff(tool: BaseTool) -> bool:
    return isinstance(tool, FunctionTool) and tool.real_fn is multi_agent_workflow.handoff

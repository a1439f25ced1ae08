"""A marked tool bound to what may run it early: the key of a call, how it is run, and what a hit hands out."""

from __future__ import annotations

from contextvars import copy_context
from copy import deepcopy
from typing import Any

from llama_index.core.tools import AsyncBaseTool, BaseTool, FunctionTool, adapt_to_async_tool

from spectool_core.annotation import ToolPolicy, is_marked_itself, policy_of
from spectool_core.bounds import Bound
from spectool_core.calls import ToolCall
from spectool_core.canonical import CallKey, canonicalize
from spectool_core.early import acontained, contained
from spectool_core.errors import NotSpeculatableError
from spectool_core.runs import NotPrepared, NotReplayable, PreparedCall, Scope
from spectool_llamaindex._execution import execution_of, is_converted
from spectool_llamaindex._isolation import Recorded, Recorder

__all__ = ["ToolBinding", "refusal"]


def refusal(tool: BaseTool) -> str | None:
    """Why `tool` cannot be run early, in words that follow "this one"; None if it can."""
    if not tool.metadata.name:
        return "has no name"
    if tool.metadata.return_direct:
        return "ends the run with its result (return_direct=True)"
    if tool.metadata.name == "handoff":
        return "hands over to another agent"
    if isinstance(tool, FunctionTool) and tool.requires_context:
        return f"takes the workflow's context: {tool.ctx_param_name}"
    return None


class ToolBinding:
    """One marked tool of an agent.

    Raises NotSpeculatableError, with the reason, if the policy lets the tool be run early and it cannot be.
    """

    def __init__(self, tool: BaseTool, policy: ToolPolicy) -> None:
        if policy.runs_early and (reason := refusal(tool)):
            raise NotSpeculatableError(str(tool.metadata.name), reason)
        self.tool = tool
        self.policy = policy
        self.target: AsyncBaseTool = adapt_to_async_tool(tool)
        self._execution = execution_of(self.target, policy.exclude_args)

    @property
    def name(self) -> str:
        """The tool's name, by which models call it."""
        return self.tool.metadata.get_name()

    @classmethod
    def of(cls, tool: BaseTool) -> ToolBinding | None:
        """The binding of a marked tool; None for others."""
        policy = _policy_of(tool)
        return cls(tool, policy) if policy is not None else None

    @property
    def is_current(self) -> bool:
        """Whether the tool's mark is still the one that it was bound with."""
        return _policy_of(self.tool) == self.policy

    def prepare(self, call: ToolCall, scope: Scope, cap: Bound | None) -> PreparedCall:
        """Make a call ready to run early, once.

        Raises NotPrepared: "invalid_arguments" (the tool does not take them) or "no_key" (they hold a value with no
        canonical form).
        """
        try:
            arguments = deepcopy(dict(call.arguments))
        except Exception as error:  # nested too deeply
            raise NotPrepared("no_key") from error
        try:
            received = self._execution.received(arguments)
        except TypeError as error:
            raise NotPrepared("invalid_arguments") from error
        try:
            key = CallKey(self.tool, scope, canonicalize(received))
        except Exception as error:  # besides CanonicalizationError: what a received object's own methods raise
            raise NotPrepared("no_key") from error
        blocking = self._execution.blocking
        run = self._early_run(call, arguments) if blocking else self._early_arun(call, arguments)
        content = self._execution.content
        return PreparedCall(call, key, scope, self.policy, run, blocking=blocking, cap=cap, content=content)

    def stand_in(self, recorded: Recorded) -> AsyncBaseTool | None:
        """A tool that hands out what an early run returned; None if it cannot be copied."""
        try:
            return self._execution.stand_in(recorded)
        except NotReplayable:
            return None

    def _early_run(self, call: ToolCall, arguments: dict[str, Any]) -> Any:
        context = copy_context()

        def run() -> Recorded:
            recorder = Recorder()
            context.run(recorder.enter)
            try:
                value = contained(lambda: context.run(self._execution.run, arguments))
                return _recorded(recorder, value, call, arguments)
            finally:
                recorder.close()

        return run

    def _early_arun(self, call: ToolCall, arguments: dict[str, Any]) -> Any:
        async def run() -> Recorded:
            recorder = Recorder()
            recorder.enter()  # in the context of the core's task, which is this run's alone
            try:
                value = await acontained(self._execution.run(arguments))
                return _recorded(recorder, value, call, arguments)
            finally:
                recorder.close()

        return run


def _policy_of(tool: BaseTool) -> ToolPolicy | None:
    """The tool's mark; one on a function speaks for that function only, which has to be the one that agents run."""
    if isinstance(tool, FunctionTool) and not is_marked_itself(tool):
        return policy_of(tool.fn if is_converted(tool) else tool.async_fn)
    return policy_of(tool)


def _recorded(recorder: Recorder, value: Any, call: ToolCall, arguments: dict[str, Any]) -> Recorded:
    if arguments != call.arguments:
        # Stock shows the change in its events; a hit would not.
        raise NotReplayable("the tool changed the arguments that it was given")
    if getattr(value, "is_error", False) is True or getattr(value, "isError", False) is True:
        raise RuntimeError("the tool returned an error")  # a ToolOutput, or the result of an MCP server
    return recorder.recorded(value)

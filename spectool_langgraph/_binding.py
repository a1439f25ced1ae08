"""A marked tool bound to what may run it early: what it would receive, the key of that, and how its own code is run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextvars import Context, copy_context
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, StructuredTool, Tool
from langchain_core.tools.base import _get_runnable_config_param

from spectool_core.annotation import ToolPolicy, policy_of
from spectool_core.calls import ToolCall
from spectool_core.canonical import CallKey, canonicalize
from spectool_core.early import acontained, contained
from spectool_core.errors import NotSpeculatableError
from spectool_core.runs import NotPrepared, NotReplayable, PreparedCall, Scope
from spectool_langgraph._engine import content_of
from spectool_langgraph._isolation import Isolation
from spectool_langgraph._recording import Recorded
from spectool_langgraph._refusal import injects_own_runtime, refusal

__all__ = ["ToolBinding"]


@dataclass(frozen=True, slots=True)
class _Parameters:
    """What an implementation takes besides its arguments, found as `BaseTool.run` and `arun` do."""

    takes_run_manager: bool
    config: str | None

    @classmethod
    def of(cls, implementation: Callable[..., Any]) -> _Parameters:
        takes_run_manager = "run_manager" in inspect.signature(implementation).parameters
        return cls(takes_run_manager, _get_runnable_config_param(implementation))


class ToolBinding:
    """One marked tool of an agent.

    Raises NotSpeculatableError, with the reason, if the policy lets the tool be run early and it cannot be.
    """

    def __init__(self, tool: BaseTool, policy: ToolPolicy) -> None:
        if policy.runs_early and (reason := refusal(tool)):
            raise NotSpeculatableError(tool.name, reason)
        self.tool = tool
        self.policy = policy
        self._is_native_async = _is_native_async(tool)
        self._has_sync_path = not isinstance(tool, StructuredTool | Tool) or tool.func is not None
        self._sync_parameters = _Parameters.of(tool._run)
        self._async_parameters = _Parameters.of(tool._arun)
        self._injects_runtime = injects_own_runtime(tool)

    @classmethod
    def of(cls, tool: BaseTool) -> ToolBinding | None:
        """The binding of a marked tool; None for others."""
        policy = policy_of(tool)
        return cls(tool, policy) if policy is not None else None

    def prepare(
        self,
        call: ToolCall,
        *,
        scope: Scope,
        config: RunnableConfig,
        asynchronous: bool,
        context: Context | None = None,
    ) -> PreparedCall:
        """Make a call ready to run early, once.

        Args:
            call: the call; it is not changed, whatever the tool does with its arguments.
            scope: who may share the result.
            config: the config of the model's call or the tool node's: the user's settings are taken from it.
            asynchronous: the graph runs on an event loop.
            context: the context variables that the tool is to see, the current ones by default; copied, not changed.

        Raises NotPrepared: "invalid_arguments" (the tool's schema refuses them), "no_key" (they hold a value with no
        canonical form) or "async_only" (the tool has no sync path, which a sync graph needs).
        """
        if not (asynchronous or self._has_sync_path):
            raise NotPrepared("async_only")
        arguments = self._own_copy(call)
        try:
            received = self.tool._to_args_and_kwargs(arguments, call.id)
        except Exception as error:  # a schema may run any code
            raise NotPrepared("invalid_arguments") from error
        native_async = asynchronous and self._is_native_async
        key = CallKey(self.tool, scope, self._canonical(*received))
        early = _EarlyCall(self, call, arguments, received, config, context or copy_context())
        run = early.arun if native_async else early.run
        content = partial(content_of, self.tool)
        return PreparedCall(call, key, scope, self.policy, run, blocking=not native_async, content=content)

    def _own_copy(self, call: ToolCall) -> dict[str, Any]:
        arguments = dict(call.arguments)
        if self._injects_runtime:
            arguments.pop("runtime", None)  # as the tool node does: a model cannot forge what is injected
        if all(isinstance(value, str | int | float | None) for value in arguments.values()):
            return arguments
        try:
            return deepcopy(arguments)
        except Exception as error:  # nested too deeply
            raise NotPrepared("no_key") from error

    def _canonical(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if excluded := self.policy.exclude_args:
            kwargs = {name: value for name, value in kwargs.items() if name not in excluded}
        try:
            return canonicalize({"args": args, "kwargs": kwargs})
        except Exception as error:  # besides CanonicalizationError: what a received object's own methods raise
            raise NotPrepared("no_key") from error

    def injected(self, isolation: Isolation, *, native_async: bool) -> dict[str, Any]:
        """The keyword arguments that a tool run adds to those of the call."""
        parameters = self._async_parameters if native_async else self._sync_parameters
        added: dict[str, Any] = {}
        if self._injects_runtime:
            added["runtime"] = isolation.tool_runtime()
        if parameters.takes_run_manager:
            added["run_manager"] = isolation.run_manager
        if parameters.config is not None:
            added[parameters.config] = isolation.config
        return added


class _EarlyCall:
    """One run of a tool's own code: no callbacks, no tracing, nothing of the graph. Runs once."""

    __slots__ = ("_arguments", "_binding", "_call", "_origin", "_received")

    def __init__(
        self,
        binding: ToolBinding,
        call: ToolCall,
        arguments: dict[str, Any],
        received: tuple[tuple[Any, ...], dict[str, Any]],
        config: RunnableConfig,
        context: Context,
    ) -> None:
        self._binding = binding
        self._call = call
        self._arguments = arguments
        self._received = received
        self._origin: tuple[RunnableConfig, Context] | None = (config, context)

    def run(self) -> Recorded:
        """Run the sync implementation, in this thread."""
        isolation = self._isolation(native_async=False)
        args, kwargs = self._received
        kwargs |= self._binding.injected(isolation, native_async=False)
        value = contained(lambda: isolation.context.run(self._binding.tool._run, *args, **kwargs))
        return self._recorded(isolation, value)

    async def arun(self) -> Recorded:
        """Run the coroutine, on this loop; cancelling reaches it."""
        isolation = self._isolation(native_async=True)
        args, kwargs = self._received
        kwargs |= self._binding.injected(isolation, native_async=True)

        async def in_context() -> Any:
            return await acontained(self._binding.tool._arun(*args, **kwargs))

        loop = asyncio.get_running_loop()
        value = await loop.create_task(in_context(), context=isolation.context)
        return self._recorded(isolation, value)

    def _isolation(self, *, native_async: bool) -> Isolation:
        if self._origin is None:
            raise RuntimeError("a prepared call runs once")
        config, context = self._origin
        self._origin = None  # a kept result does not keep the graph that asked for it
        return Isolation(context.copy(), config, native_async=native_async)

    def _recorded(self, isolation: Isolation, value: Any) -> Recorded:
        given = self._call.arguments
        if any(given.get(name, value) != value for name, value in self._arguments.items()):
            # Stock shows the change in the model's message; a hit would not.
            raise NotReplayable("the tool changed the arguments that it was given")
        return isolation.recorder.recorded(value)


def _is_native_async(tool: BaseTool) -> bool:
    # As `ainvoke` decides: tools made from functions look at their coroutine only.
    if isinstance(tool, StructuredTool | Tool):
        return tool.coroutine is not None
    return type(tool)._arun is not BaseTool._arun

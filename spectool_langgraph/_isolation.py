"""The place where a tool runs early: the user's settings are there, the graph and its observers are out of reach."""

from __future__ import annotations

from contextvars import Context
from typing import Any, NoReturn, cast
from uuid import uuid4

from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForToolRun,
    CallbackManager,
    CallbackManagerForToolRun,
)
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langgraph._internal._constants import CONFIG_KEY_RUNTIME
from langgraph.constants import TAG_NOSTREAM
from langgraph.prebuilt import ToolRuntime
from langgraph.runtime import Runtime

from spectool_langgraph._recording import Recorder
from spectool_langgraph._unseen import hide_observers

__all__ = ["Isolation"]

# Where in the graph a call stands: not known before the tool node runs, so absent rather than wrong.
_POSITION = frozenset({"checkpoint_ns", "checkpoint_id", "checkpoint_map"})


class Isolation:
    """One early run's surroundings, set up inside `context`, which nothing else may use.

    Args:
        context: a copy of the context variables in which the model was called.
        config: the config of the model's call.
        native_async: the tool runs as a coroutine, so its callback managers are asynchronous ones.
    """

    def __init__(self, context: Context, config: RunnableConfig, *, native_async: bool) -> None:
        self.context = context
        self.recorder = Recorder()
        context.run(self._enter, config, native_async)

    def _enter(self, origin: RunnableConfig, native_async: bool) -> None:
        var_child_runnable_config.set(None)
        hide_observers(self.recorder)
        self.runtime = self._runtime((origin.get("configurable") or {}).get(CONFIG_KEY_RUNTIME))
        config = ensure_config(self._settings(origin))
        caller, tool = uuid4(), uuid4()
        tags, metadata = config["tags"], config["metadata"]
        self.recorder.expect(caller=caller, tags=frozenset(tags), metadata=metadata)
        manager, run_manager = (
            (AsyncCallbackManager, AsyncCallbackManagerForToolRun)
            if native_async
            else (CallbackManager, CallbackManagerForToolRun)
        )
        shared: dict[str, Any] = {
            "handlers": [self.recorder],
            "inheritable_handlers": [self.recorder],
            "parent_run_id": caller,
            "tags": tags,
            "inheritable_tags": tags,
            "metadata": metadata,
            "inheritable_metadata": metadata,
        }
        self.run_manager = run_manager(run_id=tool, **shared)
        self.config: RunnableConfig = {**config, "callbacks": manager(**shared)}
        var_child_runnable_config.set({**config, "callbacks": self.run_manager.get_child()})

    def _settings(self, origin: RunnableConfig) -> RunnableConfig:
        """What the user passed to the graph, without what the graph added for its own use."""
        configurable = {
            key: value
            for key, value in (origin.get("configurable") or {}).items()
            if not key.startswith("__pregel") and key not in _POSITION
        }
        if self.runtime is not None:
            configurable[CONFIG_KEY_RUNTIME] = self.runtime
        metadata = {
            key: value
            for key, value in (origin.get("metadata") or {}).items()
            if not key.startswith("langgraph_") and key not in _POSITION
        }
        limits = {name: origin.get(name) for name in ("recursion_limit", "max_concurrency")}
        settings = {
            "tags": [*(origin.get("tags") or ()), TAG_NOSTREAM],
            "metadata": metadata,
            "configurable": configurable,
            **limits,
        }
        return cast("RunnableConfig", settings)

    def _runtime(self, real: Any) -> Runtime[Any] | None:
        if not isinstance(real, Runtime):
            return None
        return Runtime(
            context=real.context,
            store=self._unless_none("store", real.store),
            stream_writer=self.recorder.write,
            previous=self._unless_none("previous", real.previous),
            execution_info=self._unless_none("execution_info", real.execution_info),
            server_info=real.server_info,
        )

    def tool_runtime(self) -> ToolRuntime[Any, Any] | None:
        """What langchain-mcp-adapters hands to its interceptors; None where no graph runs."""
        if self.runtime is None:
            return None
        runtime: ToolRuntime[Any, Any] = ToolRuntime(
            state=self._out_of_reach("state"),
            context=self.runtime.context,
            config=self.config,
            stream_writer=self.runtime.stream_writer,
            tool_call_id=self._out_of_reach("tool_call_id"),
            store=self.runtime.store,
            tools=self._out_of_reach("tools"),
            execution_info=self.runtime.execution_info,
            server_info=self.runtime.server_info,
        )
        runtime.emit_output_delta = self._out_of_reach("tools stream")  # type: ignore[method-assign]
        return runtime

    def _out_of_reach(self, name: str) -> Any:
        return OutOfReach(name, self.recorder)

    def _unless_none(self, name: str, real: Any) -> Any:
        # What the graph does not have either stays None, so that `if runtime.store:` goes the way it would go.
        return None if real is None else OutOfReach(name, self.recorder)


class OutOfReach:
    """Stands for what is not there before the tool node runs: whatever a tool does with it fails the early run."""

    __slots__ = ("_name", "_recorder")

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._name = name
        self._recorder = recorder

    def __repr__(self) -> str:
        return f"<{self._name}: not available to an early run>"

    def __getattr__(self, _: str) -> NoReturn:
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        self._recorder.refuse(f"used the graph's {self._name}")

    __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __call__ = __str__ = __eq__ = __hash__ = _refuse

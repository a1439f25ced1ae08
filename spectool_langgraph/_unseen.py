"""Out of sight: a context in which nothing that observes the run hears of what is done for it early."""

from __future__ import annotations

from contextvars import Context, copy_context

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers import context as tracers
from langsmith.run_helpers import _set_tracing_context

__all__ = ["hide_observers", "unseen"]


def unseen() -> Context:
    """A copy of the context in which no graph, callback or tracer of the run is known."""
    context = copy_context()
    context.run(_detach)
    return context


def _detach() -> None:
    var_child_runnable_config.set(None)
    hide_observers(BaseCallbackHandler())


def hide_observers(stand_in: BaseCallbackHandler) -> None:
    """Hide, in the current context, every tracer and every handler that LangChain takes from context variables.

    Args:
        stand_in: the handler for hooks that would else make one of their own.
    """
    _set_tracing_context({"parent": None, "enabled": False, "tags": None, "metadata": None})
    tracers.tracing_v2_callback_var.set(None)
    for variable, _, handler_class, environment_variable in tracers._configure_hooks:
        # A hook with an environment variable makes a handler where it finds none, so it finds the stand-in.
        makes_its_own = environment_variable is not None and handler_class is not None
        variable.set(stand_in if makes_its_own else None)

"""Speculation for agents and workflows that were built elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar, cast

from llama_index.core.agent.workflow import AgentWorkflow
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent

from spectool_core.errors import ConfigurationError
from spectool_core.speculation import Speculation
from spectool_llamaindex.agents import SpeculativeAgent

__all__ = ["speculate"]

_DERIVED = "__spectool_derived__"

TargetT = TypeVar("TargetT", BaseWorkflowAgent, AgentWorkflow)


def speculate(target: TargetT, speculation: Speculation) -> TargetT:
    """A copy of an agent, or of a workflow and its agents, whose marked tools may run early.

    The copy has the same settings, and classes of the same names that derive from the original's; the original stays
    stock. Memory, LLMs and tools are shared.

    Args:
        target: an agent of LlamaIndex or an `AgentWorkflow`, with no run under way.
        speculation: speculators and limits; one may serve many agents.

    Raises:
        ConfigurationError: `target` is neither, or `speculation` is not a `Speculation`.
        NotSpeculatableError: a marked tool cannot be run early, and why.
    """
    if isinstance(target, AgentWorkflow):
        workflow = copy.copy(target)
        workflow.agents = {name: _agent(agent, speculation) for name, agent in target.agents.items()}
        workflow.runtime.track_workflow(workflow)
        return workflow
    if isinstance(target, BaseWorkflowAgent):
        return cast("TargetT", _agent(target, speculation))
    raise ConfigurationError("target", target, "an agent of LlamaIndex or an AgentWorkflow")


def _agent(agent: BaseWorkflowAgent, speculation: Speculation) -> SpeculativeAgent:
    copied: Any = agent.model_copy()
    copied.__class__ = _speculative(type(agent))
    if copied.tools is not None:
        copied.tools = list(copied.tools)
    if copied.__pydantic_private__ is None:
        copied.__pydantic_private__ = {}
    copied.speculate_with(speculation)
    copied.runtime.track_workflow(copied)
    return cast("SpeculativeAgent", copied)


def _speculative(cls: type[BaseWorkflowAgent]) -> type[BaseWorkflowAgent]:
    if issubclass(cls, SpeculativeAgent):
        return cls
    if isinstance(known := cls.__dict__.get(_DERIVED), type):
        return known
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    make = cast("Callable[..., type[BaseWorkflowAgent]]", type(cls))
    derived = make(cls.__name__, (SpeculativeAgent, cls), names)
    setattr(cls, _DERIVED, derived)  # not in a table, which would keep both alive
    return derived

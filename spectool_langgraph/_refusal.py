"""Which tools cannot be run before the model asks for them, as far as their definition tells."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.tools.base import _get_injected_args_keys_from_signature
from langgraph.prebuilt.tool_node import _get_all_injected_args
from langgraph.types import Command

__all__ = ["injects_own_runtime", "refusal"]

_EXECUTION = ("invoke", "ainvoke", "run", "arun")
_HANDOFF = "__handoff_destination"  # how langgraph-supervisor and langgraph-swarm tell handoff tools


def refusal(tool: BaseTool) -> str | None:
    """Why `tool` cannot be run early, in words that follow "this one"; None if it can."""
    if not tool.name:
        return "has no name"
    if tool.return_direct:
        return "ends the run with its result (return_direct=True)"
    if _HANDOFF in (tool.metadata or {}):
        return "hands over to another agent"
    for method in _EXECUTION:
        if not _defining_module(type(tool), method).startswith("langchain_core."):
            return f"overrides {method}(), so what its own code receives is not known"
    if injects_own_runtime(tool):
        return None
    try:
        injected = sorted(_injected_names(tool))
    except Exception as error:
        return f"has annotations that cannot be read ({error})"
    if injected:
        return f"takes what only the tool node can inject: {', '.join(injected)}"
    if any(_is_command(annotation) for annotation in _return_annotations(tool)):
        return "returns a Command"
    return None


def injects_own_runtime(tool: BaseTool) -> bool:
    """Whether this is a tool of langchain-mcp-adapters, which hands the graph's runtime to its interceptors only."""
    return (
        isinstance(tool, StructuredTool)
        and getattr(tool.coroutine, "__module__", None) == "langchain_mcp_adapters.tools"
    )


def _defining_module(cls: type, method: str) -> str:
    return next(base.__module__ for base in cls.__mro__ if method in base.__dict__)


def _implementations(tool: BaseTool) -> Iterator[Callable[..., Any]]:
    for name in ("func", "coroutine", "_run", "_arun"):
        if callable(implementation := getattr(tool, name, None)):
            yield implementation


def _injected_names(tool: BaseTool) -> set[str]:
    # The tool node looks at the schema and at one of the functions only.
    injected = _get_all_injected_args(tool)
    names = {*injected.state, *injected.all_injected_keys}
    names |= {name for name in (injected.store, injected.runtime) if name}
    for implementation in _implementations(tool):
        names |= _get_injected_args_keys_from_signature(implementation)
    return names


def _return_annotations(tool: BaseTool) -> Iterator[Any]:
    for implementation in _implementations(tool):
        try:
            yield typing.get_type_hints(implementation, include_extras=True).get("return")
        except Exception:  # noqa: S112 - an annotation that cannot be read says nothing
            continue


def _is_command(annotation: Any) -> bool:
    """Whether every value of this type is a Command or holds one; a union that allows others is told at run time."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return all(_is_command(arg) for arg in args)
    if origin in (Annotated, list, tuple):
        return bool(args) and _is_command(args[0])
    return annotation is Command or origin is Command

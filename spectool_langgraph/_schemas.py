"""What the main model is offered, in the OpenAI format in which speculators are asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from spectool_core.calls import ToolSchema
from spectool_langgraph._binding import ToolBinding

__all__ = ["offered_tools"]


def offered_tools(tools: Sequence[Any], marked: Mapping[str, ToolBinding]) -> Sequence[ToolSchema]:
    """The tools bound to the main model, as they are if they are in OpenAI format, else converted.

    A provider's own format is converted where LangChain knows it, or by the bound tool of the same name; what cannot
    be told (a tool that the provider runs itself) is left out.
    """
    schemas: list[ToolSchema] = []
    for tool in tools:
        schema = tool if _is_openai(tool) else _converted(tool, marked)
        if schema is not None:
            schemas.append(schema)
    return schemas


def _is_openai(tool: Any) -> bool:
    return (
        isinstance(tool, Mapping)
        and tool.get("type") == "function"
        and isinstance(function := tool.get("function"), Mapping)
        and "name" in function
    )


def _converted(tool: Any, marked: Mapping[str, ToolBinding]) -> ToolSchema | None:
    name = tool.get("name") if isinstance(tool, Mapping) else getattr(tool, "name", None)
    if isinstance(name, str) and name in marked:
        return convert_to_openai_tool(marked[name].tool)
    try:
        schema = convert_to_openai_tool(tool)
    except Exception:
        return None  # not a function that a speculator could be asked for
    return schema if _is_openai(schema) else None

"""What the running graph tells about itself: its run, its nodes, and which of its tools wait for a human.

LangGraph hands each node a way to schedule tasks, bound to the loop that runs the graph
(`configurable["__pregel_call"]`, langgraph/pregel/_runner.py). That loop is private, so whatever of it cannot be read
turns speculation off rather than guessing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool
from langgraph.prebuilt import ToolNode

__all__ = ["EVERY_TOOL", "GraphRun", "running_graph"]

EVERY_TOOL = frozenset({"*"})
"""The answer of `tools_that_wait` when every tool waits for a human, or it cannot be told which."""


@dataclass(frozen=True, slots=True)
class GraphRun:
    """One run of a graph, seen from inside one of its nodes.

    Args:
        loops: the running Pregel loops, from the graph that the node belongs to outwards to the root graph.
        event_loop: the asyncio loop of an async run; None for a sync run.
        config: the node's config.
    """

    loops: tuple[Any, ...]
    event_loop: asyncio.AbstractEventLoop | None
    config: RunnableConfig

    @property
    def root(self) -> Any:
        """The root graph's loop: one object for the whole run."""
        return self.loops[-1]

    @property
    def place(self) -> tuple[int, str | None]:
        """Which node of which of the run's graphs this is."""
        return id(self.loops[0]), (self.config.get("metadata") or {}).get("langgraph_node")

    @property
    def step(self) -> int:
        """The superstep of the innermost graph."""
        return int(self.loops[0].step)

    @property
    def configurable(self) -> Mapping[str, Any]:
        """What the user passed as `configurable`, without LangGraph's own keys."""
        given = self.config.get("configurable", {})
        return {key: value for key, value in given.items() if not key.startswith(("__", "checkpoint_"))}

    def levels(self) -> Iterator[tuple[Mapping[str, Any], str | None]]:
        """For each graph from the innermost outwards: its nodes by name, and which of them this code is part of."""
        config = self.config
        for loop in self.loops:
            inside = (config.get("metadata") or {}).get("langgraph_node")
            yield {name: _unwrapped(node.bound) for name, node in loop.nodes.items()}, inside
            config = loop.config

    def tools(self) -> Mapping[str, BaseTool]:
        """What the tool nodes of the innermost graph run, by name."""
        nodes, _ = next(self.levels())
        return {
            name: tool
            for node in nodes.values()
            if isinstance(node, ToolNode)
            for name, tool in node.tools_by_name.items()
        }

    def tools_that_wait(self) -> frozenset[str]:
        """Names of the tools that a human may want to stop before they run; EVERY_TOOL if that cannot be told."""
        try:
            if any(loop.interrupt_before or loop.interrupt_after for loop in self.loops):
                return EVERY_TOOL
            waiting: set[str] = set()
            for runnable in (runnable for nodes, _ in self.levels() for runnable in nodes.values()):
                for hook in (getattr(runnable, "func", None), getattr(runnable, "afunc", None)):
                    middleware = getattr(hook, "__self__", None)
                    if isinstance(middleware, HumanInTheLoopMiddleware):
                        waiting.update(middleware.interrupt_on)
        except Exception:
            return EVERY_TOOL
        return frozenset(waiting)

    def when_done(self, callback: Callable[[], object]) -> bool:
        """Have `callback` called as the whole run ends, however it ends; False if that cannot be arranged."""
        with contextlib.suppress(AttributeError):
            self.root.stack.callback(callback)
            return True
        return False


def running_graph(config: RunnableConfig | None = None) -> GraphRun | None:
    """The graph run that this code is part of, from `config` or the current context; None if there is none."""
    config = config or var_child_runnable_config.get()
    if config is None:
        return None
    loops: list[Any] = []
    event_loop = None
    call = config.get("configurable", {}).get("__pregel_call")
    try:
        while call is not None:
            loop = call.keywords["schedule_task"].__self__
            if not loops:
                event_loop = call.keywords.get("loop")
            loops.append(loop)
            call = loop.config["configurable"].get("__pregel_call")
    except (AttributeError, KeyError):
        return None
    return GraphRun(tuple(loops), event_loop, config) if loops else None


def _unwrapped(runnable: Any) -> Any:
    """What `with_config` and the like were called on."""
    while isinstance(runnable, RunnableBindingBase):
        runnable = runnable.bound
    return runnable

"""The frameworks that agents are built with, one module each; none is imported unless it is asked for."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from spectool_core import ModelSpeculator, Speculation

__all__ = ["FRAMEWORKS", "Framework", "add_options", "load", "speculator_of"]

FRAMEWORKS = ("langgraph", "llamaindex")


class Framework(Protocol):
    """What differs between frameworks.

    Args:
        name: its name in `FRAMEWORKS`.
        ways: how speculation comes into an agent, or kinds of agents; each is measured by itself.
        timed_ways: those of which the time saved is measured too.
    """

    name: str
    ways: Sequence[str]
    timed_ways: Sequence[str]

    def tool(self, function: Callable[..., Coroutine[Any, Any, str]]) -> Any:
        """The framework's tool of a marked function."""

    def agent(self, way: str, base_url: str, tools: Sequence[Any], speculation: Speculation | None) -> Any:
        """An agent whose model is `MAIN`; without `speculation` a stock one."""

    def speculator(self, model: str, base_url: str) -> Any:
        """A model of the framework's own as speculator."""

    async def run(self, agent: Any, text: str) -> tuple[str, ...]:
        """Run the agent to its end; the contents of its messages, of which every second is the model's."""

    def parts(self) -> Sequence[tuple[str, float]]:
        """What the adapter's parts cost, in microseconds."""


def load(name: str) -> Framework:
    """Load one of `FRAMEWORKS`."""
    loaded: Framework = importlib.import_module(f"{__name__}.{name}").FRAMEWORK
    return loaded


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let the user choose framework, way and kind of speculator."""
    parser.add_argument("--framework", choices=FRAMEWORKS, default="langgraph")
    parser.add_argument("--way", action="append", help="of the framework; default: all")
    parser.add_argument("--speculator", choices=("lean", "own"), default="lean", help="own: the framework's own client")


def speculator_of(framework: Framework, kind: str, model: str, base_url: str) -> Any:
    """A speculator of the kind that was chosen."""
    if kind == "own":
        return framework.speculator(model, base_url)
    return ModelSpeculator(model, base_url=base_url, api_key="unused")

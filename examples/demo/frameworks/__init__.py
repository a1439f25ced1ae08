"""The frameworks that the agent can be built with, one module each; none is imported unless it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openai import DefaultAsyncHttpxClient

from examples.demo.models import Endpoint
from examples.demo.tools import Tool
from examples.demo.turns import TurnLog
from spectool_core import Speculation
from spectool_core.testing import ScriptedCall

__all__ = ["FRAMEWORKS", "INSTRUCTIONS", "Conversation", "Framework", "load"]

FRAMEWORKS = ("langgraph", "llamaindex")

INSTRUCTIONS = (
    "You answer questions about the Marrowfell Mountain Railway from its papers. Look things up with the tools, never "
    "guess; ask for several tools at once where none waits for another. Answer in two or three sentences."
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a finished run leaves.

    Args:
        answer: the agent's last words.
        transcript: what there is to compare of its messages, in order; not what differs between any two runs.
    """

    answer: str
    transcript: Sequence[Mapping[str, Any]]


class Framework(Protocol):
    """What differs between frameworks: how model and tools are made of the same parts, and how the agent runs.

    Args:
        title: the agent's kind, after "One".
        compared: what `Conversation.transcript` tells apart.
        endless_error: what a run raises when the agent comes to no end.
    """

    title: str
    compared: str
    endless_error: type[Exception]

    def model(self, endpoint: Endpoint, http: DefaultAsyncHttpxClient) -> Any:
        """The framework's own model object, which speaks through `http`."""

    async def ask(self, model: Any, text: str) -> None:
        """Have `model` answer, without tools."""

    def tools(self, functions: Sequence[Tool]) -> Sequence[Any]:
        """The framework's own tools, made of `archive_tools`; marked where the functions are."""

    def spelled(self, call: ScriptedCall) -> ScriptedCall:
        """The call of one of `archive_tools` as a model has to make it here."""

    async def run(
        self, question: str, model: Any, functions: Sequence[Tool], turns: TurnLog, speculation: Speculation | None
    ) -> Conversation:
        """Run the agent to its end, stock without `speculation`, and tell `turns` of each turn."""


def load(name: str) -> Framework:
    """Load one of `FRAMEWORKS`. Raises ImportError where its packages are not installed."""
    loaded: Framework = importlib.import_module(f"{__name__}.{name}").FRAMEWORK
    return loaded

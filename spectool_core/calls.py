"""The values that cross every border of the library: a tool call, a prompt, a tool's schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Message", "Prompt", "ToolCall", "ToolSchema"]

Message: TypeAlias = Mapping[str, Any]
"""One chat message in the OpenAI chat-completions format."""

ToolSchema: TypeAlias = Mapping[str, Any]
"""One tool in the OpenAI format: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A request to run one tool, made by a model.

    Args:
        name: the tool's name as the model wrote it.
        arguments: the parsed JSON object of arguments, before any validation by the tool's schema.
        id: the model's id for the call; None where the model or server gave none.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


class Prompt:
    """What the main model was asked, for speculators to be asked the same.

    Args:
        messages: the history in OpenAI format, or a function that renders it; it is called once, when first read.
        native: the framework's own message objects, for speculators that are framework models.
        tool_choice: the main model's tool choice in OpenAI format; None if it was left open.
        parallel_tool_calls: whether the main model may ask for several calls; None if it was left open.
    """

    __slots__ = ("_messages", "native", "parallel_tool_calls", "tool_choice")

    def __init__(
        self,
        messages: Sequence[Message] | Callable[[], Sequence[Message]],
        *,
        native: Any = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
    ) -> None:
        self._messages = messages
        self.native = native
        self.tool_choice = tool_choice
        self.parallel_tool_calls = parallel_tool_calls

    @property
    def messages(self) -> Sequence[Message]:
        """The history in OpenAI chat format, oldest first."""
        if callable(self._messages):
            self._messages = self._messages()
        return self._messages

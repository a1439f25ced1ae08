"""The values that cross every border of the library: a tool call, a prompt, a tool's schema."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

__all__ = ["Answer", "Message", "Prompt", "ToolCall", "ToolSchema", "name_of"]

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


class Answer(Protocol):
    """The main model's answer as it is written."""

    def calls(self) -> AsyncIterator[ToolCall]:
        """Yield each call once its arguments have closed; goes on until it is cancelled."""
        ...


class Prompt:
    """What the main model was asked, for speculators to be asked the same.

    Args:
        messages: the history in OpenAI format, or a function that renders it; it is called once, when first read.
        native: the framework's own message objects, for speculators that are framework models.
        tool_choice: the main model's tool choice in OpenAI format; None if it was left open.
        parallel_tool_calls: whether the main model may ask for several calls; None if it was left open.
        read_text: reads the calls out of the text of a whole answer, for agents whose model is given no tools (ReAct);
            speculators then ask with the messages alone. None where calls come as calls.
        answer: the main model's answer as it is written; None where it is not streamed, or nobody reads it.
    """

    __slots__ = ("_messages", "answer", "native", "parallel_tool_calls", "read_text", "tool_choice")

    def __init__(
        self,
        messages: Sequence[Message] | Callable[[], Sequence[Message]],
        *,
        native: Any = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        read_text: Callable[[str], Sequence[ToolCall]] | None = None,
        answer: Answer | None = None,
    ) -> None:
        self._messages = messages
        self.native = native
        self.tool_choice = tool_choice
        self.parallel_tool_calls = parallel_tool_calls
        self.read_text = read_text
        self.answer = answer

    @property
    def messages(self) -> Sequence[Message]:
        """The history in OpenAI chat format, oldest first."""
        if callable(self._messages):
            self._messages = self._messages()
        return self._messages


def name_of(schema: ToolSchema) -> str:
    """The tool's name; empty where the schema is none of a function."""
    function = schema.get("function")
    return str(function.get("name")) if isinstance(function, Mapping) else ""

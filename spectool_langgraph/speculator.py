"""Any LangChain chat model as a speculator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextvars import Context, copy_context
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers import context as tracers
from langsmith import tracing_context

from spectool_core.calls import Prompt, ToolCall, ToolSchema

__all__ = ["ChatModelSpeculator", "as_speculator"]


class ChatModelSpeculator:
    """Predicts what `model` would call, unseen by the run's callbacks, tracers and streams.

    It costs several times the client CPU of `ModelSpeculator`, which is to be preferred for OpenAI-compatible
    endpoints. A model whose async client is bound to one event loop serves that loop only.

    Args:
        model: a chat model with `bind_tools`.
    """

    def __init__(self, model: BaseChatModel) -> None:
        self.model = model
        self.name = model.get_name()

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        """Yield the calls of the model's answer; cancelling closes its request."""
        settings: dict[str, Any] = {}
        if prompt.tool_choice is not None:
            settings["tool_choice"] = prompt.tool_choice
        if prompt.parallel_tool_calls is not None:
            settings["parallel_tool_calls"] = prompt.parallel_tool_calls
        bound = self.model.bind_tools([dict(tool) for tool in tools], **settings)
        answering = asyncio.get_running_loop().create_task(bound.ainvoke(_messages(prompt)), context=_unseen())
        message = await answering
        if isinstance(message, AIMessage):
            for call in message.tool_calls:
                yield ToolCall(call["name"], call["args"], call["id"])


def as_speculator(given: Any) -> Any:
    """A chat model as a speculator; anything else as it is."""
    return ChatModelSpeculator(given) if isinstance(given, BaseChatModel) else given


def _messages(prompt: Prompt) -> list[BaseMessage]:
    native = prompt.native
    if isinstance(native, Sequence) and all(isinstance(message, BaseMessage) for message in native):
        return list(native)
    return convert_to_messages([dict(message) for message in prompt.messages])


def _unseen() -> Context:
    """A copy of the context in which no graph, callback or tracer of the run is known."""
    context = copy_context()
    context.run(_detach)
    return context


def _detach() -> None:
    var_child_runnable_config.set(None)
    tracers.tracing_v2_callback_var.set(None)
    for variable, *_ in tracers._configure_hooks:
        variable.set(None)
    # Entered and never left: the context goes with the call.
    tracing_context(parent=False, enabled=False).__enter__()

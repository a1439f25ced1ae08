"""Any LangChain chat model as a speculator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.runnables import Runnable

from spectool_core.calls import Prompt, ToolCall, ToolSchema
from spectool_langgraph._unseen import unseen

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
        if prompt.read_text is not None:
            for call in prompt.read_text((await self._answer(self.model, prompt)).text):
                yield call
            return
        settings: dict[str, Any] = {}
        if prompt.tool_choice is not None:
            settings["tool_choice"] = prompt.tool_choice
        if prompt.parallel_tool_calls is not None:
            settings["parallel_tool_calls"] = prompt.parallel_tool_calls
        bound = self.model.bind_tools([dict(tool) for tool in tools], **settings)
        message = await self._answer(bound, prompt)
        if isinstance(message, AIMessage):
            for made in message.tool_calls:
                yield ToolCall(made["name"], made["args"], made["id"])

    @staticmethod
    async def _answer(model: Runnable[Any, BaseMessage], prompt: Prompt) -> BaseMessage:
        return await asyncio.get_running_loop().create_task(model.ainvoke(_messages(prompt)), context=unseen())


def as_speculator(given: Any) -> Any:
    """A chat model as a speculator; anything else as it is."""
    return ChatModelSpeculator(given) if isinstance(given, BaseChatModel) else given


def _messages(prompt: Prompt) -> list[BaseMessage]:
    native = prompt.native
    if isinstance(native, Sequence) and all(isinstance(message, BaseMessage) for message in native):
        return list(native)
    return convert_to_messages([dict(message) for message in prompt.messages])

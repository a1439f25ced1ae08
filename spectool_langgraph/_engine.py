"""Engine mode: a chat model whose requests the engine can go on from, and what a tool's result is in its message."""

from __future__ import annotations

import logging
from typing import TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool
from langchain_core.tools.base import _format_output
from langgraph.prebuilt.tool_node import msg_content_output

from spectool_core.engine import EngineClient
from spectool_langgraph._recording import Recorded

__all__ = ["content_of", "through_engine"]

ModelT = TypeVar("ModelT", bound=BaseChatModel)

_logger = logging.getLogger("spectool")


def through_engine(model: ModelT, engine: EngineClient | None) -> ModelT:
    """A copy of a chat model over the openai package, with HTTP clients that follow `engine`; other models as they are.

    The copy is of the same class; all settings are the model's. One that cannot be copied is left as it is too: no
    request of it is seen, and its turns are client mode's.
    """
    if engine is None:
        return model
    try:
        clients = {name: engine.adopt(getattr(model, name, None)) for name in _CLIENTS}
        update = {
            field: value
            for name, client in clients.items()
            if client is not None
            for field, value in ((name, client), (_CLIENTS[name], client.chat.completions))
        }
        return model.model_copy(update=update) if update else model
    except Exception:  # a class of the user's own may do anything with its fields
        _logger.debug("%s cannot be copied", type(model).__name__, exc_info=True)
        return model


_CLIENTS = {"root_client": "client", "root_async_client": "async_client"}
"""Where `ChatOpenAI`, and what derives from it, has its clients, and what it takes from each."""


def content_of(tool: BaseTool, recorded: Recorded) -> str | None:
    """The content of the tool message that the tool node makes of `recorded`; None where that is no text."""
    value = recorded.value
    if tool.response_format == "content_and_artifact":
        if not isinstance(value, tuple) or len(value) != 2:
            return None
        value = value[0]
    message = _format_output(value, None, "call", tool.name, "success")
    content = msg_content_output(message.content) if isinstance(message, ToolMessage) else None
    return content if isinstance(content, str) else None

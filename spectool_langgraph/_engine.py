"""Engine mode: a chat model whose requests the engine can go on from, and what a tool's result is in its message."""

from __future__ import annotations

import logging

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool
from langchain_core.tools.base import _format_output
from langgraph.prebuilt.tool_node import msg_content_output

from spectool_core.engine import EngineClient, follow
from spectool_langgraph._recording import Recorded

__all__ = ["content_of", "follow_model"]

_logger = logging.getLogger("spectool")


def follow_model(model: BaseChatModel, engine: EngineClient | None) -> None:
    """Have the requests of a chat model over the openai package come by `engine`; see `follow`.

    Those of other models are not seen, and their turns are client mode's.
    """
    if engine is None:
        return
    try:
        for name in _CLIENTS:
            follow(getattr(model, name, None))
    except Exception:  # a class of the user's own may do anything with its attributes
        _logger.debug("the requests of %s cannot be followed", type(model).__name__, exc_info=True)


_CLIENTS = ("root_client", "root_async_client")
"""Where `ChatOpenAI`, and what derives from it, has its clients."""


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

"""Engine mode: an LLM whose requests the engine can go on from, and what a tool's output is in its message."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import TextBlock
from llama_index.core.tools import ToolOutput

from spectool_core.engine import EngineClient, follow

__all__ = ["content_of", "follow_llm", "text_of"]

_logger = logging.getLogger("spectool")


def follow_llm(llm: Any, engine: EngineClient | None) -> None:
    """Have the requests of an LLM over the openai package come by `engine`; see `follow`.

    Those of other LLMs are not seen, and their turns are client mode's.
    """
    # `OpenAI` and what derives from it; one that makes a client for each request would close it after the first turn.
    if engine is None or not callable(getattr(llm, "_get_aclient", None)) or not getattr(llm, "reuse_client", False):
        return
    try:
        follow(getattr(llm, "_aclient", None) or llm._get_aclient())
    except Exception:  # a class of the user's own may do anything with its attributes
        _logger.debug("the requests of %s cannot be followed", type(llm).__name__, exc_info=True)


def content_of(output: Any) -> str | None:
    """The content of the tool message that agents make of a tool's output; None where that is no text."""
    return text_of(output.blocks) if isinstance(output, ToolOutput) else None


def text_of(blocks: Sequence[Any]) -> str | None:
    """The content of a tool message of these blocks; None where that is no text."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    return "".join(texts) if len(texts) == len(blocks) else None

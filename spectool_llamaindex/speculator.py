"""Any LLM of LlamaIndex as a speculator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

from llama_index.core.base.llms.types import ChatResponse, ToolCallBlock
from llama_index.core.llms import LLM, CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM

from spectool_core.calls import Prompt, ToolCall, ToolSchema
from spectool_core.errors import ConfigurationError
from spectool_core.speculators._arguments import parse_arguments
from spectool_core.threads import WorkerThreads
from spectool_llamaindex._asking import Asked

__all__ = ["LLMSpeculator", "as_speculator"]

# Of LLMs that only block.
_MAX_THREADS = 4


class LLMSpeculator:
    """Predicts what `llm` would call, unseen by callbacks and instrumentation; for LlamaIndex's agents.

    It costs several times the client CPU of `ModelSpeculator`, which is to be preferred for OpenAI-compatible
    endpoints. An LLM whose async client is bound to one event loop serves that loop only.

    Args:
        llm: for a ReActAgent any, for a FunctionAgent one with tool calls.

    Raises:
        ConfigurationError: `llm` is not an LLM of LlamaIndex.
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):
            raise ConfigurationError("llm", llm, "an LLM of LlamaIndex")
        self.llm = llm
        self.name = _name_of(llm)
        self._threads = WorkerThreads(_MAX_THREADS, "spectool-llm")

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        """Yield the calls of the LLM's answer; cancelling closes its request."""
        if not tools and prompt.read_text is None:
            return
        asked = prompt.native
        if not isinstance(asked, Asked):
            raise TypeError("LLMSpeculator predicts for agents of LlamaIndex only")
        calls = await (self._read(prompt, asked) if prompt.read_text is not None else self._choose(prompt, asked))
        # A model that is to make one call at a time may make more: its client does not always hold it to that.
        for call in calls[:1] if prompt.parallel_tool_calls is False else calls:
            yield call

    async def _read(self, prompt: Prompt, asked: Asked) -> Sequence[ToolCall]:
        messages = list(asked.messages)
        if isinstance(self.llm, CustomLLM) and type(self.llm).achat is CustomLLM.achat:
            # Its `achat` would block the event loop, and the default executor is left to real calls.
            chatting = self._threads.submit(partial(copy_context().run, self.llm.chat, messages))
            response = await asyncio.wrap_future(chatting)
        else:
            response = await self.llm.achat(messages)
        return prompt.read_text(response.message.content or "") if prompt.read_text is not None else ()

    async def _choose(self, prompt: Prompt, asked: Asked) -> Sequence[ToolCall]:
        llm = self.llm
        if not isinstance(llm, FunctionCallingLLM):
            raise TypeError(f"{self.name} does not call tools")
        options: dict[str, Any] = {} if asked.tool_choice is None else {"tool_choice": asked.tool_choice}
        response = await llm.achat_with_tools(
            tools=asked.tools,
            chat_history=list(asked.messages),
            allow_parallel_tool_calls=prompt.parallel_tool_calls is not False,
            **options,
        )
        return list(_calls(llm, response))


def as_speculator(given: Any) -> Any:
    """An LLM as a speculator; anything else as it is."""
    return LLMSpeculator(given) if isinstance(given, LLM) else given


def _name_of(llm: LLM) -> str:
    try:
        return llm.metadata.model_name
    except Exception:  # some look their model up in a table that does not know it
        return type(llm).__name__


def _calls(llm: FunctionCallingLLM, response: ChatResponse) -> Iterator[ToolCall]:
    """The calls whose arguments are whole: clients also read what was cut off, and it looks complete."""
    texts = {
        block.tool_call_id: block.tool_kwargs
        for block in response.message.blocks
        if isinstance(block, ToolCallBlock) and isinstance(block.tool_kwargs, str)
    }
    for chosen in llm.get_tool_calls_from_response(response, error_on_no_tool_call=False):
        text = texts.get(chosen.tool_id)
        arguments = chosen.tool_kwargs if text is None else parse_arguments(text)
        if arguments is not None:
            yield ToolCall(chosen.tool_name, arguments, chosen.tool_id)

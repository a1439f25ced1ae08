"""A chat model that plays a script on the running loop's clock, and a handler that records every callback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field

from tests.guessing import Reply


class ScriptedChatModel(BaseChatModel):
    """Answers by the number of AI messages in the prompt; an async call takes the reply's `generation_s`."""

    replies: list[Reply]
    attempts: list[int] = Field(default_factory=list)
    before_answer: Callable[[int], None] | None = None

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def _reply(self, messages: list[BaseMessage]) -> tuple[int, Reply]:
        turn = sum(isinstance(message, AIMessage) for message in messages)
        self.attempts.append(turn)
        reply = self.replies[turn]
        if reply.error is not None and self.attempts.count(turn) == 1:
            raise reply.error
        return turn, reply

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        turn, reply = self._reply(messages)
        if self.before_answer is not None:
            self.before_answer(turn)
        return _result(turn, reply)

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> ChatResult:
        turn, reply = self._reply(messages)
        await asyncio.sleep(reply.generation_s)
        return _result(turn, reply)


class StreamingChatModel(ScriptedChatModel):
    """The same, in three chunks."""

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> Iterator[ChatGenerationChunk]:
        turn, reply = self._reply(messages)
        for index, chunk in enumerate(_chunks(turn, reply)):
            if index == 1 and self.before_answer is not None:
                self.before_answer(turn)
            if run_manager is not None:
                run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
            yield chunk

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        turn, reply = self._reply(messages)
        for chunk in _chunks(turn, reply):
            await asyncio.sleep(reply.generation_s / 3)
            yield chunk


def _result(turn: int, reply: Reply) -> ChatResult:
    calls = [tool_call(name=call.name, args=dict(call.args), id=call.id) for call in reply.calls]
    message = AIMessage(content=reply.text, tool_calls=calls, id=f"ai-{turn}")
    return ChatResult(generations=[ChatGeneration(message=message)])


def _chunks(turn: int, reply: Reply) -> list[ChatGenerationChunk]:
    import json

    first = AIMessageChunk(content=reply.text, id=f"ai-{turn}")
    calls = AIMessageChunk(
        content="",
        id=f"ai-{turn}",
        tool_call_chunks=[
            tool_call_chunk(name=call.name, args=json.dumps(call.args), id=call.id, index=index)
            for index, call in enumerate(reply.calls)
        ],
    )
    last = AIMessageChunk(content="", id=f"ai-{turn}", chunk_position="last")
    return [ChatGenerationChunk(message=message) for message in (first, calls, last)]


class CallbackLog(BaseCallbackHandler):
    """Every callback, with runs named by the order in which they were first seen."""

    run_inline = True

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._runs: dict[Any, int] = {}

    def _run(self, run_id: Any) -> int | None:
        return None if run_id is None else self._runs.setdefault(run_id, len(self._runs))

    def _log(self, event: str, payload: Any, kwargs: dict[str, Any]) -> None:
        place = (self._run(kwargs.get("run_id")), self._run(kwargs.get("parent_run_id")))
        tags = tuple(sorted(kwargs.get("tags") or ()))
        self.events.append((event, place, tags, repr(payload)))

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self._log("chat_model_start", [[(m.type, m.content, m.id) for m in batch] for batch in messages], kwargs)

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self._log("new_token", token, kwargs)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self._log("llm_end", response.generations[0][0].message, kwargs)

    def on_llm_error(self, error: Any, **kwargs: Any) -> None:
        self._log("llm_error", error, kwargs)

    def on_chain_start(self, serialized: Any, inputs: Any, **kwargs: Any) -> None:
        self._log("chain_start", kwargs.get("name"), kwargs)

    def on_chain_end(self, outputs: Any, **kwargs: Any) -> None:
        self._log("chain_end", type(outputs).__name__, kwargs)

    def on_chain_error(self, error: Any, **kwargs: Any) -> None:
        self._log("chain_error", error, kwargs)

    def on_tool_start(self, serialized: Any, input_str: Any, **kwargs: Any) -> None:
        self._log("tool_start", (serialized, input_str, kwargs.get("inputs"), kwargs.get("tool_call_id")), kwargs)

    def on_tool_end(self, output: Any, **kwargs: Any) -> None:
        self._log("tool_end", output, kwargs)

    def on_tool_error(self, error: Any, **kwargs: Any) -> None:
        self._log("tool_error", error, kwargs)

    def on_custom_event(self, name: Any, data: Any, **kwargs: Any) -> None:
        self._log("custom_event", (name, data), kwargs)


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for another thread; `timeout_s` bounds a failure only."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the condition did not come true")
        time.sleep(0.001)

"""LLMs that play a script on the running loop's clock, in the form of `llama-index-llms-openai`, and note requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    CompletionResponse,
    LLMMetadata,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import LLM, ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.tools import BaseTool
from llama_index.llms.openai.base import force_single_tool_call
from pydantic import BaseModel, Field, PrivateAttr

from spectool_core.testing import Latch, sleep_until
from tests.guessing import Call, Reply


class RawChunk(BaseModel):
    """What the server sent, in OpenAI's format: the agent passes it on as `raw`."""

    id: str
    choices: list[dict[str, Any]]


@dataclass(frozen=True)
class Request:
    """What a scripted LLM was asked."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    streaming: bool


class ScriptedTextLLM(LLM):
    """Answers in text, by the number of assistant messages in the prompt; each answer takes the reply's `generation_s`.

    Attributes:
        replies: what it says, turn by turn.
        in_turn: whether the n-th request gets the n-th reply instead, whatever its prompt holds.
        last_words: what it says where the last message is a system message: a run that is stopped early.
        latch: held before each answer, for tests on a real clock.
    """

    replies: list[Reply] = Field(exclude=True)
    in_turn: bool = False
    last_words: Reply = Field(Reply(text="stopped early", generation_s=0.5), exclude=True)
    latch: Latch | None = Field(None, exclude=True)
    _requests: list[Request] = PrivateAttr(default_factory=list)
    _attempts: list[int] = PrivateAttr(default_factory=list)
    _num_cancelled: int = PrivateAttr(0)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=True, is_function_calling_model=False, model_name="scripted")

    @property
    def requests(self) -> list[Request]:
        return self._requests

    @property
    def attempts(self) -> list[int]:
        """The turn of each request."""
        return self._attempts

    @property
    def num_cancelled(self) -> int:
        """How many requests were given up before their answer was complete."""
        return self._num_cancelled

    def _asked(self, messages: Sequence[ChatMessage], options: dict[str, Any], *, streaming: bool) -> tuple[int, Reply]:
        turn = len(self._attempts) if self.in_turn else sum(message.role == "assistant" for message in messages)
        self._attempts.append(turn)
        self._requests.append(Request([message.model_dump() for message in messages], dict(options), streaming))
        return turn, self._reply(turn, messages, options)

    def _reply(self, turn: int, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Reply:
        return self.last_words if messages[-1].role == "system" else self.replies[turn]

    async def _answer(self, turn: int, reply: Reply) -> AsyncIterator[ChatResponse]:
        """The response so far, each time more of it has come; the last one when `generation_s` have passed."""
        started_s = asyncio.get_running_loop().time()
        responses = list(_responses(turn, reply))
        try:
            if self.latch is not None:
                await self.latch.pass_through()
            for number, response in enumerate(responses, 1):
                if number > len(responses) / 2 and reply.error is not None and self._attempts.count(turn) == 1:
                    raise copy(reply.error)  # LlamaIndex writes on it
                await sleep_until(started_s + reply.generation_s * number / len(responses))
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            self._num_cancelled += 1
            raise

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        turn, reply = self._asked(messages, kwargs, streaming=False)
        response = [response async for response in self._answer(turn, reply)][-1]
        return ChatResponse(message=response.message, raw=response.raw)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        turn, reply = self._asked(messages, kwargs, streaming=True)
        return self._answer(turn, reply)

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        raise AssertionError("agents are async")

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        raise AssertionError("agents are async")

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        raise AssertionError("agents chat")

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise AssertionError("agents chat")

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        raise AssertionError("agents chat")

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise AssertionError("agents chat")


class ScriptedLLM(ScriptedTextLLM, FunctionCallingLLM):
    """The same, with tool calls whose arguments arrive piece by piece.

    Attributes:
        form: answers every request that offers its tool, as structured output does.
    """

    form: Call | None = Field(None, exclude=True)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=True, is_function_calling_model=True, model_name="scripted")

    def _reply(self, turn: int, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Reply:
        names = [tool["function"]["name"] for tool in options.get("tools") or ()]
        if self.form is not None and self.form.name in names:
            return Reply(calls=(self.form,))
        return super()._reply(turn, messages, options)

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = chat_history or []
        if user_msg is not None:
            # In place, as LlamaIndex's own LLMs do.
            messages.append(ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg)
        return {
            "messages": messages,
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": tool_choice or ("required" if tool_required else "auto"),
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def _validate_chat_with_tools_response(
        self, response: ChatResponse, tools: Sequence[BaseTool], allow_parallel_tool_calls: bool = False, **_: Any
    ) -> ChatResponse:
        if not allow_parallel_tool_calls:
            force_single_tool_call(response)
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **_: Any
    ) -> list[ToolSelection]:
        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if error_on_no_tool_call and not blocks:
            raise ValueError("Expected at least one tool call, but got 0 tool calls.")
        return [
            ToolSelection(
                tool_id=block.tool_call_id or "",
                tool_name=block.tool_name,
                tool_kwargs=_partly_parsed(block.tool_kwargs),
            )
            for block in blocks
        ]


def _partly_parsed(arguments: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        return parse_partial_json(arguments)
    except ValueError:
        return {}


def _responses(turn: int, reply: Reply) -> list[ChatResponse]:
    """The growing message: its text in two pieces, then the name of each call and its arguments in three."""
    responses: list[ChatResponse] = []
    text = ""
    calls: list[ToolCallBlock] = []

    def grow(delta: dict[str, Any]) -> None:
        blocks = [TextBlock(text=text), *(call.model_copy() for call in calls)]
        raw = RawChunk(id=f"chunk-{turn}", choices=[{"index": 0, "delta": delta}])
        message = ChatMessage(role="assistant", blocks=blocks)
        responses.append(ChatResponse(message=message, delta=delta.get("content") or "", raw=raw))

    for piece in _pieces(reply.text, 2):
        text += piece
        grow({"content": piece})
    for index, call in enumerate(reply.calls):
        calls.append(ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs={}))
        function = {"name": call.name, "arguments": ""}
        grow({"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]})
        arguments = ""
        for piece in _pieces(_raw_arguments(call), 3):
            arguments += piece
            calls[-1] = ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=arguments)
            grow({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    grow({})
    return responses


def _raw_arguments(call: Call) -> str:
    return call.args if isinstance(call.args, str) else json.dumps(call.args)


def _pieces(text: str, num_pieces: int) -> list[str]:
    pieces = [text[len(text) * i // num_pieces : len(text) * (i + 1) // num_pieces] for i in range(num_pieces)]
    return [piece for piece in pieces if piece]


def thinking(call: Call | None = None, answer: str = "done", **settings: Any) -> Reply:
    """A reply in ReAct's format: one call, or the answer."""
    if call is None:
        return Reply(text=f"Thought: I can answer.\nAnswer: {answer}", **settings)
    return Reply(text=f"Thought: I need a tool.\nAction: {call.name}\nAction Input: {_raw_arguments(call)}", **settings)


def executing(code: str, **settings: Any) -> Reply:
    """A reply in CodeAct's format."""
    return Reply(text=f"Let me compute.\n<execute>\n{code}\n</execute>", **settings)

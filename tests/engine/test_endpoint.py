"""What the endpoint plugin refuses at start, and what it says where the engine has no tool cache."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.sampling_params import SamplingParams

from spectool_core.errors import ConfigurationError
from spectool_core.vllm.chat import ToolChat
from spectool_core.vllm.engine_commands import EngineCommands
from spectool_core.vllm.hooks import MissingHookError
from spectool_core.vllm.plugin import endpoint_plugin
from spectool_core.vllm.sequences import EngineRequest, ScheduledSequence
from spectool_core.vllm.settings import EngineSettings
from spectool_core.vllm.tool_cache import Limits, ToolCache


class FakeEngine:
    """An engine client whose utility method answers as told."""

    errored = False

    def __init__(self, answer: Any = None, **settings: Any) -> None:
        scheduler_config = SimpleNamespace(max_num_seqs=8)
        self.vllm_config = SimpleNamespace(additional_config={"spectool": settings}, scheduler_config=scheduler_config)
        self.model_config = SimpleNamespace(try_get_generation_config=dict, max_model_len=100)
        self.engine_core = self
        self._answer = answer

    async def call_utility_async(self, method: str, command: str, arguments: list[Any]) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_the_plugin_is_one_of_vllms() -> None:
    assert isinstance(endpoint_plugin(), EndpointPlugin)


@pytest.mark.parametrize("field", ["api_server_count", "data_parallel_size"])
async def test_several_servers_or_engines_are_refused(field: str) -> None:
    args = Namespace(**{"api_server_count": 1, "data_parallel_size": 1, field: 2})

    with pytest.raises(ConfigurationError, match=f"{field}=2 is not allowed; allowed: 1, as a post must reach"):
        await endpoint_plugin().init_state(FakeEngine("o3"), SimpleNamespace(openai_serving_chat=None), args)


async def test_settings_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="level='o4'"):
        await endpoint_plugin().init_state(FakeEngine("o3", level="o4"), SimpleNamespace(), Namespace())


def chat_handler() -> Any:
    tokenizer = SimpleNamespace(
        eos_token_id=2, get_vocab=lambda: {"<tool_call>": 3}, all_special_ids=[], all_special_tokens=[]
    )
    return SimpleNamespace(
        create_chat_completion=None,
        create_streaming_error_response=None,
        default_sampling_params={},
        engine_client=None,
        render_chat_request=None,
        renderer=SimpleNamespace(tokenizer=tokenizer),
    )


def test_an_unknown_format_and_a_handler_that_lacks_something_are_refused() -> None:
    engine, cache = FakeEngine("o3"), ToolCache(Limits())

    with pytest.raises(ConfigurationError, match="hermes, qwen, llama3_json"):
        ToolChat(engine, chat_handler(), None, cache, EngineSettings(tool_format="pythonic"), keep_alive_s=0)
    lacking = chat_handler()
    del lacking.render_chat_request
    with pytest.raises(
        MissingHookError, match=r"OpenAIServingChat\.render_chat_request.*; client mode works with every version"
    ):
        ToolChat(engine, lacking, None, cache, EngineSettings(), keep_alive_s=0)


async def test_an_engine_without_a_tool_cache_is_used_by_sessions() -> None:
    plugin = endpoint_plugin()
    app = FastAPI()
    plugin.attach_router(app)
    engine = FakeEngine(AttributeError("no method spectool"))
    await plugin.init_state(engine, SimpleNamespace(openai_serving_chat=None), Namespace(api_key=["the-key"]))

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        refused = await client.get("/spectool/statistics")
        counts = await client.get("/spectool/statistics", headers={"Authorization": "Bearer the-key"})

    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert counts.json() == {"level": "sessions", "num_resident": 0, "num_cached_bytes": 0}


class RecordingEngine(FakeEngine):
    """Notes what is sent, in order."""

    def __init__(self) -> None:
        super().__init__("running")
        self.sent: list[str] = []

    async def call_utility_async(self, method: str, command: str, arguments: list[Any]) -> Any:
        self.sent.append(command)
        await asyncio.sleep(0)
        return {} if command == "statistics" else self._answer

    async def abort(self, request_id: str) -> None:
        self.sent.append("abort")

    async def generate(self, *arguments: Any, **options: Any) -> AsyncIterator[str]:
        self.sent.append("request")
        yield "output"


@pytest.mark.parametrize("num_busy_tasks", [0, 3])
async def test_a_response_is_announced_before_its_request_is_sent(num_busy_tasks: int) -> None:
    engine = RecordingEngine()
    commands = EngineCommands(engine)
    request = EngineRequest({"prompt_token_ids": [1]}, SamplingParams(), "chatcmpl-a", {})

    sequence: Any = ScheduledSequence(engine, request, commands, [2])
    later = [asyncio.create_task(commands.call("expect")) for _ in range(num_busy_tasks)]
    await anext(aiter(sequence))
    await asyncio.gather(*later)

    assert engine.sent[0] == "announce"
    await sequence.aclose()


def completion() -> ChatCompletionResponse:
    message = ChatMessage(role="assistant", content="The whole answer.")
    choice = ChatCompletionResponseChoice(index=0, message=message, finish_reason="stop")
    return ChatCompletionResponse(model="m", choices=[choice], usage=UsageInfo())


@pytest.mark.parametrize("wants_turns", [False, True])
async def test_a_turn_that_is_being_written_is_not_cut_by_a_delete(*, wants_turns: bool) -> None:
    has_begun, goes_on = asyncio.Event(), asyncio.Event()

    async def create_chat_completion(request: Any, raw_request: Any) -> ChatCompletionResponse:
        has_begun.set()
        await goes_on.wait()
        return completion()

    engine = RecordingEngine()
    handler = chat_handler()
    handler.create_chat_completion = create_chat_completion
    plugin = endpoint_plugin()
    app = FastAPI()
    plugin.attach_router(app)
    await plugin.init_state(engine, SimpleNamespace(openai_serving_chat=handler), Namespace())
    secret = {"X-Spectool-Secret": "s" * 32}
    headers = {**secret, "X-Request-Id": "a", **({"X-Spectool-Turns": "1"} if wants_turns else {})}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=headers))
        await has_begun.wait()
        given_up = await client.delete("/cache-tool-output/chatcmpl-a", headers=secret)
        goes_on.set()
        answer = await asking
        counts = await client.get("/spectool/statistics")

    assert (given_up.status_code, answer.status_code) == (200, 200)
    assert "The whole answer." in answer.text
    assert "abort" not in engine.sent
    assert counts.json()["num_resident"] == 0

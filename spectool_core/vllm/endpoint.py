"""The plugin's routes in vLLM's API server (vllm/plugins/endpoint_plugins/interface.py)."""
# FastAPI reads the annotations of routes: they must be objects, not text, in every version.

import asyncio
from argparse import Namespace
from collections.abc import Awaitable
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from vllm import envs
from vllm.entrypoints.openai.chat_completion import api_router
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.logger import init_logger

from spectool_core.errors import ConfigurationError
from spectool_core.vllm.access import ApiKeys
from spectool_core.vllm.chat import ToolChat, response_id_of
from spectool_core.vllm.engine_commands import EngineCommands, EngineGoneError
from spectool_core.vllm.settings import EngineSettings
from spectool_core.vllm.tool_cache import CachedResponse, Limits, ToolCache
from spectool_core.vllm.wire import OUTPUTS_PATH, REPLY_HEADER, SECRET_HEADER, WireError, read_tool_outputs

__all__ = ["ToolCacheEndpoint"]

logger = init_logger(__name__)

ENTRY_ROUTE = OUTPUTS_PATH + "{response_id}"
MAX_WAITING_POSTS = 64
WAIT_FOR_REQUEST_S = 1.0


class ToolCacheEndpoint:
    """The API server's half of engine mode."""

    name = "spectool"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._chat: ToolChat | None = None
        self._num_waiting_posts = 0

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; the one of chat completions replaces vLLM's."""
        answer = with_cancellation(load_aware_call(_answer))

        async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Any:
            try:
                self._cache.check_new(response_id_of(request, raw_request))
            except WireError as exc:
                return _refusal(exc)
            if raw_request.headers.get(SECRET_HEADER) is None or self._chat is None or self._cache.is_full:
                return await api_router.create_chat_completion(request, raw_request)
            return await answer(request, raw_request, self._chat)

        async def cache_tool_output(response_id: str, raw_request: Request) -> Any:
            return await _reply(self._post(response_id, raw_request))

        async def tool_cache_status(response_id: str, raw_request: Request) -> Any:
            return await _reply(self._status(response_id, raw_request))

        async def end_response(response_id: str, raw_request: Request) -> Any:
            return await _reply(self._end(response_id, raw_request))

        async def statistics(raw_request: Request) -> Any:
            return await _reply(self._statistics(raw_request))

        app.post("/v1/chat/completions", dependencies=[Depends(validate_json_request)])(create_chat_completion)
        app.post(ENTRY_ROUTE)(cache_tool_output)
        app.get(ENTRY_ROUTE)(tool_cache_status)
        app.delete(ENTRY_ROUTE)(end_response)
        app.get("/spectool/statistics")(statistics)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Read the settings and the model's tokens.

        Raises:
            ConfigurationError: several API servers or engines, or an unknown format.
            MissingHookError: this vLLM lacks something.
        """
        for field in ("api_server_count", "data_parallel_size"):
            if (getattr(args, field, None) or 1) > 1:
                allowed = "1, as a post must reach the server and the engine that hold the response"
                raise ConfigurationError(field, getattr(args, field), allowed)
        settings = EngineSettings.of(engine_client.vllm_config.additional_config)
        self._keys = ApiKeys(getattr(args, "api_key", None) or [envs.VLLM_API_KEY])
        self._cache = ToolCache(Limits(settings.max_responses, settings.max_entries, settings.max_output_bytes))
        self._commands = await _engine_commands(engine_client, settings)
        if state.openai_serving_chat is not None:
            self._chat = ToolChat(
                engine_client,
                state.openai_serving_chat,
                self._commands,
                self._cache,
                settings,
                keep_alive_s=float(getattr(args, "sse_keep_alive_interval", 0) or 0),
            )

    async def _post(self, response_id: str, raw_request: Request) -> dict[str, Any]:
        self._keys.check(raw_request.headers.get("Authorization"))
        cached = await self._find_soon(response_id, raw_request.headers.get(SECRET_HEADER))
        outputs = read_tool_outputs(await _read_body(raw_request, self._cache.limits.max_body_bytes))
        num_cached = self._cache.post(cached, outputs)
        if self._chat is not None:
            try:
                await self._chat.posted(response_id)
            except EngineGoneError as exc:
                raise WireError(503, str(exc), "engine_gone") from exc
        return {"cached": num_cached}

    async def _find_soon(self, response_id: str, secret: str | None) -> CachedResponse:
        """A post may overtake its chat request; few may wait for it, and none has its body read before."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + WAIT_FOR_REQUEST_S
        self._num_waiting_posts += 1
        try:
            while True:
                try:
                    return self._cache.find(response_id, secret)
                except WireError as exc:
                    if exc.status != 404 or loop.time() >= until_s or self._num_waiting_posts > MAX_WAITING_POSTS:
                        raise
                await asyncio.sleep(0.02)
        finally:
            self._num_waiting_posts -= 1

    async def _status(self, response_id: str, raw_request: Request) -> dict[str, Any]:
        self._keys.check(raw_request.headers.get("Authorization"))
        cached = self._cache.find(response_id, raw_request.headers.get(SECRET_HEADER), may_be_finished=True)
        return cached.status(self._cache.clock())

    async def _end(self, response_id: str, raw_request: Request) -> dict[str, Any]:
        self._keys.check(raw_request.headers.get("Authorization"))
        self._cache.find(response_id, raw_request.headers.get(SECRET_HEADER))
        if self._chat is not None:
            self._chat.end(response_id)
        return {"response_id": response_id, "state": "finished"}

    async def _statistics(self, raw_request: Request) -> dict[str, Any]:
        self._keys.check(raw_request.headers.get("Authorization"))
        counts: dict[str, Any] = {"level": "sessions"}
        if self._commands is not None:
            reset = raw_request.query_params.get("reset") == "1"
            counts = {"level": await self._commands.call("level"), **await self._commands.call("statistics", reset)}
        return {**counts, "num_resident": len(self._cache), "num_cached_bytes": self._cache.num_bytes}


async def _answer(request: ChatCompletionRequest, raw_request: Request, chat: ToolChat) -> Any:
    return await _reply(chat.answer(request, raw_request))


async def _engine_commands(engine_client: Any, settings: EngineSettings) -> EngineCommands | None:
    if settings.level == "sessions":
        return None
    commands = EngineCommands(engine_client)
    try:
        await commands.call("level")
    except Exception as exc:  # whatever the engine core says: it has no such method, or another scheduler
        logger.warning("spectool: the engine has no tool cache (%s); level 'sessions' is used", exc)
        return None
    return commands


async def _read_body(raw_request: Request, limit: int) -> bytes:
    """The body, unless it is larger than `limit` bytes: then no more of it is read than shows that."""
    too_large = WireError(413, f"the body has more than {limit} bytes", "too_large")
    announced = raw_request.headers.get("Content-Length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    body = bytearray()
    async for part in raw_request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    return bytes(body)


async def _reply(result: Awaitable[Any]) -> Any:
    try:
        answer = await result
    except WireError as exc:
        return _refusal(exc)
    return answer if isinstance(answer, Response) else JSONResponse(answer)


def _refusal(error: WireError) -> Any:
    headers = {REPLY_HEADER: "1"}
    if error.status == 413:
        headers["Connection"] = "close"  # the rest of a body that was not read is not waited for
    return JSONResponse(error.body(), status_code=error.status, headers=headers)

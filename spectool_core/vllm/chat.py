"""Chat requests that may be posted to: begun, answered turn by turn, and closed however they end."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import vllm
from cachetools import LRUCache
from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.logger import init_logger

from spectool_core.vllm.engine_commands import EngineCommands
from spectool_core.vllm.formats import tool_format
from spectool_core.vllm.hooks import check_hooks
from spectool_core.vllm.injector import Injector
from spectool_core.vllm.rendering import ConversationRenderer, Message, ModelTokens, RenderingRefusedError
from spectool_core.vllm.response_bodies import completion_of_last_turn, events_of_last_turn, events_of_turns
from spectool_core.vllm.sequences import EngineRequest, EngineSequence, ScheduledSequence, SessionSequence
from spectool_core.vllm.settings import EngineSettings
from spectool_core.vllm.tool_cache import CachedResponse, ToolCache
from spectool_core.vllm.turn_client import TurnClient
from spectool_core.vllm.turn_serving import RefusedAnswerError, ResidentResponse, TurnServer
from spectool_core.vllm.wire import ID_PREFIX, REPLY_HEADER, REQUEST_ID_HEADER, SECRET_HEADER, TURNS_HEADER

__all__ = ["ToolChat", "response_id_of"]

logger = init_logger(__name__)

HANDLER_HOOKS = (
    "create_chat_completion",
    "create_streaming_error_response",
    "default_sampling_params",
    "engine_client",
    "render_chat_request",
    "renderer",
)


def response_id_of(request: ChatCompletionRequest, raw_request: Request) -> str:
    """The id that vLLM gives to the response."""
    return f"{ID_PREFIX}{raw_request.headers.get(REQUEST_ID_HEADER, request.request_id)}"


class ToolChat:
    """Chat completions over sequences that stay in the engine.

    Args:
        engine_client: vLLM's.
        chat_handler: vLLM's; a copy of it reads turns, and it stays as it is for all other requests.
        commands: the engine core's; None at level sessions.
        cache: what is posted.
        settings: the server's.
        keep_alive_s: seconds of silence after which a stream says that it lives; 0 for never.

    Raises:
        MissingHookError: this vLLM's chat handler lacks something.
        ConfigurationError: unknown format.
    """

    def __init__(
        self,
        engine_client: Any,
        chat_handler: Any,
        commands: EngineCommands | None,
        cache: ToolCache,
        settings: EngineSettings,
        *,
        keep_alive_s: float,
    ) -> None:
        hooks = {"OpenAIServingChat": (chat_handler, HANDLER_HOOKS)}
        check_hooks(hooks, vllm.__version__, "client mode works with every version")
        self._engine_client = engine_client
        self._handler = copy.copy(chat_handler)
        self._handler.engine_client = TurnClient(engine_client)
        self._commands = commands
        self._cache = cache
        self._settings = settings
        self._keep_alive_s = keep_alive_s
        # A parked sequence holds one of the worker's slots.
        max_num_seqs: int = engine_client.vllm_config.scheduler_config.max_num_seqs
        self._max_parked = min(settings.max_parked, max_num_seqs // 2)
        self._responses: dict[str, ResidentResponse] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._templates_with_ids: LRUCache[str, bool] = LRUCache(256)
        tokenizer = self._handler.renderer.tokenizer
        generation = engine_client.model_config.try_get_generation_config()
        self._tokens = ModelTokens.of(tokenizer, generation.get("eos_token_id"), tool_format(settings.tool_format))
        self._server = TurnServer(self._handler, tokenizer, self._tokens, self._open_sequence)

    def _open_sequence(self, request: EngineRequest) -> EngineSequence:
        if self._commands is None:
            return SessionSequence(self._engine_client, request, self._engine_client.model_config.max_model_len)
        return ScheduledSequence(self._engine_client, request, self._commands, self._tokens.call_end_ids)

    async def answer(self, request: ChatCompletionRequest, raw_request: Request) -> Any:
        """Answer a chat request that has a secret.

        Raises:
            WireError: 409, 422 or 503, before anything has been done.
        """
        cached = self._cache.begin(response_id_of(request, raw_request), raw_request.headers[SECRET_HEADER])
        try:
            response = self._responses[cached.id] = self._new_response(request, raw_request, cached)
        except BaseException:
            self._cache.end(cached)
            raise
        try:
            return await self._answered(response, raw_request, cached.id)
        except RefusedAnswerError as exc:
            self._close_soon(response)
            error = exc.response
            return JSONResponse(error.model_dump(), status_code=error.error.code, headers={REPLY_HEADER: "1"})
        except BaseException:
            self._close_soon(response)
            raise

    async def _answered(self, response: ResidentResponse, raw_request: Request, response_id: str) -> Any:
        answer = response.begin()
        await answer.result()
        error_data = self._handler.create_streaming_error_response
        if raw_request.headers.get(TURNS_HEADER) == "1":
            return self._stream(response, events_of_turns(response, answer, error_data))
        if response.request.stream:
            return self._stream(response, events_of_last_turn(response, answer, response_id, error_data))
        completion = await completion_of_last_turn(response, answer, response_id)
        self._close_soon(response)
        return JSONResponse(completion, headers={REPLY_HEADER: "1"})

    def _new_response(
        self, request: ChatCompletionRequest, raw_request: Request, cached: CachedResponse
    ) -> ResidentResponse:
        pristine = request.model_copy(deep=True)

        async def render(messages: Sequence[Message]) -> list[int]:
            copied = pristine.model_copy(update={"messages": copy.deepcopy(list(messages)), "stream": False})
            try:
                result = await self._handler.render_chat_request(copied)
            except Exception as exc:  # templates fail in many ways, and a conversation may be too long
                raise RenderingRefusedError(f"it cannot be rendered: {type(exc).__name__}: {exc}") from exc
            if not isinstance(result, tuple):
                raise RenderingRefusedError(str(result.error.message))
            return list(result[1][0]["prompt_token_ids"])

        has_own_budgets = raw_request.headers.get(TURNS_HEADER) == "1"
        injector = Injector(
            cached,
            self._cache,
            ConversationRenderer(
                render, self._tokens, template=_template_of(pristine), templates_with_ids=self._templates_with_ids
            ),
            self._commands,
            hold_s=self._settings.hold_s,
            may_wait=self._may_wait,
            next_max_tokens=(lambda num_tokens: self._max_tokens(pristine, num_tokens)) if has_own_budgets else None,
        )
        return ResidentResponse(self._server, pristine, raw_request, cached.id.removeprefix(ID_PREFIX), injector)

    def _max_tokens(self, request: ChatCompletionRequest, num_prompt_tokens: int) -> int:
        """What a request with this prompt may write (vllm/entrypoints/serve/utils/api_utils.py, get_max_tokens)."""
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        limits: tuple[int | None, ...] = (
            self._engine_client.model_config.max_model_len - num_prompt_tokens,
            self._handler.default_sampling_params.get("max_tokens") if asked is None else asked,
            getattr(self._handler, "override_max_tokens", None),
        )
        return min(limit for limit in limits if limit is not None)

    def _may_wait(self) -> bool:
        # The one that asks is parked already, and counted.
        num_parked = sum(response.injector.cached.state == "parked" for response in self._responses.values())
        return num_parked <= self._max_parked

    def _stream(self, response: ResidentResponse, events: AsyncIterator[str]) -> Any:
        return _ResidentStream(with_sse_keep_alive(events, self._keep_alive_s), lambda: self._close_soon(response))

    async def posted(self, response_id: str) -> None:
        """Entries of this response have changed; returns when the engine knows."""
        response = self._responses.get(response_id)
        if response is not None:
            await response.injector.sync()

    def end(self, response_id: str) -> None:
        """Nobody wants the rest of this response: the turn that is being written is its last, and comes whole."""
        response = self._responses.get(response_id)
        if response is not None:
            response.injector.end_soon()

    def _close_soon(self, response: ResidentResponse) -> None:
        if self._responses.get(response.injector.cached.id) is response:
            del self._responses[response.injector.cached.id]
        # In a task of its own: the request's may be being cancelled.
        self._in_background(response.aclose())

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("spectool: %s: %s", type(error).__name__, error)


def _template_of(request: ChatCompletionRequest) -> str:
    """What tells a request's template from those of others."""
    return repr((request.chat_template, request.chat_template_kwargs))


class _ResidentStream(StreamingResponse):  # type: ignore[misc]
    """A stream whose response is closed however it ends, also if it never begins."""

    def __init__(self, body: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(body, media_type="text/event-stream", headers={REPLY_HEADER: "1"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()

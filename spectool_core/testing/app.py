"""The ASGI application behind `ModelServer`: its routes, its log and its counts.

Plain ASGI, because a fault must be able to break a response in its middle, and because at 32 streaming agents the
playback must not cost what it is there to measure.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import deque
from collections.abc import Callable, Mapping

from spectool_core.testing.exchange import ClientGoneError, Exchange, Receive, Scope, Send, send_json
from spectool_core.testing.models import ScriptedModel
from spectool_core.testing.playback import Playback
from spectool_core.testing.script import ChatRequest, ScriptEndedError
from spectool_core.testing.statistics import ServerStatistics
from spectool_core.testing.tally import Tally
from spectool_core.testing.wire import Generation, error_body

__all__ = ["ChatApp", "whole_body"]

# As at OpenAI.
_MAX_NUM_CHOICES = 128


class _RefusedError(Exception):
    """The request gets an HTTP error that no script asked for."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        self.status = status
        self.kind = kind
        super().__init__(message)


class ChatApp:
    """Answers `POST /v1/chat/completions`, `GET /v1/models` and `GET /statistics`.

    Args:
        models: the models by name.
        tally: where requests are counted.
        log: where parsed requests are kept.
    """

    def __init__(
        self, models: Mapping[str, ScriptedModel], tally: Tally[ServerStatistics], log: deque[ChatRequest]
    ) -> None:
        self._models = models
        self._tally = tally
        self._log = log
        self.drop_connection: Callable[[Scope], None] = _cannot_drop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        match scope["method"], scope["path"]:
            case "POST", "/v1/chat/completions":
                await self._chat(scope, receive, send)
            case "GET", "/v1/models":
                models = [
                    {"id": name, "object": "model", "created": 0, "owned_by": "spectool"} for name in self._models
                ]
                await send_json(send, {"object": "list", "data": models})
            case "GET", "/statistics":
                await send_json(send, dataclasses.asdict(self._tally.value))
            case method, path:
                await send_json(send, error_body(f"no route {method} {path}", "invalid_request_error"), 404)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = asyncio.get_running_loop().time()
        try:
            request = _parse(await whole_body(receive), scope)
        except (ValueError, TypeError, AttributeError) as error:
            await send_json(send, error_body(f"not a chat request: {error}", "invalid_request_error"), 400)
            return
        self._log.append(request)
        self._count(request, num_requests=1, num_active_requests=1)
        exchange = Exchange(receive, send, started_s)
        try:
            await self._answer(request, exchange, scope)
        finally:
            exchange.close()

    async def _answer(self, request: ChatRequest, exchange: Exchange, scope: Scope) -> None:
        try:
            generation = self._generate(request)
        except _RefusedError as refusal:
            self._count(request, num_active_requests=-1, num_failed_requests=1)
            await send_json(exchange.send, error_body(str(refusal), refusal.kind), refusal.status)
            return
        await self._play(generation, exchange, scope)

    async def _play(self, generation: Generation, exchange: Exchange, scope: Scope) -> None:
        request = generation.request
        read = generation.tokens_read()
        playback = Playback(generation, exchange, lambda: self.drop_connection(scope))
        try:
            await playback.run(lambda: self._count(request, num_active_requests=-1, **read, **generation.outcome()))
        except ClientGoneError:
            num_generated = generation.num_tokens_at(exchange.elapsed_s)
            self._count(
                request, num_active_requests=-1, num_cancelled_requests=1, num_completion_tokens=num_generated, **read
            )

    def _generate(self, request: ChatRequest) -> Generation:
        model = self._models.get(request.model)
        if model is None:
            raise _RefusedError(404, "model_not_found", f"no model {request.model!r}; there are {sorted(self._models)}")
        try:
            return Generation(request, model)
        except ScriptEndedError as error:
            raise _RefusedError(400, "script_ended", str(error)) from error
        except Exception as error:
            # A status that clients do not retry, so that a fault in the test's own script shows at once.
            raise _RefusedError(400, "script_failed", f"the script raised {error!r}") from error

    def _count(self, request: ChatRequest, **changes: int) -> None:
        self._tally.update(lambda statistics: statistics.plus_for(request.model, **changes))


def _parse(body: bytes, scope: Scope) -> ChatRequest:
    """Read a chat request; raises ValueError, TypeError or AttributeError where it is none."""
    fields = json.loads(body)
    num_choices = int(fields.get("n") or 1)
    if not 1 <= num_choices <= _MAX_NUM_CHOICES:
        raise ValueError(f"n={num_choices} is not 1 to {_MAX_NUM_CHOICES}")
    return ChatRequest(
        model=str(fields.get("model", "")),
        messages=[dict(message) for message in fields.get("messages", ())],
        tools=fields.get("tools") or (),
        n=num_choices,
        stream=bool(fields.get("stream")),
        body=fields,
        headers={name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
    )


async def whole_body(receive: Receive) -> bytes:
    """The body of a request."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def _cannot_drop(_scope: Scope) -> None:
    # ASGI has no way to do it: the listener that owns the sockets puts its own in.
    raise RuntimeError("only a ModelServer's own listener can drop a connection")

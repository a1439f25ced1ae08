"""The ASGI application behind `EngineServer`: turns, posts and the rule of injection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from spectool_core.testing.app import ChatApp, whole_body
from spectool_core.testing.behaviour import EngineBehaviour
from spectool_core.testing.engine_response import EngineResponse
from spectool_core.testing.exchange import ClientGoneError, Exchange, Receive, Scope, Send, response_start, send_json
from spectool_core.testing.faults import DroppedConnection, Fault, Hang, HttpError
from spectool_core.testing.script import ScriptedCall
from spectool_core.testing.wire import Generation, error_body
from spectool_core.vllm.rendering import tool_message
from spectool_core.vllm.wire import (
    DONE_EVENT,
    ID_PREFIX,
    INJECTED_EVENT,
    OUTPUTS_PATH,
    REPLY_HEADER,
    REQUEST_ID_HEADER,
    SECRET_HEADER,
    TURN_EVENT,
    TURNS_HEADER,
    WireError,
    read_tool_outputs,
    server_sent_event,
)

__all__ = ["EngineApp"]

_REGISTRATION_S = 1.0
_FROM_THE_PLUGIN = (REPLY_HEADER.encode(), b"1")


class Engine(Protocol):
    """The server that the application is of."""

    behaviour: EngineBehaviour

    def count(self, **changes: int) -> None:
        """Add to the counts."""
        ...


class EngineApp(ChatApp):
    """Answers what `ChatApp` answers, and what the plugin adds.

    Args:
        server: how the engine behaves, and where it counts.
        stock: as for `ChatApp`.
    """

    def __init__(self, server: Engine, *stock: Any) -> None:
        super().__init__(*stock)
        self._server = server
        self._responses: dict[str, EngineResponse] = {}
        self._registered = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._server.behaviour.is_installed and scope["path"].startswith(OUTPUTS_PATH):
            await self._outputs(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _play(self, generation: Generation, exchange: Exchange, scope: Scope) -> None:
        headers = generation.request.headers
        secret = headers.get(SECRET_HEADER.lower())
        asked_for = headers.get(TURNS_HEADER.lower()) is not None and secret is not None
        if not (self._server.behaviour.is_installed and asked_for) or _has_no_head(generation.fault):
            await super()._play(generation, exchange, scope)
            return
        request = generation.request
        try:
            response = self._begin(ID_PREFIX + headers[REQUEST_ID_HEADER.lower()], str(secret))
        except WireError as refusal:
            self._count(request, num_active_requests=-1, num_failed_requests=1)
            await _refuse(exchange.send, refusal)
            return
        async with self._registered:
            self._registered.notify_all()
        try:
            await exchange.send(response_start(200, b"text/event-stream", headers=[_FROM_THE_PLUGIN]))
            await self._turns(response, generation, exchange, scope)
        except ClientGoneError:
            self._count(request, num_active_requests=-1, num_cancelled_requests=1)
        else:
            ended = "num_cancelled_requests" if response.is_unwanted else "num_completed_requests"
            self._count(request, **{"num_active_requests": -1, ended: 1})
        finally:
            response.finish()

    def _begin(self, response_id: str, secret: str) -> EngineResponse:
        if not 16 <= len(secret) <= 256:
            raise WireError(422, "the secret must have 16 to 256 characters", "invalid_secret")
        known = self._responses.get(response_id)
        if known is not None and not known.is_finished:
            raise WireError(409, "a response with this id is running", "duplicate_id")
        response = self._responses[response_id] = EngineResponse(response_id, secret)
        self._server.count(num_responses=1)
        return response

    async def _turns(self, response: EngineResponse, generation: Generation, exchange: Exchange, scope: Scope) -> None:
        while True:
            generation.id = response.id if response.turn == 1 else f"{response.id}-t{response.turn}"
            if not await self._turn(generation, exchange, scope):
                return
            choice = generation.choices[0]
            ended = {"turn": response.turn, "finish_reason": choice.finish_reason}
            await _send(exchange, server_sent_event(ended, TURN_EVENT))
            outputs = await self._injectable(response, choice.calls, exchange)
            if outputs is None:
                break
            results = [tool_message(str(call.id), text) for call, text in zip(choice.calls, outputs, strict=True)]
            added = [choice.message(), *results]
            await self._tell_injected(response, choice.calls, outputs, added, exchange)
            request = generation.request
            request = replace(request, messages=[*request.messages, *added])
            generation = self._generate(request)
            response.turn += 1
            exchange.restart()
        await exchange.send({"type": "http.response.body", "body": DONE_EVENT.encode()})

    async def _turn(self, generation: Generation, exchange: Exchange, scope: Scope) -> bool:
        """Play one turn; whether it came to its end."""
        for latch in generation.latches:
            await exchange.until_open(latch)
        fault = generation.fault
        if generation.request.stream:
            pieces = [(timed.due_s, timed.chunk) for timed in generation.chunks()]
        else:
            pieces = [(generation.generation_s, generation.completion())]
        if _has_no_head(fault):
            pieces = []
        for due_s, piece in generation.sent(pieces):
            await exchange.until(due_s)
            await _send(exchange, server_sent_event(piece))
        match fault:
            case Hang():
                await exchange.forever()
            case DroppedConnection():
                self.drop_connection(scope)
                await exchange.gone()
            case None:
                return True
        return False

    async def _injectable(
        self, response: EngineResponse, calls: Sequence[ScriptedCall], exchange: Exchange
    ) -> list[str] | None:
        """The outputs of all calls of the turn, waiting for those that are pending; None to end the response."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._server.behaviour.hold_s
        has_parked = False
        while True:
            response.changed.clear()
            state, outputs = response.state_of(calls)
            if state == "cached":
                return outputs
            if state == "missing" or loop.time() >= deadline_s:
                return None
            if not has_parked:
                self._server.count(num_parked=1)
                has_parked = True
            await exchange.until_set(response.changed, deadline_s - loop.time())

    async def _tell_injected(
        self,
        response: EngineResponse,
        calls: Sequence[ScriptedCall],
        outputs: Sequence[str],
        added: list[dict[str, Any]],
        exchange: Exchange,
    ) -> None:
        behaviour = self._server.behaviour
        self._server.count(num_injected=1)
        if behaviour.before_injected is not None:
            await exchange.until_open(behaviour.before_injected)
        injected = [
            {"name": call.name, "params": json.loads(call.text), "output": output, "tool_call_id": call.id}
            for call, output in zip(calls, outputs, strict=True)
        ]
        response.injected += injected
        told = added if behaviour.injected is None else behaviour.injected(added)
        if isinstance(told, str):
            event = f"event: {INJECTED_EVENT}\ndata: {told}\n\n"
        else:
            data = {"turn": response.turn, "injected": injected, "messages": told}
            event = server_sent_event(data, INJECTED_EVENT)
        await _send(exchange, event)

    async def _outputs(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await whole_body(receive)
        response_id = scope["path"].removeprefix(OUTPUTS_PATH)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        secret = headers.get(SECRET_HEADER.lower())
        try:
            match scope["method"]:
                case "POST":
                    answer = await self._post(response_id, secret, body)
                case "GET":
                    answer = self._find(response_id, secret, may_be_finished=True).status()
                case "DELETE":
                    answer = self._end(response_id, secret)
                case method:
                    await send_json(send, error_body(f"no {method} here", "invalid_request_error"), 405)
                    return
        except WireError as refusal:
            await _refuse(send, refusal)
        else:
            await send_json(send, answer)

    async def _post(self, response_id: str, secret: str | None, body: bytes) -> dict[str, Any]:
        try:
            await self._registration(response_id)
            response = self._find(response_id, secret, may_be_finished=True)
            if (status := self._server.behaviour.post_status) is not None:
                raise WireError(status, "the behaviour of this engine", "refused")
            response = self._find(response_id, secret)
            outputs = read_tool_outputs(body)
        except WireError:
            self._server.count(num_refused_posts=1)
            raise
        kinds = [kind for output in outputs if (kind := response.take(output)) is not None]
        self._server.count(num_posts=1, **{kind: kinds.count(kind) for kind in kinds})
        return {"cached": len(kinds)}

    def _end(self, response_id: str, secret: str | None) -> dict[str, Any]:
        self._find(response_id, secret).end()
        self._server.count(num_deleted=1)
        return {"response_id": response_id, "state": "finished"}

    def _find(self, response_id: str, secret: str | None, *, may_be_finished: bool = False) -> EngineResponse:
        response = self._responses.get(response_id)
        if response is None or response.secret != secret:
            raise WireError(404, "no response with this id and secret", "unknown_response")
        if response.is_finished and not may_be_finished:
            raise WireError(409, "the response has finished", "finished")
        return response

    async def _registration(self, response_id: str) -> None:
        """Wait for the chat request, which a post may overtake, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REGISTRATION_S), self._registered:
                await self._registered.wait_for(lambda: response_id in self._responses)


def _has_no_head(fault: Fault | None) -> bool:
    """Whether the fault comes before anything of the answer."""
    if isinstance(fault, DroppedConnection | Hang):
        return fault.when == "before_headers"
    return isinstance(fault, HttpError)


async def _send(exchange: Exchange, event: str) -> None:
    await exchange.send({"type": "http.response.body", "body": event.encode(), "more_body": True})


async def _refuse(send: Send, error: WireError) -> None:
    await send_json(send, error.body(), error.status, [_FROM_THE_PLUGIN])

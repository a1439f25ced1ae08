"""The ASGI application behind `EngineServer`: turns, posts and the rule of injection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from spectool_core.testing.app import ChatApp, whole_body
from spectool_core.testing.behaviour import EngineBehaviour
from spectool_core.testing.exchange import ClientGoneError, Exchange, Receive, Scope, Send, response_start, send_json
from spectool_core.testing.faults import DroppedConnection, Fault, Hang, HttpError
from spectool_core.testing.script import ScriptedCall
from spectool_core.testing.wire import Generation, error_body
from spectool_core.vllm.wire import (
    ID_PREFIX,
    INJECTED_EVENT,
    OUTPUTS_PATH,
    REPLY_HEADER,
    REQUEST_ID_HEADER,
    SECRET_HEADER,
    TURN_EVENT,
    TURNS_HEADER,
    call_key,
)

__all__ = ["EngineApp"]

_REGISTRATION_S = 1.0


class Engine(Protocol):
    """The server that the application is of."""

    behaviour: EngineBehaviour

    def count(self, **changes: int) -> None:
        """Add to the counts."""
        ...


@dataclass(slots=True)
class _Response:
    """One response of several turns, and the outputs that were posted for it."""

    secret: str
    turn: int = 1
    is_finished: bool = False
    outputs: dict[tuple[str, int | None], Any] = field(default_factory=dict)
    pending: set[tuple[str, int | None]] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, entry: Mapping[str, Any]) -> Literal["num_outputs", "num_pending", "num_withdrawn"]:
        """Take one entry of a post; raises KeyError where a field is missing."""
        key = (call_key(entry["name"], entry.get("params", {})), entry.get("turn"))
        self.changed.set()
        self.pending.discard(key)
        if entry.get("pending"):
            self.pending.add(key)
            return "num_pending"
        if entry.get("pending") is False and "output" not in entry:
            self.outputs.pop(key, None)
            return "num_withdrawn"
        self.outputs[key] = entry["output"]
        return "num_outputs"

    def state_of(self, calls: Sequence[ScriptedCall]) -> tuple[Literal["cached", "pending", "missing"], list[Any]]:
        """Whether every call of the current turn is cached, or may still be; and the outputs."""
        outputs, waits = [], False
        for call in calls:
            keys = [(key, turn) for turn in (self.turn, None) if (key := _key_of(call)) is not None]
            cached = [self.outputs[key] for key in keys if key in self.outputs]
            if not cached and not any(key in self.pending for key in keys):
                return "missing", []
            waits = waits or not cached
            outputs += cached[:1]
        if not calls:
            return "missing", []
        return ("pending", []) if waits else ("cached", outputs)


class EngineApp(ChatApp):
    """Answers what `ChatApp` answers, and what the plugin adds.

    Args:
        server: how the engine behaves, and where it counts.
        stock: as for `ChatApp`.
    """

    def __init__(self, server: Engine, *stock: Any) -> None:
        super().__init__(*stock)
        self._server = server
        self._responses: dict[str, _Response] = {}
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
        response_id = ID_PREFIX + headers[REQUEST_ID_HEADER.lower()]
        response = self._responses[response_id] = _Response(str(secret))
        self._server.count(num_responses=1)
        async with self._registered:
            self._registered.notify_all()
        request = generation.request
        try:
            await exchange.send(response_start(200, b"text/event-stream", headers=[(REPLY_HEADER.encode(), b"1")]))
            await self._turns(response_id, response, generation, exchange, scope)
        except ClientGoneError:
            self._count(request, num_active_requests=-1, num_cancelled_requests=1)
        else:
            self._count(request, num_active_requests=-1, num_completed_requests=1)
        finally:
            response.is_finished = True

    async def _turns(
        self, response_id: str, response: _Response, generation: Generation, exchange: Exchange, scope: Scope
    ) -> None:
        while True:
            generation.id = response_id if response.turn == 1 else f"{response_id}-t{response.turn}"
            if not await self._turn(generation, exchange, scope):
                return
            choice = generation.choices[0]
            await _send(exchange, TURN_EVENT, {"turn": response.turn, "finish_reason": choice.finish_reason})
            outputs = await self._injectable(response, choice.calls, exchange)
            if outputs is None:
                break
            added = [choice.message(), *map(_tool_message, choice.calls, outputs)]
            await self._tell_injected(response, choice.calls, outputs, added, exchange)
            request = generation.request
            request = replace(request, messages=[*request.messages, *added])
            generation = self._generate(request)
            response.turn += 1
            exchange.restart()
        await exchange.send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

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
            await _send(exchange, None, piece)
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
        self, response: _Response, calls: Sequence[ScriptedCall], exchange: Exchange
    ) -> list[Any] | None:
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
        response: _Response,
        calls: Sequence[ScriptedCall],
        outputs: Sequence[Any],
        added: list[dict[str, Any]],
        exchange: Exchange,
    ) -> None:
        behaviour = self._server.behaviour
        self._server.count(num_injected=1)
        if behaviour.before_injected is not None:
            await exchange.until_open(behaviour.before_injected)
        told = added if behaviour.injected is None else behaviour.injected(added)
        injected = [
            {"name": call.name, "params": json.loads(call.text), "output": output, "tool_call_id": call.id}
            for call, output in zip(calls, outputs, strict=True)
        ]
        data = told if isinstance(told, str) else {"turn": response.turn, "injected": injected, "messages": told}
        await _send(exchange, INJECTED_EVENT, data)

    async def _outputs(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await whole_body(receive)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        response = await self._response(scope["path"].removeprefix(OUTPUTS_PATH))
        status, answer = self._handled(scope["method"], body, response, headers.get(SECRET_HEADER.lower()))
        if status != 200:
            self._server.count(num_refused_posts=1)
            answer = error_body("refused", "invalid_request_error")
        await send_json(send, answer, status)

    def _handled(self, method: str, body: bytes, response: _Response | None, secret: str | None) -> tuple[int, Any]:
        if response is None or response.secret != secret:
            return 404, None
        if method == "DELETE":
            self._server.count(num_deleted=1)
            return 200, {}
        if (status := self._server.behaviour.post_status) is not None:
            return status, None
        if response.is_finished:
            return 409, None
        try:
            kinds = [response.take(entry) for entry in json.loads(body)]
        except (ValueError, TypeError, KeyError, AttributeError):
            return 422, None
        self._server.count(num_posts=1, **{kind: kinds.count(kind) for kind in kinds})
        return 200, {"cached": len(kinds)}

    async def _response(self, response_id: str) -> _Response | None:
        # A post may overtake the chat request that it is for.
        try:
            async with asyncio.timeout(_REGISTRATION_S), self._registered:
                await self._registered.wait_for(lambda: response_id in self._responses)
        except TimeoutError:
            return None
        return self._responses[response_id]


def _has_no_head(fault: Fault | None) -> bool:
    """Whether the fault comes before anything of the answer."""
    if isinstance(fault, DroppedConnection | Hang):
        return fault.when == "before_headers"
    return isinstance(fault, HttpError)


def _key_of(call: ScriptedCall) -> str | None:
    try:
        return call_key(call.name, json.loads(call.text))
    except (TypeError, ValueError):
        return None


def _tool_message(call: ScriptedCall, output: Any) -> dict[str, Any]:
    content = output if isinstance(output, str) else json.dumps(output, separators=(",", ":"))
    return {"role": "tool", "tool_call_id": call.id, "content": content}


async def _send(exchange: Exchange, name: str | None, data: Any) -> None:
    head = b"" if name is None else f"event: {name}\n".encode()
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    body = head + b"data: " + text.encode() + b"\n\n"
    await exchange.send({"type": "http.response.body", "body": body, "more_body": True})

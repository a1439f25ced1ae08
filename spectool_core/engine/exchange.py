"""Answers a chat request of a turn: from a resident stream that went on from it, or by a request of its own."""

from __future__ import annotations

import json
import secrets
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from spectool_core.engine.chat_body import ChatBody, sent_with
from spectool_core.engine.resident_stream import Connections, Reply, ResidentStream
from spectool_core.engine.server_events import MalformedStreamError
from spectool_core.engine.steps import Steps
from spectool_core.engine.turn import EngineTurn
from spectool_core.events import StreamAbortReason
from spectool_core.vllm.wire import REPLY_HEADER, REQUEST_ID_HEADER, SECRET_HEADER, TURNS_HEADER

__all__ = ["Channel", "answer", "read_piece", "release"]

_SECRET_BYTES = 24
_STREAM_TYPE = "text/event-stream"
_PLAIN = ("", "identity")


class Channel(Protocol):
    """The HTTP library that the request came through, sync or async."""

    connections: Connections

    def can_read(self, resident: ResidentStream) -> bool:
        """Whether the resident came through the same library, sync or async."""
        ...

    def send(self, request: Any) -> Any:
        """Send as usual; a step."""
        ...

    def reply(self, response: Any, turn: EngineTurn) -> Reply:
        """The body of `response`, to be read at will."""
        ...

    def streamed(self, resident: ResidentStream, turn: EngineTurn) -> Any:
        """A response that reads the resident's turn."""
        ...

    def whole(self, resident: ResidentStream, body: bytes, status: int) -> Any:
        """A JSON response."""
        ...

    def broken(self, request: Any) -> Exception:
        """What the library raises where a server closes the connection without a reply."""
        ...


def answer(request: Any, turn: EngineTurn, channel: Channel) -> Steps[Any]:
    """Answer the model call of `turn`, which the HTTP library is about to send as `request`."""
    turn.seen()
    body = ChatBody.parse(request.content, sent_with(request))
    kept = deque(turn.engine.idle_streams.take(turn.place))
    attached: Any = None
    try:
        while kept and attached is None:
            resident = kept.popleft()
            if channel.can_read(resident):
                attached = yield from _attach(resident, body, turn, channel)
            else:
                turn.abort_stream(resident, "different_request")
                resident.abandon()
    finally:
        for resident in kept:
            turn.keep(resident)
    if attached is not None:
        return attached
    # With one connection in all, a stream that stays would be in the way of every other request.
    has_room = not channel.connections.num_too_many(1)
    if body is None or not body.can_go_on or REQUEST_ID_HEADER in request.headers or not has_room:
        return (yield partial(channel.send, request))
    return (yield from _open_stream(request, body, turn, channel))


def _attach(resident: ResidentStream, body: ChatBody | None, turn: EngineTurn, channel: Channel) -> Steps[Any]:
    """The reply to `body` from `resident`; None if it went on from something else, or has come to its end."""
    started_s = turn.loop.time()
    try:
        if body is None or not resident.body.may_become(body):
            yield from _abort(resident, turn, "different_request")
            return None
        messages = yield from resident.injected()
        if messages is None:
            return None
        continued = _continued(resident.body, messages)
        turn.injected(len(continued.messages) - len(resident.body.messages) - 1)
        if continued != body:
            yield from _abort(resident, turn, "different_request")
            return None
        waited_s = turn.loop.time() - started_s
        turn.accepted(resident.address, resident.turn + 1)
        yield from resident.begin_turn(body, turn.keep)
        response = yield from _response(resident, turn, channel)
    except MalformedStreamError:
        yield from _abort(resident, turn, "malformed")
        turn.unavailable("malformed")
        return None
    except Exception:
        yield from _abort(resident, turn, "cut")
        turn.unavailable("cut")
        return None
    except BaseException:
        yield from _abort(resident, turn, "cancelled")
        raise
    turn.attached(waited_s)
    return response


def _open_stream(request: Any, body: ChatBody, turn: EngineTurn, channel: Channel) -> Steps[Any]:
    """Send a request of its own, which the engine may go on from."""
    request_id, secret = uuid.uuid4().hex, secrets.token_urlsafe(_SECRET_BYTES)
    address = turn.engine.endpoint.address(request_id, (SECRET_HEADER, secret), request.headers.get("authorization"))
    ours = {REQUEST_ID_HEADER: request_id, SECRET_HEADER: secret, TURNS_HEADER: "1", "Accept-Encoding": "identity"}
    theirs = request.headers.copy()
    request.headers.update(ours)
    turn.opened(address, is_streamed=body.is_streamed)
    try:
        response = yield partial(channel.send, request)
    except BaseException as error:
        turn.closed("unreachable" if isinstance(error, Exception) else None)
        raise
    finally:
        request.headers = theirs  # of which the library makes the next request, where it follows a redirect
    is_refused, is_encoded = _is_refused(response), _is_encoded(response)
    if is_refused or is_encoded:
        turn.closed("malformed" if is_encoded else None)
        yield channel.reply(response, turn).close
        return (yield partial(channel.send, request))
    if response.status_code != HTTPStatus.OK:
        turn.closed()
        return response
    if REPLY_HEADER not in response.headers:
        turn.closed("plugin_absent")
        return response
    if not response.headers.get("content-type", "").startswith(_STREAM_TYPE):
        turn.closed()
        return response
    turn.accepted(address)
    resident = ResidentStream(channel.reply(response, turn), body, address, turn.keep)
    try:
        return (yield from _response(resident, turn, channel))
    except MalformedStreamError as error:
        turn.closed("malformed")
        yield from resident.close()
        raise channel.broken(request) from error
    except BaseException as error:
        turn.closed("cut" if isinstance(error, Exception) else None)
        yield from resident.close()
        raise


def _is_refused(response: Any) -> bool:
    """Whether its id is taken: something beneath sent the request twice."""
    return response.status_code == HTTPStatus.CONFLICT and REPLY_HEADER in response.headers


def _is_encoded(response: Any) -> bool:
    """Whether something on the way compressed the turns, though it was asked not to."""
    encoding = response.headers.get("content-encoding", "").lower()
    return response.status_code == HTTPStatus.OK and REPLY_HEADER in response.headers and encoding not in _PLAIN


def _response(resident: ResidentStream, turn: EngineTurn, channel: Channel) -> Steps[Any]:
    if resident.body.is_streamed:
        return channel.streamed(resident, turn)
    body = yield from resident.whole()
    return channel.whole(resident, body, _status_of(body))


def _status_of(body: bytes) -> int:
    """An error that came after the response had begun has the status that it would have had before."""
    try:
        error = json.loads(body).get("error")
    except (ValueError, AttributeError, RecursionError):
        return 200
    if not isinstance(error, dict):
        return 200
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code <= 599 else 500


def read_piece(resident: ResidentStream, turn: EngineTurn, broken: Callable[[str], Exception]) -> Steps[bytes | None]:
    """The next bytes of a streamed turn; raises what any stream raises that is cut, as `broken` makes it."""
    try:
        return (yield from resident.piece())
    except MalformedStreamError as error:
        turn.closed("malformed")
        yield from resident.give_up()
        raise broken(str(error)) from error
    except Exception:
        turn.closed("cut")
        yield from resident.give_up()
        raise


def release(resident: ResidentStream, turn: EngineTurn) -> Steps[None]:
    """The model call reads no further: the stream stays if the turn was read to its end, and else ends here."""
    if not resident.is_between_turns:
        turn.closed()
        yield from _abort(resident, turn, "cancelled")


def _abort(resident: ResidentStream, turn: EngineTurn, reason: StreamAbortReason) -> Steps[None]:
    turn.abort_stream(resident, reason)
    yield from resident.close()


def _continued(body: ChatBody, messages: list[Any]) -> ChatBody:
    try:
        return body.continued(messages)
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise MalformedStreamError("injected messages that are none") from error

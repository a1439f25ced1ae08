"""What a chat request asks, in a form in which two requests are equal when the engine would answer them alike.

Equality is strict: keys in order, 1 and 1.0 apart, since a chat template shows both to the model. Only what no template
and no sampler sees is left out, and what servers and clients write in several ways is made one: absent, null and, as
an assistant's content, empty; a text and its one part; and the white space within a call's arguments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["ChatBody", "sent_with"]

_UNSEEN = frozenset({"messages", "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"})

_CHANGING = frozenset(
    {"content-length", "idempotency-key", "x-request-id"}
    | {"traceparent", "tracestate", "baggage", "sentry-trace", "b3", "newrelic", "uber-trace-id"}
)
_CHANGING_PREFIXES = ("x-stainless-", "x-spectool-", "x-b3-", "x-datadog-")
"""Headers that differ from one request to the next whoever asks: of attempts, of traces, and our own."""


@dataclass(frozen=True, slots=True)
class ChatBody:
    """The body of a chat request.

    Args:
        settings: every parameter but the messages, each as JSON.
        messages: each message as JSON.
        roles: the messages' roles.
        is_streamed: whether the reply is to be streamed.
        can_go_on: whether the engine may go on by itself after the reply: the model may choose among tools, for one
            choice, and nothing else decides where it stops.
        sent_with: see the function of this name.
    """

    settings: Mapping[str, str]
    messages: tuple[str, ...]
    roles: tuple[str, ...]
    is_streamed: bool
    can_go_on: bool
    sent_with: bytes = b""

    @classmethod
    def parse(cls, body: bytes, sent_with: bytes = b"") -> ChatBody | None:
        """Read a request's body; None where it is none that can be compared."""
        try:
            given = json.loads(body)
            messages, roles = tuple(map(_message, given["messages"])), tuple(map(_role, given["messages"]))
            settings = {
                name: _compact(value) for name, value in given.items() if name not in _UNSEEN and value is not None
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return cls(settings, messages, roles, given.get("stream") is True, _can_go_on(given), sent_with)

    def continued(self, messages: Iterable[Any]) -> ChatBody:
        """The request that asks the same after `messages` were added.

        Raises TypeError, ValueError, KeyError or AttributeError where they are no messages.
        """
        added = list(messages)
        return replace(self, messages=(*self.messages, *map(_message, added)), roles=(*self.roles, *map(_role, added)))

    def may_become(self, later: ChatBody) -> bool:
        """Whether an answer with calls, and their results, could make this request `later`."""
        count = len(self.messages)
        added = later.roles[count:]
        return (
            len(added) > 1
            and added[0] == "assistant"
            and set(added[1:]) == {"tool"}
            and self.sent_with == later.sent_with
            and self.settings == later.settings
            and self.messages == later.messages[:count]
        )


def sent_with(request: Any) -> bytes:
    """A digest of what a request of httpx says beside its body: query, credentials and other headers."""
    headers = [(name.lower(), value) for name, value in request.headers.multi_items()]
    told = [each for each in headers if each[0] not in _CHANGING and not each[0].startswith(_CHANGING_PREFIXES)]
    return hashlib.sha256(repr((request.url.query, sorted(told))).encode("utf-8", "replace")).digest()


def _can_go_on(given: Mapping[str, Any]) -> bool:
    return (
        bool(given.get("tools"))
        and given.get("n") in (None, 1)
        and given.get("tool_choice") in (None, "auto")
        and not given.get("stop")
        and given.get("response_format") is None
        # With a seed the next answer is a certain one, which only a request that draws from the beginning gets.
        and (given.get("seed") is None or given.get("temperature") == 0)
    )


def _role(message: Any) -> str:
    return str(message.get("role"))


def _message(message: Any) -> str:
    fields = {name: value for name, value in message.items() if value is not None}
    match fields.get("content"):
        case [{"type": "text", "text": text, **others}] if not others:
            fields["content"] = text
    if fields.get("role") == "assistant":
        if fields.get("content") == "":
            del fields["content"]
        calls = fields.pop("tool_calls", None)
        if calls:
            fields["tool_calls"] = [_call(call) for call in calls]
    return json.dumps(sorted(fields.items()), separators=(",", ":"))


def _call(call: Any) -> list[Any]:
    function = call["function"]
    return [call.get("id"), call.get("type") or "function", function["name"], _arguments(function.get("arguments"))]


def _arguments(written: Any) -> str:
    if not isinstance(written, str):
        return _compact(written)
    try:
        return _compact(json.loads(written))
    except (ValueError, RecursionError):
        return written


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))

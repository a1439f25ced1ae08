"""What reaches LlamaIndex's observers: spans and events of its instrumentation, and events of its callback managers.

What is done early must not show in them before the main model asks for it, or at all if it never does. Neither
dispatchers nor callback managers let one context speak to nobody, so the methods through which both speak are
replaced, once, by ones that ask a context variable first. Outside of early work they do what they always did.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from llama_index.core.callbacks import CallbackManager
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.dispatcher import Dispatcher, active_instrument_tags, instrument_tags
from llama_index_instrumentation.event_handlers import NullEventHandler
from llama_index_instrumentation.span import active_span_id
from llama_index_instrumentation.span_handlers import NullSpanHandler

__all__ = ["ROOT_SPAN", "Emission", "Emissions", "hear_instead", "is_early", "replay"]

_UUID_AT_END = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")

ROOT_SPAN = "spectool-early-run"
"""The span in which an early run begins; a replay puts the span of the real call in its place."""


@dataclass(frozen=True, slots=True)
class Emission:
    """One call of a method that speaks to observers.

    Args:
        emit: the method itself, as it was before it was replaced.
        speaker: the dispatcher or callback manager.
        arguments: what the method was given, by name.
        tags: the instrument tags that the tool had set itself.
    """

    emit: Callable[..., Any]
    speaker: Any
    arguments: Mapping[str, Any]
    tags: Mapping[str, Any]


class Emissions:
    """Hears what is said in one context instead of the observers; keeps it if `keep`, and if anyone would hear it."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._tags: Mapping[str, Any] = active_instrument_tags.get()
        self._kept: list[Emission] = []
        self.is_closed = False
        self.obstacle: str | None = None

    def hear(self, emit: Callable[..., Any], speaker: Any, arguments: Mapping[str, Any]) -> None:
        """Take note of one call."""
        # What a callback manager without handlers is told counts too: all managers share one stack of events.
        if self._keep and (isinstance(speaker, CallbackManager) or _is_heard(speaker)):
            own = {name: tag for name, tag in active_instrument_tags.get().items() if self._tags.get(name) != tag}
            self._kept.append(Emission(emit, speaker, arguments, own))

    def refuse(self, speaker: Any) -> None:
        """Take note of what a replay could not repeat, if anyone would hear it."""
        if _is_heard(speaker):
            self.obstacle = "the tool dispatched an event with aevent"

    def close(self) -> None:
        """From now on observers hear for themselves."""
        self.is_closed = True

    def so_far(self) -> tuple[Emission, ...]:
        """What has been kept, if anyone would hear it."""
        return tuple(self._kept) if any(_is_heard(emission.speaker) for emission in self._kept) else ()


_instead: ContextVar[Emissions | None] = ContextVar("spectool_emissions", default=None)


def is_early() -> bool:
    """Whether this code is a speculator or an early run: neither is to start speculation of its own."""
    return _listener() is not None


def _listener() -> Emissions | None:
    instead = _instead.get()
    return None if instead is None or instead.is_closed else instead


def hear_instead(emissions: Emissions) -> None:
    """From now on, and in this context, `emissions` hears what observers would."""
    _instead.set(emissions)


def replay(emissions: Sequence[Emission]) -> None:
    """Say again what an early run said, as if it ran here: under this context's span and tags, with ids of its own."""
    ids: dict[str, str | None] = {ROOT_SPAN: active_span_id.get()}
    here = active_instrument_tags.get()
    for emission in emissions:
        with instrument_tags({**here, **emission.tags}):
            emission.emit(emission.speaker, **_renewed(emission.arguments, ids))


def _renewed(arguments: Mapping[str, Any], ids: dict[str, str | None]) -> dict[str, Any]:
    """The arguments for one replay: an early run may serve several calls, and each has spans of its own."""
    renewed = dict(arguments)
    for name in ("id_", "parent_id", "event_id"):
        if isinstance(known := renewed.get(name), str) and known:
            renewed[name] = _renewed_id(known, ids)
    if "tags" in renewed:
        renewed["tags"] = active_instrument_tags.get()
    event = renewed.get("event")
    if isinstance(event, BaseEvent):
        span_id = None if event.span_id is None else _renewed_id(event.span_id, ids)
        renewed["event"] = event.model_copy(update={"span_id": span_id, "tags": dict(event.tags)})
    extra = renewed.pop("kwargs", {})
    return {**renewed, **extra}


def _renewed_id(known: str, ids: dict[str, str | None]) -> str | None:
    if known not in ids:
        # Ids made by LlamaIndex are a name and a UUID; one that a tool has chosen itself stays.
        ids[known] = _UUID_AT_END.sub(lambda _: str(uuid4()), known)
    return ids[known]


def _is_heard(speaker: Any) -> bool:
    if isinstance(speaker, CallbackManager):
        return bool(speaker.handlers)
    dispatcher: Dispatcher | None = speaker
    while dispatcher is not None:
        handlers = [*dispatcher.event_handlers, *dispatcher.span_handlers]
        if not all(isinstance(handler, NullEventHandler | NullSpanHandler) for handler in handlers):
            return True
        dispatcher = dispatcher.parent if dispatcher.propagate else None
    return False


def _divert(cls: type, name: str) -> None:
    stock = inspect.getattr_static(cls, name)
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def diverted(*args: Any, **kwargs: Any) -> Any:
        instead = _listener()
        if instead is None:
            return stock(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        speaker = arguments.pop("self")
        if name == "on_event_start" and not arguments.get("event_id"):
            arguments["event_id"] = str(uuid4())
        instead.hear(stock, speaker, arguments)
        return arguments.get("event_id")  # what `on_event_start` returns; nobody reads it of the others

    setattr(cls, name, diverted)


def _divert_async_event() -> None:
    stock = Dispatcher.aevent

    @functools.wraps(stock)
    async def aevent(self: Dispatcher, *args: Any, **kwargs: Any) -> None:
        instead = _listener()
        if instead is None:
            await stock(self, *args, **kwargs)
        else:
            instead.refuse(self)  # its handlers may do other things with it than with one of `event`

    Dispatcher.aevent = aevent  # type: ignore[method-assign]


for _method in ("event", "span_enter", "span_exit", "span_drop"):
    _divert(Dispatcher, _method)
for _method in ("on_event_start", "on_event_end", "start_trace", "end_trace"):
    _divert(CallbackManager, _method)
_divert_async_event()

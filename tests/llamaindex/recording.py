"""What observers see of a run: instrumentation spans and events, and the callbacks of the older callback managers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.tools import ToolOutput
from llama_index_instrumentation import root_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler
from llama_index_instrumentation.span_handlers import BaseSpanHandler
from pydantic import BaseModel, PrivateAttr

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_UUID_LENGTH = 36

# Of instrumentation events, whose span is in the trace; and how long a failed step took, by wall time.
_NOT_COMPARED = ("id_", "timestamp", "span_id", "elapsed_seconds")


class Names:
    """Names for what stock makes at random: each id is called by the order in which it was first seen."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, random: str) -> str:
        return self._names.setdefault(random, f"<id {len(self._names)}>")

    def plain(self, value: Any) -> Any:
        """A comparable form: models field by field, with what their dumps leave out; objects by their class."""
        match value:
            case str() if len(value) < _UUID_LENGTH:
                return value
            case str():
                return _UUID.sub(lambda found: self.name(found[0]), value)
            case None | bool() | int() | float():
                return value
            case BaseException():
                return self.plain(repr(value))
            case Mapping():
                return {self.plain(key): self._item(key, item) for key, item in value.items()}
            case list() | tuple():
                return [self.plain(item) for item in value]
            case BaseModel():
                return {"type": type(value).__name__, **self._fields(value)}
        if is_dataclass(value) and not isinstance(value, type):
            return {"type": type(value).__name__, **self.plain(vars(value))}
        return value.__class__.__name__  # where `type` shows what stands in for a tool

    def _item(self, key: Any, item: Any) -> Any:
        return self.name(item) if key == "llamaindex.run_id" else self.plain(item)

    def _fields(self, value: BaseModel) -> dict[str, Any]:
        fields = {name: self.plain(getattr(value, name)) for name in type(value).model_fields}
        for name in _NOT_COMPARED:
            fields.pop(name, None)
        if isinstance(value, ToolOutput):
            fields["exception"] = self.plain(value.exception)
        if more := getattr(value, "_data", None):  # what workflow events hold beside their fields
            fields.update(self.plain(more))
        return fields


class Trace(BaseSpanHandler[Any]):
    """Every span and event, with spans named by the order in which they were first seen."""

    _log: list[tuple[Any, ...]] = PrivateAttr(default_factory=list)
    _spans: dict[str, int] = PrivateAttr(default_factory=dict)
    _names: Names = PrivateAttr(default_factory=Names)

    @property
    def log(self) -> list[tuple[Any, ...]]:
        """(what, its span, that span's parent, name, tags, payload), in order."""
        return self._log

    def note(self, what: str, span: str | None, parent: str | None, tags: Any, payload: Any) -> None:
        # The class is the one thing that a user changes.
        name = "" if span is None else _UUID.sub("", span).removeprefix("Speculative")
        plain = self._names.plain
        self._log.append((what, self._number(span), self._number(parent), name, plain(tags), plain(payload)))

    def _number(self, span: str | None) -> int | None:
        return None if span is None else self._spans.setdefault(span, len(self._spans))

    def span_enter(self, id_: str, bound_args: Any, instance: Any = None, parent_id: Any = None, **kwargs: Any) -> None:
        self.note("enter", id_, parent_id, kwargs.get("tags"), _arguments(id_, bound_args))

    def span_exit(self, id_: str, bound_args: Any, instance: Any = None, result: Any = None, **kwargs: Any) -> None:
        self.note("exit", id_, None, None, result)

    def span_drop(self, id_: str, bound_args: Any, instance: Any = None, err: Any = None, **kwargs: Any) -> None:
        self.note("drop", id_, None, None, err)

    def new_span(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("never called")

    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("never called")

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("never called")


def _arguments(id_: str, bound_args: Any) -> Any:
    # Those of a workflow's own steps and runs hold the whole workflow; the stream of events says the same.
    return [] if ".run" in id_ or "Agent" in id_.split(".")[0] else dict(bound_args.arguments)


class EventTrace(BaseEventHandler):
    """Hands instrumentation events to a `Trace`."""

    trace: Any

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.trace.note(event.class_name(), event.span_id, None, event.tags, event)


class CallbackLog(BaseCallbackHandler):
    """Every callback of the older managers, with events named by the order in which they were first seen."""

    def __init__(self) -> None:
        super().__init__([], [])
        self.log: list[tuple[Any, ...]] = []
        self._names = Names()

    def on_event_start(
        self, event_type: Any, payload: Any = None, event_id: str = "", parent_id: str = "", **kwargs: Any
    ) -> str:
        plain = self._names.plain
        self.log.append(("start", event_type.value, plain(event_id), plain(parent_id), plain(payload)))
        return event_id

    def on_event_end(self, event_type: Any, payload: Any = None, event_id: str = "", **kwargs: Any) -> None:
        plain = self._names.plain
        self.log.append(("end", event_type.value, plain(event_id), "", plain(payload)))

    def start_trace(self, trace_id: str | None = None) -> None:
        self.log.append(("trace", trace_id))

    def end_trace(self, trace_id: str | None = None, trace_map: Any = None) -> None:
        self.log.append(("trace ended", trace_id, self._names.plain(trace_map)))


@contextmanager
def recorded(managers: Sequence[CallbackManager]) -> Iterator[tuple[Trace, CallbackLog]]:
    """Watch the root dispatcher and these callback managers."""
    trace, callbacks = Trace(), CallbackLog()
    events = EventTrace(trace=trace)
    root_dispatcher.add_span_handler(trace)
    root_dispatcher.add_event_handler(events)
    distinct = {id(manager): manager for manager in managers}.values()
    for manager in distinct:
        manager.add_handler(callbacks)
    try:
        yield trace, callbacks
    finally:
        root_dispatcher.span_handlers = [each for each in root_dispatcher.span_handlers if each is not trace]
        root_dispatcher.event_handlers = [each for each in root_dispatcher.event_handlers if each is not events]
        for manager in distinct:
            manager.remove_handler(callbacks)


def per_span(trace: Sequence[tuple[Any, ...]]) -> Counter[Any]:
    """A trace grouped by span, as a multiset: each span's own events in order, with the path of its parents.

    Without the summaries of what steps were given, in which the order of results shows, and without the collecting of
    results that are not complete, which is done once more where two come at one moment.
    """
    paths: dict[int | None, tuple[str, ...]] = {None: ()}
    groups: dict[int | None, list[Any]] = {}
    for what, span, parent, name, tags, payload in trace:
        if what == "enter":
            paths[span] = (*paths.get(parent, ("?",)), name)
        groups.setdefault(span, []).append((what, repr(without_order(tags)), repr(without_order(payload))))
    spans = [(paths.get(span, ("?",)), tuple(events)) for span, events in groups.items()]
    return Counter(span for span in spans if not _is_collecting(*span))


def per_event(callbacks: Sequence[tuple[Any, ...]]) -> Counter[Any]:
    """Callbacks as a multiset, without ids and traces, which a manager mixes up where two events overlap."""
    return Counter((entry[0], entry[1], repr(without_order(entry[-1]))) for entry in callbacks if len(entry) > 3)


def _is_collecting(path: tuple[str, ...], events: tuple[Any, ...]) -> bool:
    return path[-1:] and path[-1].endswith(".aggregate_tool_results-") and events[-1] == ("exit", "None", "None")


def without_order(value: Any) -> Any:
    """The same with the results of tools sorted, which stock puts in the order in which the tools were done."""
    match value:
        case dict():
            return {key: without_order(item) for key, item in value.items() if key not in _SHOWS_ORDER}
        case list() | tuple():
            items = [without_order(item) for item in value]
            results = iter(sorted(filter(_is_tool_result, items), key=repr))
            return [next(results) if _is_tool_result(item) else item for item in items]
    return value


# Texts of values that are compared as well, and counters of the workflow's steps: it takes one more where the results
# of two calls come at one moment.
_SHOWS_ORDER = {"llamaindex.step.input_summary", "output", "journal_seq", "invocation_seq", "work_item_seq"}


def _is_tool_result(value: Any) -> bool:
    match value:
        case {"value": dict() as inner}:  # as a context serializes models
            return _is_tool_result(inner)
        case {"role": "tool"} | {"tool_output": _}:
            return True
    return False

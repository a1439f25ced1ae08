"""What a tool returned and emitted while it ran early, kept so that a hit can hand it out again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langgraph.types import Command

from spectool_core.early import check_reusable, copied
from spectool_core.runs import NotReplayable

__all__ = ["CustomEvent", "Emission", "Recorded", "Recorder", "StreamChunk"]


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """A value that the tool wrote to the graph's custom stream."""

    value: Any

    def copied(self) -> StreamChunk:
        """The same chunk with a value of its own."""
        return StreamChunk(copied(self.value))


@dataclass(frozen=True, slots=True)
class CustomEvent:
    """A callback event that the tool dispatched.

    Args:
        name: the event's name.
        data: its payload.
        of_caller: dispatched through the config that the tool was handed, whose run is the tool's caller; else it
            belongs to the tool's own run.
    """

    name: str
    data: Any
    of_caller: bool

    def copied(self) -> CustomEvent:
        """The same event with a payload of its own."""
        return CustomEvent(self.name, copied(self.data), self.of_caller)


Emission: TypeAlias = StreamChunk | CustomEvent


@dataclass(frozen=True, slots=True)
class Recorded:
    """The raw value that a tool's own code returned, and what it emitted on the way, in order."""

    value: Any
    emissions: tuple[Emission, ...] = ()

    def copied(self) -> Recorded:
        """One to give away: nothing done to it shows in this one. Raises NotReplayable."""
        return Recorded(copied(self.value), tuple(emission.copied() for emission in self.emissions))


class Recorder(BaseCallbackHandler):
    """The only callback handler and stream writer of an early run.

    What it cannot record it refuses: the run fails on the spot, and its result is refused as well in case the tool
    swallows that error.
    """

    raise_error = True
    run_inline = True

    def __init__(self) -> None:
        self._emissions: list[Emission] = []
        self._obstacle: str | None = None
        self._caller: UUID | None = None
        self._tags: frozenset[str] = frozenset()
        self._metadata: Mapping[str, Any] = {}

    def expect(self, *, caller: UUID, tags: frozenset[str], metadata: Mapping[str, Any]) -> None:
        """Events come from the run `caller` or the tool's own, under the run's `tags` and `metadata`."""
        self._caller, self._tags, self._metadata = caller, tags, metadata

    def write(self, chunk: Any) -> None:
        """Record a chunk for the custom stream; has the signature of LangGraph's stream writer."""
        self._keep(StreamChunk(chunk))

    def on_custom_event(
        self,
        name: str,
        data: Any,
        *,
        run_id: UUID,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Record an event."""
        if frozenset(tags or ()) != self._tags or (metadata or {}) != self._metadata:
            self.refuse("dispatched an event under tags or metadata of its own")
        self._keep(CustomEvent(name, data, of_caller=run_id == self._caller))

    def _nested(self, *_: Any, **__: Any) -> Any:
        self.refuse("started a model, chain, tool or retriever that callbacks should see")

    on_llm_start = on_chat_model_start = on_chain_start = on_tool_start = on_retriever_start = _nested
    on_text = on_retry = on_agent_action = on_agent_finish = _nested

    def refuse(self, deed: str) -> NoReturn:
        """Fail the run because the tool did what no hit can repeat. Raises NotReplayable."""
        self._obstacle = f"the tool {deed}"
        raise NotReplayable(self._obstacle)

    def recorded(self, value: object) -> Recorded:
        """What to keep of a run that returned `value`. Raises NotReplayable."""
        if self._obstacle is not None:
            raise NotReplayable(self._obstacle)
        parts = [value, *value] if isinstance(value, tuple | list) else [value]
        for part in parts:
            _check_reusable(part)
        return Recorded(copied(value), tuple(self._emissions))

    def _keep(self, emission: Emission) -> None:
        try:
            self._emissions.append(emission.copied())
        except NotReplayable:
            self.refuse("emitted something that cannot be copied")


def _check_reusable(part: Any) -> None:
    if isinstance(part, Command):
        raise NotReplayable("the tool returned a Command")
    check_reusable(part)

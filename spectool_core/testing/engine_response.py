"""One response of a fake engine: what was posted for it, and whether its turn can be gone on from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from spectool_core.testing.script import ScriptedCall
from spectool_core.vllm.wire import ToolOutput, call_key, output_text

__all__ = ["EngineResponse"]


@dataclass(slots=True)
class EngineResponse:
    """One response of several turns.

    Args:
        id: the response id.
        secret: of the chat request; whoever posts must know it.
    """

    id: str
    secret: str
    turn: int = 1
    is_finished: bool = False
    is_unwanted: bool = False
    entries: dict[tuple[int | None, str], ToolOutput] = field(default_factory=dict)
    injected: list[dict[str, Any]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, output: ToolOutput) -> Literal["num_outputs", "num_pending", "num_withdrawn"] | None:
        """Take one entry of a post; None where it changes nothing, as an output that is there stays what it is."""
        place = (output.turn, call_key(output.name, output.params))
        known = self.entries.get(place)
        if known is not None and not known.pending:
            return None
        if output.is_withdrawn and known is None:
            return None
        self.changed.set()
        if output.is_withdrawn:
            del self.entries[place]
            return "num_withdrawn"
        self.entries[place] = output
        return "num_pending" if output.pending else "num_outputs"

    def end(self) -> None:
        """Its client wants no further turn."""
        self.is_unwanted = True
        self.changed.set()

    def finish(self) -> None:
        """The response has ended; what became of it is remembered."""
        self.is_finished = True
        self.entries.clear()

    def state_of(self, calls: Sequence[ScriptedCall]) -> tuple[Literal["cached", "pending", "missing"], list[str]]:
        """Whether every call of the current turn is cached, or may still be; and the outputs' texts."""
        entries = [entry for call in calls if (entry := self._entry_for(call)) is not None]
        if not calls or len(entries) < len(calls) or self.is_unwanted:
            return "missing", []
        if any(entry.pending for entry in entries):
            return "pending", []
        return "cached", [output_text(entry.output) for entry in entries]

    def _entry_for(self, call: ScriptedCall) -> ToolOutput | None:
        try:
            key = call_key(call.name, json.loads(call.text))
        except (TypeError, ValueError):
            return None
        return self.entries.get((self.turn, key)) or self.entries.get((None, key))

    def status(self) -> dict[str, Any]:
        """What `GET` says."""
        return {
            "response_id": self.id,
            "state": "finished" if self.is_finished else "running",
            "turn": self.turn,
            "entries": [
                {
                    "name": entry.name,
                    "params": entry.params,
                    "state": "pending" if entry.pending else "cached",
                    "turn": entry.turn,
                }
                for entry in self.entries.values()
            ],
            "injected": self.injected,
            "refused": [],
        }

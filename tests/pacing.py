"""Engine mode in order, without waits on the clock: answers held back until their turn's outputs have been posted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from spectool_core import Speculation
from spectool_core.calls import ToolCall
from spectool_core.events import Event, OutputsPosted, SpeculatorFinished
from spectool_core.testing import Answer, EngineServer, Latch, ScriptedCall
from tests.guessing import Guess, GuessingSpeculator


def asks(*queries: str, text: str = "", name: str = "lookup") -> Answer:
    return Answer(text=text, tool_calls=[ScriptedCall(name, {"q": query}, f"call_{query}") for query in queries])


FINAL = Answer(text="all is said and done, and this is what was found")
ANSWERS = [asks("a", text="first"), asks("b"), FINAL]
GUESSES = [["a"], ["b"]]


class Pace:
    """Holds each answer back until what was guessed for its turn has been posted, and records events."""

    def __init__(self, answers: Sequence[Answer], guesses: Sequence[Sequence[str]], *, is_held: bool) -> None:
        self.latches = [Latch() for _ in answers]
        self.events: list[Event] = []
        self._left = [len(set(guessed)) for guessed in guesses] + [0] * len(answers)
        self.script = [
            Answer(text=a.text, tool_calls=a.tool_calls, fault=a.fault, latch=latch)
            for a, latch in zip(answers, self.latches, strict=True)
        ]
        if not is_held:
            self.open()

    def open(self) -> None:
        for latch in self.latches:
            latch.open()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        turn = getattr(event, "turn", 0) - 1
        if isinstance(event, OutputsPosted):
            self._left[turn] -= event.num_outputs
        if isinstance(event, OutputsPosted | SpeculatorFinished) and self._left[turn] <= 0:
            self.latches[min(turn, len(self.latches) - 1)].open()

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def speculation_of(server: EngineServer, guesses: Sequence[Sequence[str]], *hooks: Any, **settings: Any) -> Speculation:
    said = [Guess(tuple(ToolCall("lookup", {"q": q}) for q in guessed), after_s=0) for guessed in guesses]
    engine = {"engine": "vllm", "engine_url": server.base_url, "adaptive": False}
    return Speculation([GuessingSpeculator(said)], hooks=hooks, **(engine | settings))


async def quiet(speculation: Speculation) -> None:
    """No stream is left, and nothing is being posted."""
    if speculation.engine is not None:
        assert len(speculation.engine.idle_streams) == 0
        while speculation.engine.num_background_tasks:
            await asyncio.sleep(0.001)


def named(seen: Any) -> str:
    """Without the ids of responses, which servers draw, but with which is which."""
    names: dict[str, str] = {}
    text = re.sub(r"'created': \d+", "'created': 0", repr(seen))
    return re.sub(
        r"chatcmpl-[0-9a-f]+(-t\d+)?", lambda found: names.setdefault(found[0], f"response {len(names)}"), text
    )

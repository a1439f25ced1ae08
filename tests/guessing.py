"""What scripted models and speculators say, and a speculator that says it: for the tests of either framework."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from spectool_core import Speculation
from spectool_core.calls import Prompt, ToolCall, ToolSchema


@dataclass(frozen=True)
class Call:
    """One scripted call."""

    name: str
    args: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Reply:
    """One answer of the main model."""

    calls: tuple[Call, ...] = ()
    text: str = ""
    generation_s: float = 1.0
    error: Exception | None = None


@dataclass
class Guess:
    """What a speculator says in one turn: calls after `after_s`; an exception instead; None never ends."""

    calls: tuple[ToolCall, ...] = ()
    after_s: float | None = 0.25
    error: Exception | None = None


class GuessingSpeculator:
    """Says what the script says, by the number of assistant messages in the prompt."""

    def __init__(self, guesses: Sequence[Guess], name: str = "guessing") -> None:
        self.name = name
        self.guesses = guesses
        self.prompts: list[Prompt] = []
        self.tools: list[Sequence[ToolSchema]] = []
        self.num_cancelled = 0

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        self.prompts.append(prompt)
        self.tools.append(tools)
        turn = sum(message["role"] == "assistant" for message in prompt.messages)
        guess = self.guesses[turn] if turn < len(self.guesses) else Guess()
        try:
            if guess.after_s is None:
                await asyncio.get_running_loop().create_future()
            elif guess.after_s:
                await asyncio.sleep(guess.after_s)
            if guess.error is not None:
                raise guess.error
            for call in guess.calls:
                yield call
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


def predicting(
    replies: Sequence[Reply], *, after_s: float | None = 0.25, also: Sequence[Any] = (), **settings: Any
) -> Speculation:
    """One speculator that says what the main model will say; `also` are further speculators."""
    guesses = [Guess(tuple(ToolCall(call.name, call.args) for call in reply.calls), after_s) for reply in replies]
    return Speculation([GuessingSpeculator(guesses), *also], **settings)


def prompts_of(speculation: Speculation) -> list[list[tuple[str, str]]]:
    """What its first speculator has been asked: (role, content) of each message, for each request."""
    (speculator, *_) = speculation.speculators
    assert isinstance(speculator, GuessingSpeculator)
    return [[(message["role"], message["content"]) for message in prompt.messages] for prompt in speculator.prompts]


def outcomes(speculation: Speculation, name: str | None = None) -> tuple[int, int, int]:
    """Hits, joins and misses, of one tool or all."""
    statistics = speculation.statistics()
    counts = statistics.total if name is None else statistics.tools[name]
    return counts.num_hits, counts.num_joins, counts.num_misses

"""Recorded conversations of an airline's agent (tau-bench): what a speculator would have predicted in them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectool_core.calls import Message, ToolCall
from spectool_core.speculators import Prediction

__all__ = ["AIRLINE", "Airline", "Answered", "Episode", "Scores", "same_call", "splits"]

AIRLINE = Path(__file__).parents[2] / "shared" / "data" / "tau_airline"
"""Where the episodes are, beside the repository."""


@dataclass(frozen=True)
class Episode:
    """One conversation, which begins with the system message."""

    task: int
    trial: int
    messages: Sequence[Message]

    def prompts(self) -> Iterator[tuple[Sequence[Message], ToolCall | None]]:
        """Each prompt and the call in the recorded answer to it, which holds one at most."""
        for position, message in enumerate(self.messages):
            if message["role"] == "assistant":
                asked = message.get("tool_calls") or [None]
                yield self.messages[:position], _call(asked[0])


@dataclass(frozen=True)
class Airline:
    """All episodes, the tools, and the names of those that change nothing."""

    episodes: Sequence[Episode]
    tools: Sequence[Mapping[str, Any]]
    read_only: frozenset[str]

    @classmethod
    def load(cls, folder: Path = AIRLINE) -> Airline:
        """Read the files of `folder`."""
        system = {"role": "system", "content": (folder / "system_prompt.md").read_text(encoding="utf-8")}
        tools = json.loads((folder / "tools.json").read_text(encoding="utf-8"))
        episodes = []
        for line in (folder / "episodes.jsonl").read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            episodes.append(Episode(entry["task_id"], entry["trial"], [system, *entry["messages"]]))
        read_only = frozenset(tool["function"]["name"] for tool in tools if tool["x_read_only"])
        return cls(episodes, [{"type": "function", "function": tool["function"]} for tool in tools], read_only)


def splits(airline: Airline, num_seeds: int) -> Iterator[tuple[list[Episode], list[Episode]]]:
    """Two for each seed: the episodes of one half of the tasks, shuffled, to learn from, and those of the other half.

    Each half is learned from once, so that every task is tested as often as any other.
    """
    tasks = sorted({episode.task for episode in airline.episodes})
    for seed in range(num_seeds):
        draw = random.Random(seed)
        half = set(draw.sample(tasks, len(tasks) // 2))
        for learned in (half, set(tasks) - half):
            known = [episode for episode in airline.episodes if episode.task in learned]
            draw.shuffle(known)
            yield known, [episode for episode in airline.episodes if episode.task not in learned]


@dataclass(frozen=True)
class Answered:
    """What was predicted of one answer: calls of read-only tools, the most probable first, and the recorded call."""

    predictions: Sequence[Prediction]
    call: ToolCall | None


class Scores:
    """How often predictions were right."""

    def __init__(self, answered: Sequence[Answered], read_only: frozenset[str]) -> None:
        self._answered = answered
        self._reads = [each for each in answered if each.call is not None and each.call.name in read_only]

    def top(self, num: int) -> float:
        """The share of read-only calls that were among the first `num` predictions."""
        right = [any(same_call(each.call, guess) for guess in each.predictions[:num]) for each in self._reads]
        return sum(right) / len(right)

    def likely(self, least: float, most: float = 1.0) -> list[tuple[float, bool]]:
        """Predictions of a probability from `least` to `most`, at any answer, and whether they were right."""
        return [
            (guess.probability, same_call(each.call, guess))
            for each in self._answered
            for guess in each.predictions
            if least <= guess.probability <= most
        ]

    def precision(self, threshold: float) -> float:
        """The share that was right of the predictions of at least this probability."""
        likely = self.likely(threshold)
        return sum(right for _, right in likely) / len(likely) if likely else 1.0

    def coverage(self, threshold: float) -> float:
        """The share of read-only calls that were predicted with at least this probability."""
        return sum(right for _, right in self.likely(threshold)) / len(self._reads)


def same_call(call: ToolCall | None, guess: ToolCall) -> bool:
    """Whether name and canonical JSON arguments are equal."""
    return call is not None and call.name == guess.name and _canonical(call) == _canonical(guess)


def _canonical(call: ToolCall) -> str:
    return json.dumps(call.arguments, sort_keys=True)


def _call(asked: Mapping[str, Any] | None) -> ToolCall | None:
    if asked is None:
        return None
    return ToolCall(asked["function"]["name"], json.loads(asked["function"]["arguments"]), asked["id"])

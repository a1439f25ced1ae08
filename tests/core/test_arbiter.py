"""Several speculators under one budget, on recorded conversations of an airline's agent: together they hit more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.episodes import AIRLINE, Airline, Episode, splits
from benchmarks.history import learned
from spectool_core import HistorySpeculator, RunContext, Speculation
from spectool_core.annotation import ToolPolicy
from spectool_core.calls import Message, Prompt, ToolCall, ToolSchema
from spectool_core.canonical import CallKey, canonicalize
from spectool_core.runs import PreparedCall, Scope
from spectool_core.testing import run_virtual

pytestmark = pytest.mark.skipif(not AIRLINE.is_dir(), reason=f"no recorded episodes at {AIRLINE}")

GENERATION_S, SPECULATOR_S, TOOL_S = 2.0, 0.5, 1.0


class RecordedTools:
    """The tools of one episode: those that change nothing are marked, and take their time."""

    def __init__(self, read_only: frozenset[str]) -> None:
        self._tools = {name: object() for name in read_only}
        self.num_runs = 0

    def policy(self, name: str) -> ToolPolicy | None:
        return ToolPolicy() if name in self._tools else None

    def prepare(self, call: ToolCall, scope: Scope) -> PreparedCall:
        key = CallKey(self._tools[call.name], scope, canonicalize(call.arguments))
        return PreparedCall(call, key, scope, ToolPolicy(), self._run, blocking=False)

    async def _run(self) -> str:
        self.num_runs += 1
        await asyncio.sleep(TOOL_S)
        return "output"


class AnotherTrial:
    """Predicts what the same model did in another trial of the task, at the same point: after the same calls, and as
    many answers in text since."""

    name = "model"

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self._answers: dict[tuple[int, int], dict[str, ToolCall | None]] = {
            (each.task, each.trial): {point(messages): call for messages, call in each.prompts()} for each in episodes
        }

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        await asyncio.sleep(SPECULATOR_S)
        task, trial = prompt.native
        call = self._answers[task, (trial + 1) % 4].get(point(prompt.messages))
        if call is not None:
            yield call


def point(messages: Sequence[Message]) -> str:
    calls: list[Any] = []
    num_texts = 0
    for message in messages:
        if message["role"] == "assistant":
            asked = [call["function"] for call in message.get("tool_calls") or ()]
            calls += [(call["name"], json.loads(call["arguments"])) for call in asked]
            num_texts = 0 if asked else num_texts + 1
    return json.dumps([calls, num_texts], sort_keys=True)


@dataclass(frozen=True)
class Outcome:
    acceptance_rate: float
    runs_per_turn: float


def played(airline: Airline, episodes: Sequence[Episode], speculators: Sequence[Any]) -> Outcome:
    """Each episode once more, turn by turn, as recorded."""
    num_turns = num_calls = num_hits = num_runs = 0

    async def main() -> None:
        nonlocal num_turns, num_calls, num_hits, num_runs
        speculation = Speculation(speculators)
        for episode in episodes:
            toolbox = RecordedTools(airline.read_only)
            context = RunContext(run=(episode.task, episode.trial))
            for messages, call in episode.prompts():
                num_turns += 1
                prompt = Prompt(messages, native=(episode.task, episode.trial))
                turn = speculation.start_turn(prompt, airline.tools, toolbox, context, loop=asyncio.get_running_loop())
                await asyncio.sleep(GENERATION_S)
                turn.answer([call] if call is not None else [])
                if call is not None and call.name in airline.read_only:
                    num_calls += 1
                    num_hits += (await turn.claim(call)).outcome != "miss"
                turn.settle()
            num_runs += toolbox.num_runs
        speculation.close()

    run_virtual(main)
    return Outcome(num_hits / num_calls, num_runs / num_turns)


@pytest.mark.timeout(240)
def test_model_and_history_together_hit_more_than_either_alone(tmp_path: Path) -> None:
    airline = Airline.load()
    known, unknown = next(splits(airline, 1))
    path = tmp_path / "history.jsonl"
    learned(airline, path, known)
    half = [episode for episode in unknown if episode.trial < 2]
    model = played(airline, half, [AnotherTrial(unknown)])
    history = played(airline, half, [HistorySpeculator(path=path, tools=airline.read_only)])
    both = played(airline, half, [AnotherTrial(unknown), HistorySpeculator(path=path, tools=airline.read_only)])
    assert both.acceptance_rate > max(model.acceptance_rate, history.acceptance_rate) + 0.05
    assert both.runs_per_turn <= 1.5

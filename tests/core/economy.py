"""An agent whose turns take the time that the theory says, for the gate to decide about: no event loop, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spectool_core.appraisal import Appraisal, Predicted, Traits, TurnRecord
from spectool_core.load import Load

AGENT = ("tool",)
CPU_S = 0.001


@dataclass(frozen=True)
class Cell:
    """The conditions of a turn; `slowdown` is the share by which the main model is slower beside the speculator."""

    tool_s: float
    generation_s: float
    speculator_share: float
    acceptance: float
    slowdown: float = 0.0

    def turn_s(self, *, asked: bool, right: bool) -> float:
        if not asked:
            return self.generation_s + self.tool_s
        generation_s = self.generation_s * (1 + self.slowdown)
        speculator_s = self.generation_s * self.speculator_share
        if right and speculator_s < generation_s:
            return max(generation_s, speculator_s + self.tool_s) + CPU_S
        return generation_s + self.tool_s + CPU_S

    def to(self, **changed: float) -> Cell:
        return replace(self, **changed)


class Gated:
    """Turns of one agent and one speculator, decided by an `Appraisal`."""

    def __init__(self, traits: Traits | None = None, load: Load | None = None) -> None:
        self.appraisal = Appraisal()
        self.traits = traits or Traits(cpu_s=CPU_S)
        self.load = load or Load()
        self.reasons: list[str | None] = []

    def turn(self, cell: Cell, *, right: bool) -> float:
        reason = self.appraisal.reason_not_to_ask(AGENT, "s", self.traits, self.load)
        self.reasons.append(reason)
        asked = reason is None
        generation_s = cell.generation_s * (1 + cell.slowdown * asked)
        speculator_s = cell.generation_s * cell.speculator_share
        in_time = asked and speculator_s < generation_s
        predictions = [Predicted("s", "tool", speculator_s, right)] if in_time else []
        record = TurnRecord(AGENT, ("s",), ("s",) if asked else (), generation_s, predictions)
        self.appraisal.observe_turn(record)
        self.appraisal.observe_tool("tool", cell.tool_s)
        return cell.turn_s(asked=asked, right=right)


def regrets(cells: Sequence[Cell], *, num_turns: int = 200, skip: int = 50, seed: int = 0) -> list[float]:
    """For each of the conditions in turn: by which share the gate was slower than the better of always and never."""
    gated, luck = Gated(), random.Random(seed)
    shares = []
    for cell in cells:
        outcomes = [luck.random() < cell.acceptance for _ in range(num_turns)]
        times_s = [gated.turn(cell, right=right) for right in outcomes]
        always = sum(cell.turn_s(asked=True, right=right) for right in outcomes[skip:])
        never = sum(cell.turn_s(asked=False, right=right) for right in outcomes[skip:])
        best = min(always, never)
        shares.append(sum(times_s[skip:]) / best - 1 if best else 0.0)
    return shares


def mean_regrets(cells: Sequence[Cell], *, num_seeds: int = 3) -> list[float]:
    """The same over several runs of luck."""
    runs = [regrets(cells, seed=seed) for seed in range(num_seeds)]
    return [sum(each) / num_seeds for each in zip(*runs, strict=True)]


def worst(cells: Sequence[Sequence[Cell]], regret: Callable[[Sequence[Cell]], float]) -> tuple[float, Sequence[Cell]]:
    """The greatest regret and where it was."""
    return max(((regret(each), each) for each in cells), key=lambda found: found[0])

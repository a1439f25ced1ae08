"""The gate's judgement, over the whole matrix of conditions: never much slower than the better of always and never."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from spectool_core import HistorySpeculator
from spectool_core.appraisal import Traits
from spectool_core.load import Load
from spectool_core.model import cycle_time
from tests.core.economy import AGENT, Cell, Gated, mean_regrets, regrets

TOOL_S = (0, 0.05, 0.1, 0.5, 1, 2, 3)
GENERATION_S = (0.1, 0.3, 1, 2, 6)
SPECULATOR_SHARE = (0.1, 0.5, 1, 2)
ACCEPTANCE = (0, 0.2, 0.5, 0.8, 1)
MATRIX = [Cell(*each) for each in itertools.product(TOOL_S, GENERATION_S, SPECULATOR_SHARE, ACCEPTANCE)]
MAX_REGRET = 0.02


def test_no_cell_of_the_matrix_is_regretted() -> None:
    assert [cell for cell in MATRIX if mean_regrets([cell])[0] > MAX_REGRET] == []


@pytest.mark.parametrize(
    ("name", "values"), [("acceptance", ACCEPTANCE), ("generation_s", GENERATION_S), ("tool_s", TOOL_S)]
)
def test_no_jump_is_regretted(name: str, values: tuple[float, ...]) -> None:
    """Fifty turns after what has changed: each cell jumps to one of its neighbours in this dimension."""
    regretted = []
    for number, cell in enumerate(MATRIX):
        at = values.index(getattr(cell, name))
        to = values[(at + 1 + number % (len(values) - 1)) % len(values)]
        if regrets([cell, cell.to(**{name: to})])[1] > MAX_REGRET:
            regretted.append((cell, to))
    assert regretted == []


def test_a_speculator_that_begins_to_be_right_is_noticed() -> None:
    for tool_s, generation_s in itertools.product((0.5, 2), (0.3, 1, 2)):
        cell = Cell(tool_s, generation_s, 0.1, 0)
        assert mean_regrets([cell, cell.to(acceptance=0.2)], num_seeds=6)[1] <= MAX_REGRET


def test_a_model_that_is_slowed_down_is_seen_to_be() -> None:
    """Where both share a GPU, say. Near the point where it hardly matters luck decides; so the mean is judged."""
    shared = [cell.to(slowdown=slowdown) for cell in MATRIX[::7] for slowdown in (0.1, 0.3)]
    each = [mean_regrets([cell])[0] for cell in shared]
    assert sum(each) / len(each) < 0.005
    assert max(each) < 0.04
    hopeless = Cell(0.1, 2, 0.5, 0.5, slowdown=0.3)
    gated = Gated()
    for turn in range(200):
        gated.turn(hopeless, right=turn % 2 == 0)
    held = gated.appraisal.assess(AGENT, "s", gated.traits, gated.load)
    assert not held.on
    assert held.slowdown == pytest.approx(0.3)
    assert "longer" in held.reason
    assert gated.reasons[100:].count(None) <= 10


def test_the_first_turns_are_asked_without_a_question() -> None:
    gated = Gated()
    for _ in range(8):
        gated.turn(Cell(0, 1, 0.1, 0), right=False)
    assert gated.reasons == [None] * 8
    gated.turn(Cell(0, 1, 0.1, 0), right=False)
    assert gated.reasons[-1] == "no_gain"


def test_what_never_gains_is_asked_in_one_turn_of_six_at_most() -> None:
    gated = Gated()
    for _ in range(608):
        gated.turn(Cell(1, 1, 2, 1), right=True)
    assert Counter(gated.reasons[8:])[None] <= 100


def test_turns_without_it_grow_rare_where_they_find_nothing() -> None:
    gated = Gated()
    for _ in range(1000):
        gated.turn(Cell(1, 1, 0.1, 1), right=True)
    at = [turn for turn, reason in enumerate(gated.reasons) if reason == "control"]
    assert len(at) <= 9
    assert at[:3] == [11, 15, 19]
    assert gated.reasons.count("no_gain") == 0


def test_one_that_uses_no_model_is_not_compared() -> None:
    gated = Gated(Traits(cpu_s=0.0001, uses_model=False))
    for _ in range(500):
        gated.turn(Cell(1, 1, 0.1, 1), right=True)
    assert gated.reasons == [None] * 500


@pytest.mark.parametrize(("num_first_turns", "num_asked"), [(8, 8), (100, 100)])
def test_one_that_has_to_learn_first_says_how_long_it_is_asked(num_first_turns: int, num_asked: int) -> None:
    gated = Gated(Traits(cpu_s=0.001, uses_model=False, num_first_turns=num_first_turns))
    for _ in range(200):
        gated.turn(Cell(1, 1, 0.001, 0), right=False)
    assert gated.reasons[:num_asked] == [None] * num_asked
    assert gated.reasons[num_asked] is not None


def test_one_that_has_learned_goes_on_to_be_asked() -> None:
    gated = Gated(Traits.of(HistorySpeculator()))
    for turn in range(300):
        gated.turn(Cell(1, 1, 0.001, 1), right=turn > 60)
    assert gated.reasons == [None] * 300


def test_before_there_is_evidence_nothing_is_held() -> None:
    gated = Gated()
    held = gated.appraisal.assess(AGENT, "s", gated.traits, gated.load)
    assert held.on
    assert (held.gain_s, held.generation_s, held.speculator_s) == (None, None, None)
    assert held.reason == "not enough turns yet"


def test_what_is_held_is_what_was_seen() -> None:
    gated = Gated()
    for _ in range(100):
        gated.turn(Cell(0.5, 2, 0.25, 1), right=True)
    held = gated.appraisal.assess(AGENT, "s", gated.traits, gated.load)
    assert held.generation_s == pytest.approx(2)
    assert held.speculator_s == pytest.approx(0.5)
    assert held.tool_s == {"tool": pytest.approx(0.5)}
    assert held.acceptance["tool"] > 0.95
    assert held.gain_s == pytest.approx(0.5, rel=0.05)
    assert held.slowdown == 0


def test_the_same_turns_lead_to_the_same_decisions() -> None:
    one, other = Gated(), Gated()
    for turn in range(300):
        for gated in (one, other):
            gated.turn(Cell(0.5, 1, 0.5, 0.5, slowdown=0.1), right=turn % 3 == 0)
    assert one.reasons == other.reasons


# Load


def test_a_saturated_loop_has_no_room_for_speculation() -> None:
    """Thirty-two agents at four milliseconds a turn: what is saved waiting is not saved, what is computed is."""
    cell = Cell(0.05, 0.05, 0.1, 1)
    idle, busy = Gated(load=Load(1, 0.004)), Gated(load=Load(32, 0.004))
    for _ in range(100):
        idle.turn(cell, right=True)
        busy.turn(cell, right=True)
    assert idle.reasons.count("no_gain") == 0
    assert busy.reasons[8:].count("no_gain") > 70


def test_a_busy_loop_with_slow_tools_has_room() -> None:
    gated = Gated(load=Load(32, 0.004))
    for _ in range(100):
        gated.turn(Cell(1, 1, 0.1, 1), right=True)
    assert gated.reasons.count("no_gain") == 0


def test_the_cycle_time_has_the_limits_that_it_should_have() -> None:
    assert cycle_time(1, cpu_s=0.01, wait_s=1) == pytest.approx(1.01)
    assert cycle_time(1000, cpu_s=0.01, wait_s=1) == pytest.approx(10, rel=0.01)
    assert cycle_time(4, cpu_s=0, wait_s=1) == 1
    assert cycle_time(4, cpu_s=0.5, wait_s=0) == pytest.approx(2)
    times = [cycle_time(agents, cpu_s=0.01, wait_s=1) for agents in range(1, 200)]
    assert times == sorted(times)

"""On the virtual clock an agent takes exactly the time of the paper's equation (1), with the hits that came true."""

from __future__ import annotations

import pytest

from spectool_core import Speculation, ToolCall
from spectool_core.model import run_standard_time, run_time
from spectool_core.testing import run_virtual
from tests.guessing import Call, Guess, GuessingSpeculator, Reply
from tests.langgraph.agents import Seen, build, make_tools, run
from tests.tool_log import ToolLog

NUM_TURNS = 4


def replies(generation_s: float) -> list[Reply]:
    asked = [
        Reply((Call("lookup", {"q": f"q{turn}"}, f"id-{turn}"),), generation_s=generation_s)
        for turn in range(NUM_TURNS)
    ]
    return [*asked, Reply(text="done", generation_s=generation_s)]


def guesses(num_right: int, speculator_s: float) -> list[Guess]:
    return [
        Guess((ToolCall("lookup", {"q": f"q{turn}" if turn < num_right else "wrong"}),), speculator_s)
        for turn in range(NUM_TURNS)
    ]


def time_of(speculation: Speculation | None, generation_s: float, tool_s: float) -> float:
    async def main() -> Seen:
        tools = make_tools(ToolLog(lambda _name, _argument: tool_s))
        return await run(build(replies(generation_s), tools, speculation).compile())

    return run_virtual(main).duration_s


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 1.0, 2.0])  # T/G of the paper's figure 3
@pytest.mark.parametrize("share", [0.1, 0.4, 0.9])  # g/G
@pytest.mark.parametrize("num_hits", [0, 1, 3, NUM_TURNS])
def test_a_run_takes_the_time_of_equation_1(ratio: float, share: float, num_hits: int) -> None:
    generation_s, speculator_s, tool_s = 1.7, 1.7 * share, 1.7 * ratio
    speculation = Speculation([GuessingSpeculator(guesses(num_hits, speculator_s))])
    taken_s = time_of(speculation, generation_s, tool_s)
    total = speculation.statistics().total
    assert total.num_hits + total.num_joins == num_hits
    expected_s = run_time(NUM_TURNS, num_hits, generation_s=generation_s, speculator_s=speculator_s, tool_s=tool_s)
    assert taken_s == pytest.approx(expected_s, abs=1e-6)


@pytest.mark.parametrize("ratio", [0.25, 1.0, 2.0])
def test_a_speculator_slower_than_the_main_model_changes_nothing(ratio: float) -> None:
    generation_s, tool_s = 1.7, 1.7 * ratio
    speculation = Speculation([GuessingSpeculator(guesses(NUM_TURNS, 2 * generation_s))])
    taken_s = time_of(speculation, generation_s, tool_s)
    standard_s = run_standard_time(NUM_TURNS, generation_s=generation_s, tool_s=tool_s)
    assert taken_s == pytest.approx(standard_s, abs=1e-6)
    assert taken_s == pytest.approx(time_of(None, generation_s, tool_s), abs=1e-6)
    assert speculation.statistics().num_launched == 0

"""On the virtual clock an agent takes exactly the time of the paper's equation (1), with the hits that came true."""

from __future__ import annotations

import asyncio

import pytest

from spectool_core import Speculation, ToolCall
from spectool_core.model import run_standard_time, run_time
from tests.guessing import Call, Guess, GuessingSpeculator, Reply
from tests.llamaindex.agents import function_agent
from tests.llamaindex.clock import run_virtual
from tests.llamaindex.tools import make_tools
from tests.tool_log import ToolLog

NUM_TURNS = 4
GENERATION_S = 1.7


def replies() -> list[Reply]:
    asked = [
        Reply((Call("search", {"input": f"q{turn}"}, f"id-{turn}"),), generation_s=GENERATION_S)
        for turn in range(NUM_TURNS)
    ]
    return [*asked, Reply(text="done", generation_s=GENERATION_S)]


def guesses(num_right: int, speculator_s: float) -> list[Guess]:
    return [
        Guess((ToolCall("search", {"input": f"q{turn}" if turn < num_right else "wrong"}),), speculator_s)
        for turn in range(NUM_TURNS)
    ]


def time_of(speculation: Speculation | None, tool_s: float, *, streaming: bool = True) -> float:
    agent = function_agent(replies(), make_tools(ToolLog(lambda *_: tool_s)), speculation, streaming=streaming)

    async def main() -> float:
        await agent.run(user_msg="go")
        return asyncio.get_running_loop().time()

    return run_virtual(main)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 1.0, 2.0])  # T/G of the paper's figure 3
@pytest.mark.parametrize("share", [0.1, 0.4, 0.9])  # g/G
@pytest.mark.parametrize("num_hits", [0, 1, 3, NUM_TURNS])
def test_a_run_takes_the_time_of_equation_1(ratio: float, share: float, num_hits: int) -> None:
    speculator_s, tool_s = GENERATION_S * share, GENERATION_S * ratio
    speculation = Speculation([GuessingSpeculator(guesses(num_hits, speculator_s))], adaptive=False)
    taken_s = time_of(speculation, tool_s, streaming=num_hits % 2 == 0)
    total = speculation.statistics().total
    assert total.num_hits + total.num_joins == num_hits
    expected_s = run_time(NUM_TURNS, num_hits, generation_s=GENERATION_S, speculator_s=speculator_s, tool_s=tool_s)
    assert taken_s == pytest.approx(expected_s, abs=1e-6)


@pytest.mark.parametrize("ratio", [0.25, 1.0, 2.0])
def test_a_speculator_slower_than_the_main_model_changes_nothing(ratio: float) -> None:
    tool_s = GENERATION_S * ratio
    speculation = Speculation([GuessingSpeculator(guesses(NUM_TURNS, 2 * GENERATION_S))])
    taken_s = time_of(speculation, tool_s)
    assert taken_s == pytest.approx(run_standard_time(NUM_TURNS, generation_s=GENERATION_S, tool_s=tool_s), abs=1e-6)
    assert taken_s == pytest.approx(time_of(None, tool_s), abs=1e-6)
    assert speculation.statistics().num_launched == 0

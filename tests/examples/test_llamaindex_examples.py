"""The small LlamaIndex examples, with hardly any waiting."""

import re

import pytest
from llama_index.core.agent.workflow import AgentOutput, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import ToolOutput

from examples import llamaindex_agent, llamaindex_workflow, side_by_side
from spectool_core import Speculation

QUICK = {"generation_s": 0.25, "delay_s": 0.02}


def counts(output):
    """Hits and joins, misses, and what was not run early, by tool."""
    lines = re.findall(r"^  (\w+) +hits (\d+), joins (\d+), misses (\d+), not run early (\d+); ", output, re.MULTILINE)
    return {name: (int(hits) + int(joins), int(misses), int(skipped)) for name, hits, joins, misses, skipped in lines}


async def test_agent(capsys):
    assert await llamaindex_agent.main(**QUICK) == 0
    output = capsys.readouterr().out
    assert counts(output) == {"search": (2, 1, 0)}
    assert output.endswith("early runs that served no call: 1\n  answers and tool results are equal\n")
    assert re.findall(r"^  (stock|speculative) +\d+\.\d\d s  9 km/h: ", output, re.MULTILINE) == [
        "stock",
        "speculative",
    ]


async def test_workflow(capsys):
    assert await llamaindex_workflow.main(**QUICK) == 0
    output = capsys.readouterr().out
    assert counts(output) == {
        "search": (1, 0, 0),
        "read_file": (2, 0, 0),
        "handoff": (0, 0, 1),
        "save_note": (0, 0, 1),
    }
    assert output.endswith("early runs that served no call: 0\n  answers and tool results are equal\n")
    assert len(re.findall(r"Ines Corvane, on \*47\. The night shift has a note\.", output)) == 2


class Says:
    """Answers every question alike, after a tool has returned something."""

    def __init__(self, text, returned):
        results = [
            ToolCallResult(
                tool_name="search",
                tool_kwargs={},
                tool_id="1",
                tool_output=ToolOutput(tool_name="search", content=returned, raw_input={}),
                return_direct=False,
            )
        ]
        self._output = AgentOutput(response=ChatMessage(text), current_agent_name="a")
        self._output.tool_calls.extend(results)  # as LlamaIndex does

    async def run(self, user_msg):
        return self._output


@pytest.mark.parametrize(("other", "exit_code"), [(("a", "b"), 0), (("b", "b"), 1), (("a", "a"), 1)])
async def test_another_answer_or_tool_result_is_a_failure(other, exit_code, capsys):
    assert await side_by_side.compared("?", Says("a", "b"), Says(*other), Speculation(speculators=[])) == exit_code
    assert ("DIFFERENT" in capsys.readouterr().out) == bool(exit_code)

"""What stays as it was: agents in shadow mode and switched off, classes and tools; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import BaseTool, FunctionTool

from spectool_core import NotSpeculatableError, Speculation, speculatable
from spectool_llamaindex import SpeculativeCodeActAgent, SpeculativeFunctionAgent
from tests.guessing import Call, Reply, predicting, prompts_of
from tests.llamaindex.agents import alone, code_agent, function_agent
from tests.llamaindex.comparing import compare
from tests.llamaindex.tools import Choosing, ending, make_tools
from tests.tool_log import ToolLog

TWO_TURNS = [
    Reply((Call("lookup", {"q": "a"}, "1"),)),
    Reply((Call("search", {"input": "b"}, "2"),)),
    Reply(text="done"),
]


@pytest.mark.parametrize("in_workflow", [False, True])
def test_shadow_mode_predicts_and_runs_nothing(in_workflow: bool) -> None:
    speculation = predicting(TWO_TURNS, mode="shadow")

    def make(log: ToolLog, given: Speculation | None) -> Any:
        agent = function_agent(TWO_TURNS, make_tools(log), given)
        return alone(agent) if in_workflow else agent

    compared = compare(make, speculation)
    assert compared.log.events == compared.stock_log.events
    assert compared.saved_s == 0.0
    total = speculation.statistics().total
    assert (total.num_misses, total.num_predicted, total.acceptance_rate) == (2, 2, 1.0)
    assert speculation.statistics().num_launched == 0


@pytest.mark.parametrize("in_workflow", [False, True])
def test_off_is_stock(in_workflow: bool) -> None:
    speculation = predicting(TWO_TURNS, mode="off")

    def make(log: ToolLog, given: Speculation | None) -> Any:
        tools, retriever = make_tools(log), Choosing([])
        agent = function_agent(TWO_TURNS, tools, given, tool_retriever=retriever)
        assert all(mine is theirs for mine, theirs in zip(agent.tools, tools, strict=True))
        assert agent.tool_retriever is retriever
        return alone(agent) if in_workflow else agent

    compared = compare(make, speculation)
    assert compared.log.events == compared.stock_log.events
    assert compared.saved_s == 0.0
    assert prompts_of(speculation) == []
    assert speculation.statistics().num_turns == 0


def test_the_class_is_the_stock_class_with_one_more_argument() -> None:
    agent = function_agent(TWO_TURNS, make_tools(ToolLog(lambda *_: 0.0)), predicting(TWO_TURNS), name="mine")
    assert isinstance(agent, SpeculativeFunctionAgent)
    assert isinstance(agent, FunctionAgent)
    assert (agent.name, agent.allow_parallel_tool_calls) == ("mine", True)
    assert all(isinstance(tool, BaseTool) for tool in agent.tools)
    assert [isinstance(tool, FunctionTool) for tool in agent.tools] == [True] * 4 + [False] * 2 + [True] * 2


def with_context_of_the_workflow() -> Any:
    return next(tool for tool in make_tools(ToolLog(lambda *_: 0.0)) if tool.metadata.name == "remember")


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        (with_context_of_the_workflow(), "context"),
        (ending(ToolLog(lambda *_: 0.0)), "return_direct"),
    ],
)
def test_tools_that_cannot_run_early_are_refused(tool: BaseTool, reason: str) -> None:
    speculatable(tool)
    with pytest.raises(NotSpeculatableError, match=reason) as caught:
        function_agent(TWO_TURNS, [tool], predicting(TWO_TURNS))
    assert str(tool.metadata.name) in str(caught.value)
    speculatable(tool, writes=["state"])  # never run early, its fence is narrower
    function_agent(TWO_TURNS, [tool], predicting(TWO_TURNS))


def test_code_that_the_model_wrote_is_refused() -> None:
    async def execute(code: str) -> str:
        return code

    with pytest.raises(NotSpeculatableError, match="execute"):
        code_agent([Reply(text="done")], [], speculatable(execute), predicting([]))
    assert isinstance(code_agent([Reply(text="done")], [], execute_unmarked, predicting([])), SpeculativeCodeActAgent)


async def execute_unmarked(code: str) -> str:
    return code

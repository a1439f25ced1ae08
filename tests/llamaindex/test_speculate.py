"""`speculate()`: agents and workflows that were built elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.tools import FunctionTool

from spectool_core import ConfigurationError, NotSpeculatableError, Speculation, speculatable
from spectool_llamaindex import speculate
from tests.guessing import Call, GuessingSpeculator, Reply, outcomes, predicting
from tests.llamaindex.agents import HANDOFF, function_agent, react_agent, run, team
from tests.llamaindex.clock import run_virtual
from tests.llamaindex.comparing import compare
from tests.llamaindex.scripted import ScriptedLLM, ScriptedTextLLM, thinking
from tests.llamaindex.tools import ending, make_tools
from tests.tool_log import ToolLog

LOOKUP, SEARCH = Call("lookup", {"q": "a"}, "1"), Call("search", {"input": "b"}, "2")
REPLIES = [Reply((LOOKUP,)), Reply((SEARCH,)), Reply(text="done")]


def with_speculation(agent: Any, given: Speculation | None) -> Any:
    return agent if given is None else speculate(agent, given)


def test_an_agent() -> None:
    speculation = predicting(REPLIES)
    originals: list[FunctionAgent] = []

    def make(log: ToolLog, given: Speculation | None) -> Any:
        original = function_agent(REPLIES, make_tools(log), name="mine", system_prompt="Be brief.")
        tools = list(original.tools)
        copied = with_speculation(original, given)
        assert type(copied).__name__ == type(original).__name__ == "FunctionAgent"
        assert isinstance(copied, FunctionAgent)
        assert type(original) is FunctionAgent
        assert all(mine is theirs for mine, theirs in zip(original.tools, tools, strict=True))
        assert (copied.name, copied.system_prompt, copied.llm) == ("mine", "Be brief.", original.llm)
        originals.append(original)
        return copied

    compared = compare(make, speculation)
    assert outcomes(speculation) == (2, 0, 0)
    assert compared.saved_s == pytest.approx(0.8)
    before = speculation.statistics()
    run_virtual(lambda: run(originals[-1]))
    assert speculation.statistics() == before


def test_a_react_agent() -> None:
    replies = [thinking(LOOKUP), thinking(SEARCH), thinking()]
    speculation = Speculation(
        [ScriptedTextLLM(replies=[Reply(text=reply.text, generation_s=0.25) for reply in replies])]
    )
    compare(
        lambda log, given: with_speculation(react_agent(replies, make_tools(log), system_prompt="Be brief."), given),
        speculation,
    )
    assert outcomes(speculation) == (2, 0, 0)


def test_a_workflow_of_several_agents() -> None:
    replies = [REPLIES[0], Reply((HANDOFF,)), *REPLIES[1:]]
    speculation = predicting(replies)
    compare(
        lambda log, given: with_speculation(team(replies, make_tools(log), initial_state={"n": 0}), given), speculation
    )
    assert outcomes(speculation) == (2, 0, 0)


@pytest.mark.parametrize("calls_functions", [True, False])
def test_a_workflow_from_tools_or_functions(calls_functions: bool) -> None:
    """Its agents' classes are chosen by LlamaIndex."""
    replies = REPLIES if calls_functions else [thinking(LOOKUP), thinking(SEARCH), thinking()]
    speculation = predicting(REPLIES)
    workflows: list[AgentWorkflow] = []

    def make(log: ToolLog, given: Speculation | None) -> Any:
        @speculatable
        async def lookup(q: str, n: int = 1) -> str:
            """Look something up."""
            return await log.run("lookup", f"{q}{n}")

        _, _, _, _, search, *_ = make_tools(log)
        llm = (ScriptedLLM if calls_functions else ScriptedTextLLM)(replies=list(replies))
        workflow = AgentWorkflow.from_tools_or_functions([lookup, search], llm=llm, system_prompt="Be brief.")
        workflows.append(workflow)
        copied = with_speculation(workflow, given)
        assert type(copied) is AgentWorkflow
        return copied

    compared = compare(make, speculation)
    assert outcomes(speculation) == (2, 0, 0)
    assert compared.saved_s == pytest.approx(0.8)
    original = workflows[-1].agents["Agent"]
    assert type(original) is (FunctionAgent if calls_functions else ReActAgent)
    assert type(original.tools[0]) is FunctionTool
    before = speculation.statistics()
    run_virtual(lambda: run(workflows[-1]))
    assert speculation.statistics() == before


class Signing(FunctionAgent):
    """A user's own agent class, with a field and a step of its own."""

    signature: str = "me"

    async def take_step(self, *args: Any, **kwargs: Any) -> Any:
        output = await super().take_step(*args, **kwargs)
        output.response.additional_kwargs["signed"] = self.signature
        return output


def test_an_agent_of_a_users_own_class() -> None:
    speculation = predicting(REPLIES)

    def make(log: ToolLog, given: Speculation | None) -> Any:
        agent = Signing(llm=ScriptedLLM(replies=REPLIES), tools=make_tools(log), signature="you")
        copied = with_speculation(agent, given)
        assert isinstance(copied, Signing)
        assert type(copied).__name__ == "Signing"
        return copied

    compared = compare(make, speculation)
    assert outcomes(speculation) == (2, 0, 0)
    assert {event["response"]["additional_kwargs"]["signed"] for event in compared.ours.of("AgentOutput")} == {"you"}


def test_another_speculation_for_an_agent_that_has_one() -> None:
    first, second = predicting(REPLIES), predicting(REPLIES)
    compare(
        lambda log, given: with_speculation(function_agent(REPLIES, make_tools(log), given and first), given), second
    )
    assert outcomes(first) == (0, 0, 0)
    assert first.statistics().num_turns == 0
    assert outcomes(second) == (2, 0, 0)


def test_two_copies_side_by_side() -> None:
    """Of one agent, with tools and LLM shared: each has its own speculation."""
    first, second = predicting(REPLIES), predicting([])
    log = ToolLog(lambda *_: 0.4)
    original = function_agent(REPLIES, make_tools(log))
    copies = [speculate(original, first), speculate(original, second)]
    for copied in (*copies, original):
        run_virtual(lambda copied=copied: run(copied))
    assert (outcomes(first), outcomes(second)) == ((2, 0, 0), (0, 0, 2))
    assert log.counts("started") == {("lookup", "a1"): 3, ("search", "b"): 3}


def test_what_cannot_be_speculated() -> None:
    for target in (object(), FunctionAgent, "agent", None):
        with pytest.raises(ConfigurationError, match="target"):
            speculate(target, predicting([]))  # type: ignore[type-var]
    agent = function_agent(REPLIES, [speculatable(ending(ToolLog(lambda *_: 0.0)))])
    with pytest.raises(NotSpeculatableError, match="finish"):
        speculate(agent, predicting([]))
    with pytest.raises(ConfigurationError, match="speculation"):
        speculate(agent, GuessingSpeculator([]))  # type: ignore[arg-type]

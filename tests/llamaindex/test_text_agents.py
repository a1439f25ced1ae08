"""Agents whose model answers in text: ReAct, whose speculators are read as its model is, and CodeAct without any."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from llama_index.core.agent.workflow import AgentWorkflow

from spectool_core import Speculation, speculatable
from spectool_core.calls import ToolCall
from spectool_llamaindex import LLMSpeculator
from tests.guessing import Call, Guess, GuessingSpeculator, Reply, outcomes, predicting
from tests.llamaindex.agents import HANDOFF, alone, code_agent, function_agent, react_agent
from tests.llamaindex.comparing import compare
from tests.llamaindex.scripted import ScriptedLLM, ScriptedTextLLM, executing, thinking
from tests.llamaindex.tools import make_tools
from tests.tool_log import ToolLog

LOOKUP, SEARCH = Call("lookup", {"q": "a"}), Call("search", {"input": "b"})
REPLIES = [thinking(LOOKUP), thinking(SEARCH), thinking()]


def in_text(*replies: Reply) -> tuple[Speculation, ScriptedTextLLM]:
    """A speculator that answers in text, faster than the main model."""
    llm = ScriptedTextLLM(replies=[Reply(text=reply.text, generation_s=0.25) for reply in replies])
    return Speculation([llm]), llm


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("in_workflow", [False, True])
def test_a_react_agent_gains(streaming: bool, in_workflow: bool) -> None:
    speculation, llm = in_text(*REPLIES)

    def make(log: ToolLog, given: Speculation | None) -> Any:
        agent = react_agent(REPLIES, make_tools(log), given, streaming=streaming, system_prompt="Be brief.")
        return alone(agent) if in_workflow else agent

    compared = compare(make, speculation)
    assert outcomes(speculation) == (2, 0, 0)
    assert compared.saved_s == pytest.approx(0.8)
    assert compared.log.counts("started") == {("lookup", "a1"): 1, ("search", "b"): 1}
    # Asked the same as the main model, in text: no tools, no choice.
    assert [request.messages for request in llm.requests] == [each["messages"] for each in compared.ours.requests]
    assert [request.options for request in llm.requests] == [{}, {}, {}]


def test_a_react_agent_with_any_speculator() -> None:
    speculation = Speculation(
        [GuessingSpeculator([Guess((ToolCall("lookup", {"n": 1, "q": "a"}),)), Guess((ToolCall(*vars_of(SEARCH)),))])]
    )
    compare(lambda log, given: react_agent(REPLIES, make_tools(log), given), speculation)
    assert outcomes(speculation) == (2, 0, 0)
    (speculator,) = speculation.speculators
    assert isinstance(speculator, GuessingSpeculator)
    assert all(prompt.read_text is not None for prompt in speculator.prompts)


def vars_of(call: Call) -> tuple[str, dict[str, Any]]:
    return call.name, call.args


UNREADABLE = Reply(text="Action: lookup\nI forgot the rest")
EMPTY = Reply(text="")


@pytest.mark.parametrize("unreadable", [UNREADABLE, EMPTY])
@pytest.mark.parametrize("streaming", [True, False])
def test_answers_that_the_agent_asks_for_again(unreadable: Reply, streaming: bool) -> None:
    """Each try is a turn of its own, whose prompt holds what was wrong with the last one."""
    replies = [unreadable, *REPLIES[:1], unreadable, *REPLIES[1:]]
    speculator = ScriptedTextLLM(
        replies=[
            Reply(text=reply.text, generation_s=0.25)
            for reply in (REPLIES[0], REPLIES[0], REPLIES[1], REPLIES[1], thinking())
        ],
        in_turn=True,
    )
    speculation = Speculation([speculator])
    compared = compare(
        lambda log, given: react_agent(
            ScriptedTextLLM(replies=replies, in_turn=True), make_tools(log), given, streaming=streaming
        ),
        speculation,
    )
    assert outcomes(speculation) == (2, 0, 0)
    assert compared.saved_s == pytest.approx(0.8)
    statistics = speculation.statistics()
    assert (statistics.num_turns, statistics.num_answered_turns, statistics.num_wasted) == (5, 5, 2)
    assert [request.messages for request in speculator.requests] == [
        each["messages"] for each in compared.ours.requests
    ]


@pytest.mark.parametrize(
    "text", ["", "Action: lookup", "no idea", "Thought: t\nAction: lookup\nAction Input: {'q': 'a"]
)
def test_a_speculator_that_cannot_be_read_predicts_nothing(text: str) -> None:
    speculation, _ = in_text(*[Reply(text=text)] * 3)
    compared = compare(lambda log, given: react_agent(REPLIES, make_tools(log), given), speculation)
    assert outcomes(speculation) == (0, 0, 2)
    assert speculation.statistics().num_launched == 0
    assert compared.log.events == compared.stock_log.events


def test_a_function_calling_speculator_of_a_react_agent_answers_in_text() -> None:
    llm = ScriptedLLM(replies=[Reply(text=reply.text, generation_s=0.25) for reply in REPLIES])
    speculation = Speculation([LLMSpeculator(llm)])
    compare(lambda log, given: react_agent(REPLIES, make_tools(log), given), speculation)
    assert outcomes(speculation) == (2, 0, 0)
    assert [request.options for request in llm.requests] == [{}, {}, {}]


spoken = st.sampled_from(
    [
        thinking(LOOKUP),
        thinking(Call("lookup", {"n": 2, "q": "c"})),
        thinking(SEARCH),
        thinking(Call("weigh", {"q": "a"})),
        thinking(Call("note", {"text": "n"})),
        thinking(Call("unknown", {})),
        thinking(Call("lookup", {"n": "many"})),
        UNREADABLE,
        EMPTY,
    ]
)


@given(
    replies=st.lists(spoken, max_size=4),
    guesses=st.lists(spoken, min_size=5, max_size=5),
    right=st.lists(st.booleans(), min_size=5, max_size=5),
    generation_s=st.sampled_from([0.301, 1.003]),
    guess_s=st.sampled_from([0.0531, 0.1979, 5.0]),
    tool_s=st.sampled_from([0.0, 0.413, 1.129]),
    streaming=st.booleans(),
    broken=st.sampled_from([frozenset(), frozenset({"c2"})]),
)
@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_a_react_run_is_the_run_it_would_have_been(
    replies: list[Reply],
    guesses: list[Reply],
    right: list[bool],
    generation_s: float,
    guess_s: float,
    tool_s: float,
    streaming: bool,
    broken: frozenset[str],
) -> None:
    said = [Reply(text=reply.text, generation_s=generation_s) for reply in [*replies, thinking()]]
    says = [said[n] if n < len(said) and right[n] else guess for n, guess in enumerate(guesses)]
    speculator = ScriptedTextLLM(replies=[Reply(text=say.text, generation_s=guess_s) for say in says], in_turn=True)
    speculation = Speculation([speculator])
    compared = compare(
        lambda log, given: react_agent(
            ScriptedTextLLM(replies=said, in_turn=True), make_tools(log), given, streaming=streaming
        ),
        speculation,
        latency_s=lambda *_: tool_s,
        broken=broken,
    )
    assert compared.log.counts("started")["note", "n"] == compared.stock_log.counts("started")["note", "n"]
    num_marked = sum(n for (name, _), n in compared.log.counts("started").items() if name != "note")
    statistics = speculation.statistics()
    assert num_marked <= statistics.num_launched + statistics.total.num_real_runs


# CodeAct


async def execute(code: str) -> str:
    return f"ran {code}"


@pytest.mark.parametrize("streaming", [True, False])
def test_a_code_agent_asks_no_speculator(streaming: bool) -> None:
    replies = [executing("1 + 1"), executing("2 + 2"), Reply(text="done")]
    speculation = predicting([Reply((Call("execute", {"code": "1 + 1"}),)), Reply((LOOKUP,))])

    def make(log: ToolLog, given: Speculation | None) -> Any:
        return code_agent(replies, make_tools(log)[:2], execute, given, streaming=streaming)

    compared = compare(make, speculation)
    assert compared.ours.tools_said == ["ran 1 + 1", "ran 2 + 2"]
    (speculator,) = speculation.speculators
    assert isinstance(speculator, GuessingSpeculator)
    assert speculator.prompts == []
    assert speculation.statistics().num_launched == 0


def test_code_is_a_write_for_the_other_agents_of_the_run() -> None:
    """`front` reads, hands over to `back`, which runs code and hands back: what was read is stale."""
    to_front = Call("handoff", {"to_agent": "front", "reason": "done"}, "back")
    reading = Reply((Call("lookup", {"q": "a"}, "1"),))
    replies = [reading, Reply((HANDOFF,)), executing("change()"), Reply((to_front,)), reading, Reply(text="done")]
    speculation = predicting(replies)
    file = ["old"]

    def make(log: ToolLog, given: Speculation | None) -> Any:
        file[:] = ["old"]

        async def lookup(q: str) -> str:
            """Read the file."""
            return await log.run("lookup", file[0])

        async def change(code: str) -> str:
            """Change the file."""
            file[:] = ["new"]
            return "changed"

        llm = ScriptedLLM(replies=replies)
        front = function_agent(llm, [speculatable(reuse="ttl")(lookup)], given, name="front", description="Reads.")
        back = code_agent([], [], change, given, name="back", description="Runs code.")
        back.llm = llm
        return AgentWorkflow(agents=[front, back], root_agent="front")

    compared = compare(make, speculation)
    assert "lookup of new" in compared.ours.tools_said
    assert outcomes(speculation, "lookup") == (2, 0, 0)

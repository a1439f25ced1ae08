"""What a user can ask of an agent, beside speculated tools: held against the stock agent, and counted."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow
from llama_index.core.llms import ChatMessage
from llama_index.core.objects import ObjectRetriever
from pydantic import BaseModel

from spectool_core import Speculation, speculatable
from spectool_llamaindex import LLMSpeculator
from tests.guessing import Call, GuessingSpeculator, Reply, outcomes, predicting
from tests.llamaindex.agents import HANDOFF, Seen, alone, function_agent, team
from tests.llamaindex.comparing import compare
from tests.llamaindex.scripted import ScriptedLLM
from tests.llamaindex.tools import Choosing, ending, make_tools
from tests.tool_log import ToolLog

TWO_TURNS = [
    Reply((Call("lookup", {"q": "a"}, "1"),)),
    Reply((Call("search", {"input": "b"}, "2"),)),
    Reply(text="done"),
]


def speculator_of(speculation: Speculation) -> GuessingSpeculator:
    (speculator,) = speculation.speculators
    assert isinstance(speculator, GuessingSpeculator)
    return speculator


@pytest.mark.parametrize("streaming", [True, False])
def test_return_direct_ends_the_run(streaming: bool) -> None:
    replies = [TWO_TURNS[0], Reply((Call("finish", {"text": "bye"}, "2"),)), Reply(text="never asked")]
    speculation = predicting(replies)
    compared = compare(
        lambda log, given: function_agent(replies, [*make_tools(log), ending(log)], given, streaming=streaming),
        speculation,
    )
    assert compared.ours.result["response"]["blocks"][0]["text"] == "finish of bye"
    assert compared.log.counts("started") == {("lookup", "a1"): 1, ("finish", "bye"): 1}
    assert outcomes(speculation) == (1, 0, 0)
    assert compared.saved_s == pytest.approx(0.4)


def test_return_direct_beside_a_speculated_tool() -> None:
    replies = [
        Reply((Call("lookup", {"q": "a"}, "1"), Call("finish", {"text": "bye"}, "2"))),
        Reply(text="never asked"),
    ]
    speculation = predicting(replies)
    compared = compare(
        lambda log, given: function_agent(replies, [*make_tools(log), ending(log)], given),
        speculation,
        latency_s=lambda name, _: 0.9 if name == "finish" else 0.4,
    )
    assert compared.ours.result["response"]["blocks"][0]["text"] == "finish of bye"
    assert compared.log.counts("returned")["finish", "bye"] == 1
    assert outcomes(speculation, "lookup") == (0, 0, 1)  # beside a write


@pytest.mark.parametrize("streaming", [True, False])
def test_both_agents_of_a_handoff_gain(streaming: bool) -> None:
    replies = [TWO_TURNS[0], Reply((HANDOFF,)), TWO_TURNS[1], Reply(text="done")]
    speculation = predicting(replies)
    compared = compare(lambda log, given: team(replies, make_tools(log), given, streaming=streaming), speculation)
    assert outcomes(speculation) == (2, 0, 0)
    assert compared.saved_s == pytest.approx(0.8)
    assert {event["current_agent_name"] for event in compared.ours.of("AgentOutput")} == {"front", "back"}
    assert outcomes(speculation, "handoff") == (0, 0, 0)


def test_a_result_that_outlives_its_turn_is_used_by_the_other_agent() -> None:
    """The handoff is no write of anything that a tool reads."""
    call = Call("lookup", {"q": "a"}, "1")
    replies = [Reply((call,)), Reply((HANDOFF,)), Reply((Call("lookup", {"q": "a"}, "2"),)), Reply(text="done")]
    speculation = predicting(replies)

    def make(log: ToolLog, given: Speculation | None) -> Any:
        lookup, *others = make_tools(log)
        return team(replies, [speculatable(lookup, reuse="ttl"), *others], given)

    compared = compare(make, speculation)
    assert compared.log.counts("started") == {("lookup", "a1"): 1}
    assert compared.stock_log.counts("started") == {("lookup", "a1"): 2}
    assert outcomes(speculation) == (2, 0, 0)


class Form(BaseModel):
    """What structured output fills in."""

    answer: str
    number: int


@pytest.mark.parametrize("in_workflow", [False, True])
def test_structured_output(in_workflow: bool) -> None:
    speculation = predicting(TWO_TURNS)

    def make(log: ToolLog, given: Speculation | None) -> Any:
        llm = ScriptedLLM(replies=TWO_TURNS, form=Call("Form", {"answer": "a", "number": 1}, "form"))
        agent = function_agent(llm, make_tools(log), given, output_cls=Form)
        return alone(agent) if in_workflow else agent

    compared = compare(make, speculation)
    assert compared.ours.result["structured_response"] == {"answer": "a", "number": 1}
    assert len(compared.ours.of("AgentStreamStructuredOutput")) == 1
    assert outcomes(speculation) == (2, 0, 0)
    assert len(speculator_of(speculation).prompts) == 3  # the form is no turn of the agent


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_for_structured_output(is_async: bool) -> None:
    def count(messages: list[ChatMessage]) -> dict[str, Any]:
        return {"num_messages": len(messages)}

    async def count_async(messages: list[ChatMessage]) -> dict[str, Any]:
        return count(messages)

    speculation = predicting(TWO_TURNS)
    function = count_async if is_async else count
    compared = compare(
        lambda log, given: function_agent(TWO_TURNS, make_tools(log), given, structured_output_fn=function), speculation
    )
    assert compared.ours.result["structured_response"] == {"num_messages": 6}
    assert outcomes(speculation) == (2, 0, 0)


@pytest.mark.parametrize("in_workflow", [False, True])
def test_tools_that_are_retrieved(in_workflow: bool) -> None:
    retrievers: list[Choosing] = []

    def make(log: ToolLog, given: Speculation | None) -> Any:
        own, *retrieved = make_tools(log)
        retrievers.append(Choosing(retrieved))
        agent = function_agent(TWO_TURNS, [own], given, tool_retriever=retrievers[-1])
        assert isinstance(agent.tool_retriever, ObjectRetriever)
        return alone(agent) if in_workflow else agent

    speculation = predicting(TWO_TURNS)
    compared = compare(make, speculation)
    stock, ours = retrievers
    assert ours.asked == stock.asked
    assert outcomes(speculation) == (2, 0, 0)
    assert compared.log.counts("started") == {("lookup", "a1"): 1, ("search", "b"): 1}


def test_tools_that_are_retrieved_alone() -> None:
    speculation = predicting(TWO_TURNS)
    compare(
        lambda log, given: function_agent(TWO_TURNS, None, given, tool_retriever=Choosing(make_tools(log))), speculation
    )
    assert outcomes(speculation) == (2, 0, 0)


@pytest.mark.parametrize("streaming", [True, False])
def test_the_first_tool_choice_is_passed_on(streaming: bool) -> None:
    speculation = predicting(TWO_TURNS)
    llm = ScriptedLLM(replies=TWO_TURNS)
    also = Speculation([*speculation.speculators, llm])
    compared = compare(
        lambda log, given: function_agent(
            TWO_TURNS, make_tools(log), given, initial_tool_choice="lookup", streaming=streaming
        ),
        also,
    )
    chosen = [prompt.tool_choice for prompt in speculator_of(speculation).prompts]
    assert chosen == [{"type": "function", "function": {"name": "lookup"}}, None, None]
    asked_m = [request["options"]["tool_choice"] for request in compared.ours.requests]
    assert asked_m == [request.options["tool_choice"] for request in llm.requests] == ["lookup", "auto", "auto"]
    assert outcomes(also) == (2, 0, 0)


@pytest.mark.parametrize("streaming", [True, False])
def test_one_call_at_a_time(streaming: bool) -> None:
    """Stock holds its model to it without streaming only; speculators are held to it always."""
    two = (Call("lookup", {"q": "a"}, "1"), Call("search", {"input": "b"}, "2"))
    replies = [Reply(two), Reply(text="done")]
    speculator = LLMSpeculator(ScriptedLLM(replies=[Reply(two, generation_s=0.5), Reply(generation_s=0.5)]))
    speculation = Speculation([speculator])
    compared = compare(
        lambda log, given: function_agent(
            replies, make_tools(log), given, allow_parallel_tool_calls=False, streaming=streaming
        ),
        speculation,
        latency_s=lambda name, _: 0.7 if name == "search" else 0.4,
        in_order=not streaming,
    )
    assert speculation.statistics().num_launched == 1
    assert compared.log.counts("started") == {("lookup", "a1"): 1} | ({("search", "b"): 1} if streaming else {})
    assert outcomes(speculation) == (1, 0, int(streaming))
    assert speculator.llm.requests[0].options["parallel_tool_calls"] is False


@pytest.mark.parametrize("in_workflow", [False, True])
def test_verbose(in_workflow: bool, capsys: pytest.CaptureFixture[str]) -> None:
    speculation = predicting(TWO_TURNS)
    said: list[str] = []

    def make(log: ToolLog, given: Speculation | None) -> Any:
        said.append(capsys.readouterr().out)
        agent = function_agent(TWO_TURNS, make_tools(log), given, verbose=not in_workflow)
        return alone(agent, verbose=True) if in_workflow else agent

    compared = compare(make, speculation)
    assert capsys.readouterr().out == said[-1]
    assert "run_agent_step" in said[-1]
    assert outcomes(speculation) == (2, 0, 0)
    assert compared.saved_s == pytest.approx(0.8)


def test_state_tools_beside_speculated_ones() -> None:
    replies = [
        TWO_TURNS[0],
        Reply((Call("remember", {"text": "r"}, "2"),)),
        Reply((Call("search", {"input": "b"}, "3"),)),
        Reply(text="done"),
    ]
    speculation = predicting(replies)
    compared = compare(
        lambda log, given: function_agent(replies, make_tools(log), given, initial_state={"known": 1}), speculation
    )
    assert compared.ours.state == {"known": 1, "remembered": "r"}
    assert compared.log.counts("started")["remember", "r"] == 1
    assert outcomes(speculation) == (2, 0, 0)


def test_tools_that_fail() -> None:
    """The early run's failure is shown to nobody; stock's own run is what the agent sees."""
    replies = [TWO_TURNS[0], Reply((Call("lookup", {"q": "c"}, "2"),)), TWO_TURNS[1], Reply(text="done")]
    speculation = predicting(replies)
    compared = compare(
        lambda log, given: function_agent(replies, make_tools(log), given), speculation, broken=frozenset({"c1"})
    )
    assert compared.ours.tools_said[1] == "c1 is unreachable"
    failed = compared.ours.of("ToolCallResult")[1]["tool_output"]
    assert failed["is_error"]
    assert failed["exception"] == "ConnectionError('c1 is unreachable')"
    assert compared.log.counts("raised") == {("lookup", "c1"): 2}
    assert outcomes(speculation) == (2, 0, 1)


def seen_arguments(seen: Seen) -> list[Any]:
    return [event["tool_output"]["raw_input"] for event in seen.of("ToolCallResult")]


def test_raw_input_is_the_models_own_arguments_also_where_the_speculator_spelled_them_otherwise() -> None:
    replies = [
        Reply((Call("weigh", {"q": "a"}, "1"),)),
        Reply((Call("quote", {"q": "a"}, "2"),)),
        Reply((Call("lookup", {"n": 1, "q": "a"}, "3"),)),
        Reply(text="done"),
    ]
    spelled = [
        Reply((Call("weigh", {"unit": "kg", "q": "a"}),)),
        Reply((Call("quote", {"currency": "EUR", "q": "a"}),)),
        Reply((Call("lookup", {"q": "a"}),)),
    ]
    speculation = predicting(spelled)
    compared = compare(lambda log, given: function_agent(replies, make_tools(log), given), speculation)
    assert outcomes(speculation) == (3, 0, 0)
    assert seen_arguments(compared.ours) == [
        {"args": [], "kwargs": {"unit": "kg", "q": "a"}},
        {"args": [], "kwargs": {"currency": "EUR", "q": "a"}},
        {"args": [], "kwargs": {"n": 1, "q": "a"}},
    ]


def test_a_workflow_of_one_agent_and_its_own_settings() -> None:
    speculation = predicting(TWO_TURNS)
    compared = compare(
        lambda log, given: alone(function_agent(TWO_TURNS, make_tools(log), given), initial_state={"n": 0}), speculation
    )
    assert isinstance(alone(function_agent(TWO_TURNS, [], speculation)), AgentWorkflow)
    assert compared.ours.state == {"n": 0}
    assert outcomes(speculation) == (2, 0, 0)

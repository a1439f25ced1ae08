"""Speculators of a function agent: any LLM of LlamaIndex, and the main model's own stream."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.llms import ChatMessage

from spectool_core import ConfigurationError, Speculation
from spectool_core.speculators.stream import StreamSpeculator
from spectool_llamaindex import LLMSpeculator
from tests.guessing import Call, Reply, outcomes
from tests.llamaindex.agents import function_agent
from tests.llamaindex.comparing import compare
from tests.llamaindex.scripted import ScriptedLLM, ScriptedTextLLM
from tests.llamaindex.tools import make_tools
from tests.tool_log import ToolLog

LOOKUP, SEARCH = Call("lookup", {"q": "a", "n": 2}, "1"), Call("search", {"input": "b"}, "2")
REPLIES = [Reply((LOOKUP,)), Reply((SEARCH,)), Reply(text="done")]


def agent_of(log: ToolLog, given: Speculation | None) -> Any:
    return function_agent(REPLIES, make_tools(log), given, system_prompt="Be brief.")


def fast(*replies: Reply, **settings: Any) -> ScriptedLLM:
    return ScriptedLLM(replies=[Reply(each.calls, each.text, 0.25, each.error) for each in replies], **settings)


@pytest.mark.parametrize("wrapped", [True, False])
def test_an_llm_is_asked_what_the_main_model_is_asked_and_nobody_sees_it(wrapped: bool) -> None:
    """`compare` holds the spans, events and callbacks of both runs against one another."""
    llm = fast(*REPLIES)
    speculation = Speculation([LLMSpeculator(llm) if wrapped else llm])
    compared = compare(agent_of, speculation)
    assert outcomes(speculation) == (2, 0, 0)
    assert compared.saved_s == pytest.approx(0.8)
    asked = compared.ours.requests
    assert [request.messages for request in llm.requests] == [request["messages"] for request in asked]
    assert [request.options for request in llm.requests] == [request["options"] for request in asked]
    assert not any(request.streaming for request in llm.requests)


class Appending(ScriptedLLM):
    """Writes into the list of messages that it is given."""

    def _prepare_chat_with_tools(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        kwargs["chat_history"].append(ChatMessage("answer at once", role="developer"))
        return super()._prepare_chat_with_tools(*args, **kwargs)


def test_a_speculator_that_writes_into_its_messages_writes_into_a_copy() -> None:
    llm = Appending(replies=fast(*REPLIES).replies)
    speculation = Speculation([llm])
    compared = compare(agent_of, speculation)
    assert outcomes(speculation) == (2, 0, 0)
    assert "answer at once" in str(llm.requests[0].messages)
    assert "answer at once" not in str(compared.ours.requests)


def test_a_main_model_that_writes_into_its_messages_is_the_same() -> None:
    def make(log: ToolLog, given: Speculation | None) -> Any:
        return function_agent(Appending(replies=REPLIES), make_tools(log), given)

    llm = fast(*REPLIES)
    speculation = Speculation([llm])
    compare(make, speculation)
    assert outcomes(speculation) == (2, 0, 0)
    assert "answer at once" not in str([request.messages for request in llm.requests])


@pytest.mark.parametrize("arguments", ['{"q": "a"', '{"q": "a", "n": 2', "", "q = a", '["a"]', "null"])
def test_arguments_that_are_cut_off_are_no_call(arguments: Any) -> None:
    """Read leniently, as clients do while they stream, the first of them is a call of its own."""
    speculation = Speculation([fast(Reply((Call("lookup", arguments, "1"),)), *REPLIES[1:])])
    compare(agent_of, speculation)
    assert outcomes(speculation) == (1, 0, 1)
    assert speculation.statistics().num_launched == 1


def test_a_speculator_that_fails_changes_nothing() -> None:
    down = ConnectionError("the speculator is down")
    speculation = Speculation([fast(Reply(error=down), REPLIES[1], Reply(error=down))])
    compared = compare(agent_of, speculation)
    assert outcomes(speculation) == (1, 0, 1)
    assert speculation.statistics().num_speculators_failed == 2
    assert compared.ours.error is None


def test_an_llm_that_calls_no_tools_predicts_nothing_for_a_function_agent() -> None:
    llm = ScriptedTextLLM(replies=REPLIES)
    speculation = Speculation([llm])
    compared = compare(agent_of, speculation)
    assert compared.log.events == compared.stock_log.events
    assert speculation.statistics().num_launched == 0
    assert llm.requests == []


def test_a_slow_llm_is_cancelled_when_the_main_model_has_answered() -> None:
    llm = ScriptedLLM(replies=[Reply(each.calls, generation_s=5.0) for each in REPLIES])
    speculation = Speculation([llm])
    compared = compare(agent_of, speculation)
    assert compared.log.events == compared.stock_log.events
    assert llm.num_cancelled == speculation.statistics().num_speculators_cancelled == 3


def test_only_an_llm_is_one() -> None:
    with pytest.raises(ConfigurationError, match="llm"):
        LLMSpeculator("gpt")  # type: ignore[arg-type]


@pytest.mark.parametrize("streaming", [True, False])
def test_the_main_models_own_stream(streaming: bool) -> None:
    """Each call starts when its arguments have closed, while the model writes the next one; only if it is streamed."""
    # Nine pieces of 0.1 s: for each call its name and its arguments in three; then the end.
    replies = [Reply((LOOKUP, SEARCH), generation_s=0.9), Reply(text="done")]
    speculation = Speculation([StreamSpeculator()], adaptive=False)
    compared = compare(
        lambda log, given: function_agent(replies, make_tools(log), given, streaming=streaming),
        speculation,
        latency_s=lambda name, _: 0.3 if name == "lookup" else 0.2,
        in_order=False,
    )
    assert compared.log.counts("started") == compared.stock_log.counts("started")
    if streaming:
        assert outcomes(speculation) == (1, 1, 0)
        assert compared.saved_s == pytest.approx(0.3 - 0.1)
    else:
        assert outcomes(speculation) == (0, 0, 2)
        assert compared.saved_s == 0.0

"""What the tests compare is determined: two stock runs are equal in everything that can be seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from tests.guessing import Call, Reply
from tests.llamaindex.agents import HANDOFF, GiveUp, Seen, alone, code_agent, function_agent, react_agent, run, team
from tests.llamaindex.clock import run_virtual
from tests.llamaindex.scripted import executing, thinking
from tests.llamaindex.tools import confirmation, make_tools
from tests.tool_log import ToolLog

LATENCIES = {"lookup": 0.413, "search": 0.7, "weigh": 1.129, "recall": 1.3, "quote": 0.0}
PARALLEL = (
    Reply(
        (
            Call("recall", {"input": "d"}, "1"),
            Call("lookup", {"q": "a"}, "2"),
            Call("search", {"input": "b"}, "3"),
            Call("weigh", {"q": "c"}, "4"),
        ),
        text="let me see",
    ),
    Reply((Call("lookup", {"n": 2, "q": "a"}, "5"), Call("unknown", {}, "6"), Call("quote", {"q": "a"}, "7"))),
    Reply(text="done"),
)
SEQUENTIAL = (
    Reply((Call("recall", {"input": "d"}, "1"),), text="let me see"),
    Reply((Call("search", {"input": "b"}, "2"),)),
    Reply((Call("lookup", {"q": "a"}, "3"),)),
    Reply(text="done"),
)
REACT = (thinking(Call("lookup", {"q": "a"})), thinking(Call("search", {"input": "b"})), thinking())


async def execute(code: str) -> str:
    return f"ran {code}"


def latency_s(name: str, _argument: str) -> float:
    return LATENCIES.get(name, 0.2)


def tools(log: ToolLog | None = None) -> list[Any]:
    log = log or ToolLog(latency_s)
    return [*make_tools(log), confirmation(log)]


AGENTS: dict[str, Callable[[], Any]] = {
    "streaming": lambda: function_agent(PARALLEL, tools()),
    "not streaming": lambda: function_agent(PARALLEL, tools(), streaming=False),
    "in a workflow": lambda: alone(function_agent(PARALLEL, tools())),
    "handing off": lambda: team([PARALLEL[0], Reply((HANDOFF,)), *PARALLEL[1:], Reply(text="done")], tools()),
    "react": lambda: react_agent(REACT, tools()),
    "code": lambda: code_agent([executing("1 + 1"), Reply(text="done")], [], execute),
}


def differences(one: Seen, other: Seen) -> list[str]:
    return [each.name for each in fields(Seen) if getattr(one, each.name) != getattr(other, each.name)]


@pytest.mark.parametrize("agent", AGENTS)
def test_two_stock_runs_are_equal(agent: str) -> None:
    one, other = (run_virtual(lambda: run(AGENTS[agent]())) for _ in range(2))
    assert differences(one, other) == []
    assert (one.error, one.tasks_left, one.threads_left) == (None, [], [])
    assert one.memory


@pytest.mark.parametrize("make", [function_agent, react_agent])
@pytest.mark.parametrize("give_up", [GiveUp(0.7), GiveUp(1.5, "stop_awaiting"), GiveUp(2.0, "abort"), GiveUp(2.5)])
def test_two_stock_runs_that_are_given_up_are_equal(make: Any, give_up: GiveUp) -> None:
    replies = SEQUENTIAL if make is function_agent else REACT
    one, other = (run_virtual(lambda: run(make(replies, tools()), give_up=give_up)) for _ in range(2))
    assert differences(one, other) == []
    assert one.duration_s == give_up.after_s
    assert (one.tasks_left, one.threads_left) == ([], [])


def test_what_is_seen_of_a_run() -> None:
    seen = run_virtual(lambda: run(AGENTS["streaming"]()))
    assert seen.duration_s == pytest.approx(1.0 + 1.3 + 1.0 + 0.413 + 1.0)
    assert [event["tool_id"] for event in seen.of("ToolCallResult")] == ["2", "3", "4", "1", "6", "7", "5"]
    assert seen.tools_said[-3:] == [
        "Tool unknown not found. Please select a tool that is available.",
        "quote of a EUR",
        "lookup of a2",
    ]
    assert [len(request["messages"]) for request in seen.requests] == [1, 6, 10]
    assert {entry[0] for entry in seen.trace} >= {"enter", "exit", "LLMChatStartEvent", "RetrievalEndEvent"}
    assert {entry[1] for entry in seen.callbacks} >= {"llm", "retrieve", "query"}


def test_an_error_of_the_model() -> None:
    broken = [Reply(text="no", error=ConnectionError("the model is down")), Reply(text="done")]
    one, other = (run_virtual(lambda: run(function_agent(broken, tools()))) for _ in range(2))
    assert differences(one, other) == []
    assert "the model is down" in str(one.error)

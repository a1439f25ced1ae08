"""What waits for a human does not run before the human has spoken; the rest of the run is sped up as ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from spectool_core import Speculation, mark, speculatable
from spectool_core.calls import ToolCall
from spectool_core.events import LaunchSkipped
from spectool_core.runs import RunContext
from spectool_core.testing import run_virtual
from spectool_langgraph import SpeculationMiddleware
from spectool_langgraph import _pregel as pregel
from tests.guessing import Call, Reply, outcomes, predicting
from tests.langgraph.agents import QUESTION, Seen, build, make_tools, run
from tests.langgraph.scripted import ScriptedChatModel
from tests.langgraph.test_middleware import SpeculationPlaceholder
from tests.tool_log import ToolLog

LOOK = Reply(calls=(Call("lookup", {"q": "a"}, "call_0"),))
BOTH = Reply(calls=(Call("lookup", {"q": "a"}, "call_0"), Call("weigh", {"q": "b"}, "call_1")))
DONE = Reply(text="done")
THREAD: Any = {"configurable": {"thread_id": "t"}}


class Skips:
    """A hook that keeps why calls were not run early."""

    def __init__(self) -> None:
        self.reasons: list[tuple[str, str]] = []

    def __call__(self, event: Any) -> None:
        if isinstance(event, LaunchSkipped):
            self.reasons.append((event.tool, event.reason))


def steps(
    make_graph: Callable[[Speculation | None, ToolLog], Any],
    speculation: Speculation | None,
    given: Sequence[Any],
    *,
    config: Any = THREAD,
    **options: Any,
) -> tuple[list[Seen], list[list[str]]]:
    """Run one thread through several inputs: what was seen, and what had started by the end of each."""
    log = ToolLog(lambda *_: 0.4)

    async def main() -> tuple[list[Seen], list[list[str]]]:
        graph = make_graph(speculation, log)
        seen, started = [], []
        for each in given:
            seen.append(await run(graph, each, config=config, **options))
            started.append([name for name, _, event in log.events if event == "started"])
        return seen, started

    return run_virtual(main)


def messages_of(seen: Sequence[Seen]) -> list[Any]:
    return [each.messages for each in seen]


# Breakpoints


def state_graph(**compiling: Any) -> Callable[[Speculation | None, ToolLog], Any]:
    return lambda speculation, log: build([BOTH, DONE], make_tools(log), speculation).compile(
        checkpointer=InMemorySaver(), **compiling
    )


@pytest.mark.parametrize(
    "breakpoints",
    [{"interrupt_before": ["tools"]}, {"interrupt_after": ["agent"]}, {"interrupt_before": "*"}],
    ids=repr,
)
@pytest.mark.parametrize("when", ["compiled", "run"])
def test_breakpoints(breakpoints: dict[str, Any], when: str) -> None:
    graph = state_graph(**(breakpoints if when == "compiled" else {}))
    given = [QUESTION, None, None]
    skips = Skips()
    speculation = predicting([BOTH, DONE], hooks=[skips])
    options = breakpoints if when == "run" else {}
    stock, stock_started = steps(graph, None, given, **options)
    ours, started = steps(graph, speculation, given, **options)
    assert messages_of(ours) == messages_of(stock)
    assert started == stock_started
    assert started[0] == []
    assert ("lookup", "needs_approval") in skips.reasons
    assert speculation.statistics().num_launched == 0


def test_without_breakpoints_the_same_graph_gains() -> None:
    """So that the tests above could fail."""
    speculation = predicting([BOTH, DONE])
    steps(state_graph(), speculation, [QUESTION])
    assert outcomes(speculation) == (2, 0, 0)


@pytest.mark.parametrize("where", ["outer", "inner"])
def test_a_breakpoint_of_a_graph_around_it_or_of_its_own(where: str) -> None:
    def nested(speculation: Speculation | None, log: ToolLog) -> Any:
        breakpoints = {"interrupt_before": ["tools"]}
        inner = build([BOTH, DONE], make_tools(log), speculation)
        outer = StateGraph(MessagesState)
        outer.add_node("agent", inner.compile(**(breakpoints if where == "inner" else {})))
        outer.add_node("tools", lambda state: {})
        outer.add_edge(START, "agent")
        outer.add_edge("agent", "tools")
        return outer.compile(checkpointer=InMemorySaver(), **(breakpoints if where == "outer" else {}))

    speculation = predicting([BOTH, DONE])
    stock, stock_started = steps(nested, None, [QUESTION, None])
    ours, started = steps(nested, speculation, [QUESTION, None])
    assert messages_of(ours) == messages_of(stock)
    assert started == stock_started
    assert speculation.statistics().num_launched == 0


def test_a_loop_that_cannot_be_read_means_nothing_runs_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """LangGraph's internals may change: then nothing is guessed."""
    skips = Skips()
    speculation = predicting([BOTH, DONE], hooks=[skips])
    monkeypatch.setattr(pregel, "HumanInTheLoopMiddleware", None)  # isinstance(..., None) raises
    ours, _ = steps(state_graph(), speculation, [QUESTION])
    assert ours[0].error is None
    assert speculation.statistics().num_launched == 0
    assert ("lookup", "needs_approval") in skips.reasons


@pytest.mark.parametrize("key", ["schedule_task", "keywords"])
def test_a_run_that_cannot_be_found_starts_no_turn(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import spectool_langgraph._callback as callback
    import spectool_langgraph._serving as serving

    given = pregel.running_graph

    class Other:
        keywords: dict[str, Any] = {}  # noqa: RUF012

    def changed(config: Any = None) -> Any:
        graph = given(config)
        assert graph is not None
        call = Other() if key == "schedule_task" else object()
        configurable = {**graph.config["configurable"], "__pregel_call": call}
        return given({**graph.config, "configurable": configurable})

    monkeypatch.setattr(callback, "running_graph", changed)
    monkeypatch.setattr(serving, "running_graph", changed)
    speculation = predicting([BOTH, DONE])
    stock, _ = steps(state_graph(), None, [QUESTION])
    ours, _ = steps(state_graph(), speculation, [QUESTION])
    assert messages_of(ours) == messages_of(stock)
    assert speculation.statistics().num_turns == 0


# The approval middleware


def approving(
    interrupt_on: dict[str, Any], *, replies: Sequence[Reply] = (BOTH, DONE), last: bool = True, **options: Any
) -> Callable[[Speculation | None, ToolLog], Any]:
    def make(speculation: Speculation | None, log: ToolLog) -> Any:
        ours = SpeculationPlaceholder() if speculation is None else SpeculationMiddleware(speculation)
        approval = HumanInTheLoopMiddleware(interrupt_on, **options)
        return create_agent(
            ScriptedChatModel(replies=list(replies)),
            make_tools(log),
            middleware=[approval, ours] if last else [ours, approval],
            checkpointer=InMemorySaver(),
        )

    return make


APPROVE: Any = {"type": "approve"}
REJECT: Any = {"type": "reject", "message": "no"}
EDIT: Any = {"type": "edit", "edited_action": {"name": "weigh", "args": {"q": "edited"}}}


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("decision", [APPROVE, REJECT, EDIT], ids=lambda decision: decision["type"])
@pytest.mark.filterwarnings("ignore:SpeculationMiddleware is not the last")
def test_an_approved_tool_waits_and_the_others_do_not(decision: Any, last: bool) -> None:
    graph = approving({"weigh": True}, last=last)
    given = [QUESTION, Command(resume={"decisions": [decision]})]
    skips = Skips()
    speculation = predicting([BOTH, DONE], hooks=[skips])
    stock, stock_started = steps(graph, None, given)
    ours, started = steps(graph, speculation, given)
    assert messages_of(ours) == messages_of(stock)
    assert stock_started[0] == []
    assert started[0] == ["lookup"]
    assert started[1].count("weigh") == stock_started[1].count("weigh") == (0 if decision is REJECT else 1)
    assert ("weigh", "needs_approval") in skips.reasons


def test_approval_of_each_call() -> None:
    """The newer mode asks inside the tool call: the tool must not have run by then either."""
    graph = approving({"weigh": True}, interrupt_mode="per_call")

    def resume(decision: Any) -> list[Any]:
        return [QUESTION, Command(resume=decision)]

    for decision in (APPROVE, REJECT):
        speculation = predicting([BOTH, DONE])
        stock, stock_started = steps(graph, None, resume(decision))
        ours, started = steps(graph, speculation, resume(decision))
        assert messages_of(ours) == messages_of(stock)
        assert "weigh" not in started[0]
        assert started[1].count("weigh") == stock_started[1].count("weigh")


def test_a_tool_that_needs_no_approval_gains_in_the_same_agent() -> None:
    speculation = predicting([LOOK, DONE])
    steps(approving({"weigh": True, "note": False}, replies=[LOOK, DONE]), speculation, [QUESTION])
    assert outcomes(speculation) == (1, 0, 0)


def test_a_conditional_approval_counts_as_one() -> None:
    interrupt_on = {"lookup": {"allowed_decisions": ["approve"], "when": lambda request: False}}
    speculation = predicting([LOOK, DONE])
    _, started = steps(approving(interrupt_on, replies=[LOOK, DONE]), speculation, [QUESTION])
    assert started == [["lookup"]]
    assert outcomes(speculation) == (0, 0, 1)


def test_approval_in_an_agent_inside_another_graph() -> None:
    def nested(speculation: Speculation | None, log: ToolLog) -> Any:
        outer = StateGraph(MessagesState)
        outer.add_node("agent", approving({"lookup": True}, replies=[LOOK, DONE])(speculation, log))
        outer.add_edge(START, "agent")
        return outer.compile(checkpointer=InMemorySaver())

    given = [QUESTION, Command(resume={"decisions": [REJECT]})]
    speculation = predicting([LOOK, DONE])
    stock, _ = steps(nested, None, given)
    ours, started = steps(nested, speculation, given)
    assert messages_of(ours) == messages_of(stock)
    assert started[-1] == []


def test_create_agent_with_breakpoints() -> None:
    def broken(speculation: Speculation | None, log: ToolLog) -> Any:
        return create_agent(
            ScriptedChatModel(replies=[LOOK, DONE]),
            make_tools(log),
            middleware=[SpeculationPlaceholder() if speculation is None else SpeculationMiddleware(speculation)],
            interrupt_before=["tools"],
            checkpointer=InMemorySaver(),
        )

    speculation = predicting([LOOK, DONE])
    stock, _ = steps(broken, None, [QUESTION, None])
    ours, started = steps(broken, speculation, [QUESTION, None])
    assert messages_of(ours) == messages_of(stock)
    assert started == [[], ["lookup"]]


# The mark and the user's own say


def remarked(log: ToolLog, **policy: Any) -> list[BaseTool]:
    return mark(make_tools(log), names=["lookup"], **policy)


def test_a_mark_that_says_so() -> None:
    def graph(speculation: Speculation | None, log: ToolLog) -> Any:
        return build([BOTH, DONE], remarked(log, needs_approval=True), speculation).compile()

    skips = Skips()
    speculation = predicting([BOTH, DONE], hooks=[skips])
    ours, started = steps(graph, speculation, [QUESTION])
    assert ours[0].error is None
    assert started == [["weigh", "lookup"]]
    assert skips.reasons == [("lookup", "needs_approval")]
    assert outcomes(speculation, "weigh") == (1, 0, 0)
    assert outcomes(speculation, "lookup") == (0, 0, 1)


def test_a_tool_that_cannot_run_early_may_still_be_marked_as_needing_approval() -> None:
    def ends(q: str) -> str:
        """End the run."""
        return q

    final = speculatable(tool(return_direct=True)(ends), needs_approval=True)
    build([DONE], [final], predicting([DONE]))


@pytest.mark.parametrize("tenant", ["trusted", "other"])
def test_may_speculate_sees_the_call_and_the_run(tenant: str) -> None:
    asked: list[tuple[str, dict[str, Any], Any]] = []

    def may_speculate(call: ToolCall, context: RunContext) -> bool:
        asked.append((call.name, dict(call.arguments), context.thread_id))
        return context.configurable["tenant"] == "trusted"

    skips = Skips()
    speculation = predicting([BOTH, DONE], may_speculate=may_speculate, hooks=[skips])
    config = {"configurable": {"thread_id": "t", "tenant": tenant}}
    ours, _ = steps(state_graph(), speculation, [QUESTION], config=config)
    assert ours[0].error is None
    assert asked == [("lookup", {"q": "a"}, "t"), ("weigh", {"q": "b"}, "t")]
    assert outcomes(speculation) == ((2, 0, 0) if tenant == "trusted" else (0, 0, 2))
    assert skips.reasons == ([] if tenant == "trusted" else [("lookup", "denied"), ("weigh", "denied")])


def test_a_may_speculate_that_fails_denies(caplog: pytest.LogCaptureFixture) -> None:
    def may_speculate(call: ToolCall, context: RunContext) -> bool:
        raise KeyError("tenant")

    speculation = predicting([BOTH, DONE], may_speculate=may_speculate)
    ours, started = steps(state_graph(), speculation, [QUESTION])
    assert ours[0].error is None
    assert started == [["lookup", "weigh"]]
    assert speculation.statistics().num_launched == 0
    assert "may_speculate(lookup) failed" in caplog.text


# A node of the user's that asks


def test_a_review_node_before_the_tools_gets_its_answer() -> None:
    """The graph asks between model and tools. A mark is consent, so the tool runs early; only the human answers."""
    answers: list[Any] = []

    def graph(speculation: Speculation | None, log: ToolLog) -> Any:
        from tests.langgraph.agents import tool_node

        tools = make_tools(log)
        model = ScriptedChatModel(replies=[LOOK, DONE]).bind_tools(tools)

        async def agent(state: MessagesState) -> Any:
            return {"messages": [await model.ainvoke(state["messages"])]}

        async def review(state: MessagesState) -> Command[Any]:
            answers.append(interrupt("run it?"))
            return Command(goto="tools" if answers[-1] == "yes" else "__end__")

        built = StateGraph(MessagesState)
        built.add_node("agent", agent)
        built.add_node("review", review, destinations=("tools", "__end__"))
        built.add_node("tools", tool_node(tools, speculation))
        built.add_edge(START, "agent")
        built.add_conditional_edges(
            "agent", lambda state: "review" if state["messages"][-1].tool_calls else "__end__", ["review", "__end__"]
        )
        built.add_edge("tools", "agent")
        return built.compile(checkpointer=InMemorySaver())

    for answer in ("yes", "no"):
        answers.clear()
        speculation = predicting([LOOK, DONE])
        given = [QUESTION, Command(resume=answer)]
        stock, _ = steps(graph, None, given)
        ours, _ = steps(graph, speculation, given)
        assert messages_of(ours) == messages_of(stock)
        assert answers == [answer, answer]

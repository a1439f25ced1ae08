"""The agent: a LangGraph of one chat model and one tool node. Stock and speculative differ in that node alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import BaseTool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel, ValidationError

from examples.demo.archive import Archive
from examples.demo.tools import ToolLog, ToolRun, archive_tools
from spectool_core import Speculation
from spectool_core.events import Event
from spectool_core.speculators import ModelSpeculator
from spectool_langgraph import SpeculativeToolNode

__all__ = ["AgentRun", "Call", "Early", "Setup", "Turn", "run_agent"]

_INSTRUCTIONS = (
    "You answer questions about the Marrowfell Mountain Railway from its papers. Look things up with the tools, never "
    "guess; ask for several tools at once where none waits for another. Answer in two or three sentences."
)

Call: TypeAlias = tuple[str, Mapping[str, Any]]
"""A tool's name and the arguments that it receives, defaults included."""

Early: TypeAlias = Literal["hit", "join", "wasted"]
"""What became of a tool run that began before the main model had answered."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs share.

    Args:
        model: the main model.
        speculator: the speculative model.
        site: URL of the page server.
        tool_delay_s: declared network delay of each tool call.
    """

    model: BaseChatModel
    speculator: ModelSpeculator
    site: str
    tool_delay_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: the main model generates, then the tools that it asked for run. Times are on the event loop's clock.

    Args:
        number: from 1.
        started_s: the prompt goes to the main model.
        answered_s: it has answered.
        ended_s: its tools are done; `answered_s` in a turn without calls.
        calls: what it asked for.
        tool_runs: what ran in this time, asked for or not.
    """

    number: int
    started_s: float
    answered_s: float
    ended_s: float
    calls: Sequence[Call]
    tool_runs: Sequence[ToolRun]

    def early(self, run: ToolRun) -> Early | None:
        """What became of a run that began before the main model had answered; None if it began after."""
        if run.started_s >= self.answered_s:
            return None
        call = run.tool, run.arguments
        if run.is_cancelled or call not in self.calls or self._ran_after_all(call):
            return "wasted"
        return "hit" if run.ended_s <= self.answered_s else "join"

    def served(self, call: Call) -> Early | None:
        """How one of `calls` was served: by an early run, finished or joined, or by the tool itself (None)."""
        fates = [self.early(run) for run in self.tool_runs if (run.tool, run.arguments) == call]
        return next((fate for fate in fates if fate in ("hit", "join")), None)

    def _ran_after_all(self, call: Call) -> bool:
        # An early result is not used when the same answer also writes: the read has to see the write.
        return any(run.started_s >= self.answered_s and (run.tool, run.arguments) == call for run in self.tool_runs)


@dataclass(frozen=True, slots=True)
class AgentRun:
    """One whole run of the agent.

    Args:
        messages: the final state's.
        turns: in order; the last one asks for no tool.
        notes: what the agent wrote into the note book.
        events: what the library reported; empty for a stock run.
        num_prompt_tokens: read by the speculator.
        num_completion_tokens: written by the speculator.
    """

    messages: Sequence[AnyMessage]
    turns: Sequence[Turn]
    notes: Sequence[tuple[str, str]]
    events: Sequence[Event]
    num_prompt_tokens: int
    num_completion_tokens: int

    @property
    def answer(self) -> str:
        """The agent's last words."""
        return self.messages[-1].text

    @property
    def duration_s(self) -> float:
        """From the first prompt to the last answer."""
        return self.turns[-1].ended_s - self.turns[0].started_s


async def run_agent(question: str, setup: Setup, *, is_speculative: bool, on_turn: Callable[[Turn], None]) -> AgentRun:
    """Ask the agent `question`, with a fresh archive and fresh tools; `on_turn` hears of each turn as it ends."""
    log, events = ToolLog(), list[Event]()
    before = setup.speculator.statistics()
    with closing(Archive()) as archive:
        tools = archive_tools(archive, setup.site, log, delay_s=setup.tool_delay_s)
        if is_speculative:
            node: ToolNode = SpeculativeToolNode(tools, Speculation([setup.speculator], hooks=[events.append]))
        else:
            node = ToolNode(tools)
        course = _Course(setup.model, tools, log)
        messages = await course.run(node, question, on_turn)
        await log.until_idle()
        notes = archive.notes()
    after = setup.speculator.statistics()
    return AgentRun(
        messages,
        course.turns(),
        notes,
        events,
        num_prompt_tokens=after.num_prompt_tokens - before.num_prompt_tokens,
        num_completion_tokens=after.num_completion_tokens - before.num_completion_tokens,
    )


@dataclass(slots=True)
class _TurnTimes:
    started_s: float
    answered_s: float
    ended_s: float
    calls: list[Call]


class _Course:
    """Runs the graph once and writes down when its turns began, were answered and ended."""

    def __init__(self, model: BaseChatModel, tools: Sequence[BaseTool], log: ToolLog) -> None:
        self._model = model.bind_tools(tools)
        self._tools = {tool.name: tool for tool in tools}
        self._log = log
        self._times: list[_TurnTimes] = []

    async def run(self, node: ToolNode, question: str, on_turn: Callable[[Turn], None]) -> Sequence[AnyMessage]:
        """Run to the final answer and give the state's messages."""
        graph = StateGraph(MessagesState)
        graph.add_node("model", self._ask)
        graph.add_node("tools", node)
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        start = MessagesState(messages=[SystemMessage(_INSTRUCTIONS), HumanMessage(question)])
        messages: Sequence[AnyMessage] = ()
        async for state in graph.compile().astream(start, stream_mode="values"):
            messages = state["messages"]
            if isinstance(messages[-1], ToolMessage):
                self._times[-1].ended_s = _now()
                on_turn(self.turns()[-1])
        return messages

    def turns(self) -> list[Turn]:
        """The turns so far, with the tool runs that have ended."""
        next_starts = [times.started_s for times in self._times[1:]] + [math.inf]
        return [
            Turn(
                number,
                times.started_s,
                times.answered_s,
                times.ended_s,
                times.calls,
                [run for run in self._log.runs if times.started_s <= run.started_s < next_start_s],
            )
            for number, (times, next_start_s) in enumerate(zip(self._times, next_starts, strict=True), 1)
        ]

    async def _ask(self, state: MessagesState) -> MessagesState:
        started_s = _now()
        message = await self._model.ainvoke(state["messages"])
        answered_s = _now()
        calls = [self._received(call["name"], call["args"]) for call in message.tool_calls]
        self._times.append(_TurnTimes(started_s, answered_s, answered_s, calls))
        return MessagesState(messages=[message])

    def _received(self, name: str, arguments: Mapping[str, Any]) -> Call:
        """The call as its tool receives it; as it is where the tool would refuse it."""
        schema = self._tools[name].get_input_schema() if name in self._tools else None
        if schema is None or not issubclass(schema, BaseModel):
            return name, arguments
        try:
            return name, schema.model_validate(arguments).model_dump()
        except ValidationError:
            return name, arguments


def _now() -> float:
    return asyncio.get_running_loop().time()

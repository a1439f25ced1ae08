"""The turns of each agent run, and which of them a tool call belongs to."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool

from spectool_core.calls import ToolCall
from spectool_core.runs import RunContext
from spectool_core.speculation import Speculation
from spectool_core.speculators.stream import AnswerStream
from spectool_core.turn import Turn
from spectool_langgraph._binding import ToolBinding
from spectool_langgraph._pregel import GraphRun

__all__ = ["AgentRun", "AgentRuns", "OpenTurn"]

# More model calls than one run makes between two steps of its tools, in however many branches.
_MAX_OPEN_TURNS = 1024


class OpenTurn:
    """A turn of one `Speculation`, from the main model's call to the last of its tool calls.

    Args:
        turn: the turn itself.
        speculation: whose turn it is.
        marked: the marked tools that may be called, by name.
        graph: where the main model was called.
        messages: the prompt, to tell a retry from a new question.
        answer: where what the main model writes is fed; None if nobody reads it.

    `calls` is what the main model answered; `failed` is set while its last attempt has failed.
    """

    def __init__(
        self,
        turn: Turn,
        speculation: Speculation,
        marked: Mapping[str, ToolBinding],
        graph: GraphRun,
        messages: Sequence[BaseMessage],
        answer: AnswerStream | None = None,
    ) -> None:
        self.turn = turn
        self.speculation = speculation
        self.marked = marked
        self.loop = graph.loops[0]
        self.step = graph.step
        self.messages = messages
        self.answer = answer
        self.failed = False
        self.calls: Sequence[ToolCall] = ()

    def is_retried_by(self, speculation: Speculation, graph: GraphRun, messages: Sequence[BaseMessage]) -> bool:
        """Whether a call of the main model repeats this turn's, which failed: a retry or a fallback."""
        return (
            self.failed
            and self.speculation is speculation
            and self.loop is graph.loops[0]
            and self.step == graph.step
            and self.messages == messages
        )

    def asked_for(self, call: ToolCall, tool: BaseTool | None) -> bool:
        """Whether the answer asked for `call`, and `tool`, which is about to run, is the tool that it meant."""
        known = self.marked.get(call.name)
        if known is None or known.tool is not tool:
            return False
        try:
            return call in self.calls
        except Exception:  # arguments that a wrapper put in need not be comparable
            return False

    def is_abandoned_by(self, later: OpenTurn) -> bool:
        """Whether the graph has moved on to `later` from this turn, in which the main model failed."""
        return self.failed and self.loop is later.loop and self.step < later.step


class AgentRun:
    """One run of a root graph: what its turns share, and the turns that are not settled."""

    def __init__(self, graph: GraphRun) -> None:
        thread_id = graph.configurable.get("thread_id")
        self.context = RunContext(
            run=self, thread_id=None if thread_id is None else str(thread_id), configurable=graph.configurable
        )
        self._lock = threading.Lock()
        self._closed = False
        self._turns: list[OpenTurn] = []

    def failed_turn(
        self, speculation: Speculation, graph: GraphRun, messages: Sequence[BaseMessage]
    ) -> OpenTurn | None:
        """The turn that a new call of the main model continues, if it is a retry."""
        with self._lock:
            return next((turn for turn in self._turns if turn.is_retried_by(speculation, graph, messages)), None)

    def add(self, turn: OpenTurn) -> None:
        """Keep a new turn; settle those that can have no more calls."""
        with self._lock:
            over = self._turns[: -_MAX_OPEN_TURNS + 1]
            over += [other for other in self._turns if other.is_abandoned_by(turn) and other not in over]
            self._turns = [other for other in self._turns if other not in over]
            if self._closed:
                over.append(turn)
            else:
                self._turns.append(turn)
        for other in over:
            other.turn.settle()

    def turn_of(self, call: ToolCall, tool: BaseTool | None, speculation: Speculation) -> Turn | None:
        """The latest turn whose answer asked for this very call: servers repeat ids such as `call_0`."""
        with self._lock:
            turns = list(reversed(self._turns))
        for open_turn in turns:
            if open_turn.speculation is speculation and open_turn.asked_for(call, tool):
                return open_turn.turn
        return None

    def close(self) -> None:
        """The run has ended: settle every turn and forget its results."""
        with self._lock:
            self._closed = True
            turns, self._turns = self._turns, []
        for open_turn in turns:
            open_turn.turn.settle()
        for speculation in {open_turn.speculation for open_turn in turns}:
            speculation.end_run(self.context)


class AgentRuns:
    """The agent runs of this process, each for as long as its root graph runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: WeakKeyDictionary[Any, AgentRun] = WeakKeyDictionary()

    def find_or_start(self, graph: GraphRun) -> AgentRun | None:
        """The run that `graph` is part of; None if its end could not be known."""
        with self._lock:
            run = self._runs.get(graph.root)
            if run is None:
                run = AgentRun(graph)
                if not graph.when_done(run.close):
                    return None
                self._runs[graph.root] = run
            return run

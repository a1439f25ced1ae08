"""One run of an agent or workflow: its turns, for as long as it runs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from llama_index.core.workflow import Context
from workflows.errors import WorkflowRuntimeError

from spectool_core.bounds import Bound
from spectool_core.calls import ToolCall
from spectool_core.fences import Write
from spectool_core.runs import RunContext
from spectool_core.speculation import Speculation
from spectool_core.turn import Turn
from spectool_llamaindex._isolation import run_tags
from spectool_llamaindex._toolbox import StepToolbox

__all__ = ["RUNS", "AgentRun", "AgentRuns", "OpenTurn"]

_logger = logging.getLogger("spectool")

# What LlamaIndex gives a step that does not say otherwise.
_NUM_WORKERS = 4

# Far more than one run has between two of its steps.
_MAX_OPEN_TURNS = 1024


class OpenTurn:
    """One answer of the main model, until its tool calls have ended.

    Args:
        speculation: whose turn it is.
        toolbox: the tools that the answer may name.
        turn: the core's turn; None where no call could have been run early.
        calls: the answer.
    """

    def __init__(
        self, speculation: Speculation, toolbox: StepToolbox, turn: Turn | None, calls: Sequence[ToolCall]
    ) -> None:
        self.speculation = speculation
        self.toolbox = toolbox
        self.turn = turn
        self.calls = calls
        self._writes: list[Write] = []

    def asked_for(self, call: ToolCall, tool: object) -> bool:
        """Whether the answer asked for `call` of this very tool."""
        binding = self.toolbox.bindings.get(call.name)
        if binding is None or binding.tool is not tool:
            return False
        return any(asked.name == call.name and asked.arguments == call.arguments for asked in self.calls)

    def begin_writes(self, context: RunContext, speculations: Iterable[Speculation]) -> None:
        """Those of the answer's calls that may write begin, for whoever has results of this run."""
        for call in self.calls:
            policy = self.toolbox.policy(call.name)
            if policy is None or policy.writes:
                writes = policy.writes if policy is not None else None
                self._writes += [each.begin_write(context, writes) for each in speculations]

    def close(self) -> None:
        """The calls have ended, or will not come."""
        for write in self._writes:
            write.end()
        if self.turn is not None:
            self.turn.settle()


class AgentRun:
    """What the turns of one run share, and those that are open.

    Args:
        num_workers: tool calls that stock runs at once; as many early runs may be in flight.
    """

    def __init__(self, num_workers: int) -> None:
        self.context = RunContext(run=self, configurable=run_tags())
        self.cap = Bound(num_workers)
        self._lock = threading.Lock()
        self._closed = False
        self._asked: set[Turn] = set()
        self._turns: list[OpenTurn] = []
        self._speculations: set[Speculation] = set()

    def join(self, speculation: Speculation) -> None:
        """Take note of whose results belong to this run."""
        self._speculations.add(speculation)

    def ask(self, turn: Turn) -> None:
        """The main model has been asked; if the run ends meanwhile, so does the turn."""
        with self._lock:
            if not self._closed:
                self._asked.add(turn)
                return
        turn.settle()

    def answered(self, turn: Turn) -> None:
        """The main model has answered, or will not."""
        self._asked.discard(turn)

    def add(self, turn: OpenTurn) -> None:
        """Keep an answered turn until its calls have ended."""
        with self._lock:
            over = [turn] if self._closed else self._turns[: -_MAX_OPEN_TURNS + 1]
            self._turns = [other for other in [*self._turns, turn] if other not in over]
        turn.begin_writes(self.context, tuple(self._speculations))
        for other in over:
            other.close()

    def turn_of(self, call: ToolCall, tool: object, speculation: Speculation) -> Turn | None:
        """The turn whose answer asked for this very call of this very tool."""
        with self._lock:
            turns = list(reversed(self._turns))
        for open_turn in turns:
            if open_turn.speculation is speculation and open_turn.asked_for(call, tool):
                return open_turn.turn
        return None

    def close_turns(self) -> None:
        """The calls of every answer so far have ended."""
        with self._lock:
            turns, self._turns = self._turns, []
        for turn in turns:
            turn.close()

    def close(self, _: object = None) -> None:
        """The run has ended: forget its results."""
        with self._lock:
            self._closed = True
            speculations, self._speculations = self._speculations, set()
            asked, self._asked = self._asked, set()
        for turn in asked:  # a run that is aborted leaves its model's call to itself
            turn.settle()
        self.close_turns()
        for speculation in speculations:
            speculation.end_run(self.context)


class AgentRuns:
    """The runs of this process, each for as long as the task that runs its workflow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: WeakKeyDictionary[asyncio.Future[Any], AgentRun] = WeakKeyDictionary()
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._runs)

    def find_or_start(self, context: Context) -> AgentRun | None:
        """The run whose step has `context`; None if its end could not be known."""
        task = _task_of(context)
        if task is None:
            self._warn(context)
            return None
        with self._lock:
            run = self._runs.get(task)
            if run is None:
                run = self._runs[task] = AgentRun(_num_workers(context))
                task.add_done_callback(run.close)
                task.add_done_callback(self._forget)
            return run

    def current(self) -> AgentRun | None:
        """The run whose step is running here, if it has had a turn."""
        try:
            task = _task_of(Context.get_step_context())
        except WorkflowRuntimeError:
            return None
        return self._runs.get(task) if task is not None else None

    def _forget(self, task: asyncio.Future[Any]) -> None:
        with self._lock:
            self._runs.pop(task, None)

    def _warn(self, context: Context) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("the runtime of %s does not tell when a run ends; its agents stay stock", type(context))


RUNS = AgentRuns()


def _adapter_of(context: Any) -> Any:
    adapter = getattr(getattr(context, "_face", None), "_internal_adapter", None)
    while (inner := getattr(adapter, "_decorated", None)) is not None:  # `verbose=True` wraps it, for one
        adapter = inner
    return adapter


def _task_of(context: Any) -> asyncio.Future[Any] | None:
    """The task that runs the whole workflow. Not public in LlamaIndex's workflows, so found by looking."""
    task = getattr(getattr(_adapter_of(context), "_queues", None), "complete", None)
    return task if isinstance(task, asyncio.Future) else None


def _num_workers(context: Any) -> int:
    workflow = getattr(getattr(context, "_face", None), "_workflow", None)
    config = getattr(getattr(workflow, "call_tool", None), "_step_config", None)
    num_workers = getattr(config, "num_workers", None)
    return num_workers if isinstance(num_workers, int) and num_workers > 0 else _NUM_WORKERS

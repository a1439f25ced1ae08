"""One step of an agent: from the prompt that it writes to the event stream to its model's answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.agent.workflow import AgentInput, AgentStream
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import BaseTool, ToolSelection

from spectool_core.calls import ToolCall
from spectool_core.engine import set_current_turn
from spectool_core.speculation import Speculation
from spectool_core.speculators.stream import AnswerStream
from spectool_core.turn import Turn
from spectool_llamaindex._agent_run import AgentRun, OpenTurn
from spectool_llamaindex._asking import callable_tools, prompt_of
from spectool_llamaindex._isolation import unseen
from spectool_llamaindex._proxy import Proxy
from spectool_llamaindex._toolbox import StepToolbox, schema_of
from spectool_llamaindex.tool import SpeculativeTool, marked

__all__ = ["AgentStep", "Listening"]

_logger = logging.getLogger("spectool")


class Listening(Proxy):
    """A workflow context whose event stream `heard` listens to."""

    def __init__(self, context: Any, heard: Callable[[Any], None]) -> None:
        super().__init__(context)
        self._self_heard = heard

    def write_event_to_stream(self, event: Any) -> None:
        """Write, then let know."""
        self.__wrapped__.write_event_to_stream(event)
        self._self_heard(event)


class AgentStep:
    """The main model's one answer in `agent`'s step, which belongs to `run`."""

    def __init__(
        self, agent: BaseWorkflowAgent, speculation: Speculation, run: AgentRun, tools: Sequence[BaseTool]
    ) -> None:
        self._agent = agent
        self._speculation = speculation
        self._run = run
        self._tools = callable_tools(agent, tools)
        by_name = {tool.metadata.name: tool for tool in self._tools}  # of one name, stock calls the last
        bindings = [binding for tool in by_name.values() if (binding := marked(tool)) is not None]
        served = {str(name) for name, tool in by_name.items() if isinstance(tool, SpeculativeTool)}
        self._toolbox = StepToolbox({binding.name: binding for binding in bindings}, served, tools, run.cap)
        self._turn: Turn | None = None
        self._answer: AnswerStream | None = None
        run.join(speculation)
        set_current_turn(None)

    def heard(self, event: Any) -> None:
        """The agent has written `event` to the stream; its prompt is what its model is asked next."""
        if isinstance(event, AgentStream) and self._answer is not None:
            self._answer.feed(_delta(event.raw))
        if not isinstance(event, AgentInput) or self._turn is not None:
            return
        if not (self._speculation.is_on and self._toolbox.can_run_early):
            return
        try:
            self._turn = unseen().run(self._start, event.input)
            set_current_turn(self._turn.engine_turn)
            self._run.ask(self._turn)
        except Exception:
            _logger.exception("no turn was started")

    def answered(self, selections: Sequence[ToolSelection]) -> None:
        """The model has answered; its calls come next."""
        calls = [ToolCall(chosen.tool_name, chosen.tool_kwargs, chosen.tool_id) for chosen in selections]
        if calls:
            self._run.add(OpenTurn(self._speculation, self._toolbox, self._turn, calls))
        if self._turn is not None:
            self._run.answered(self._turn)
            self._turn.answer(calls)

    def failed(self) -> None:
        """There will be no answer."""
        if self._turn is not None:
            self._run.answered(self._turn)
            self._turn.settle()

    def _start(self, messages: Sequence[ChatMessage]) -> Turn:
        loop = asyncio.get_running_loop()
        self._answer = self._speculation.answer_stream(loop)
        return self._speculation.start_turn(
            prompt_of(self._agent, messages, self._tools, self._answer),
            [schema_of(tool) for tool in self._tools],
            self._toolbox,
            self._run.context,
            loop=loop,
            conversation=self._agent.name,
        )


def _delta(raw: Any) -> Mapping[str, Any]:
    """The delta in a chunk of an OpenAI-compatible server; of others nothing is known before they have answered."""
    choices = raw.get("choices") if isinstance(raw, Mapping) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    delta = first.get("delta") if isinstance(first, Mapping) else None
    return delta if isinstance(delta, Mapping) else {}

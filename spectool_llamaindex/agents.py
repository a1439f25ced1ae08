"""LlamaIndex's agents with early runs: the stock classes plus one mixin, alone or inside an `AgentWorkflow`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from llama_index.core.agent.workflow import AgentOutput, CodeActAgent, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.agent.workflow.codeact_agent import EXECUTE_TOOL_NAME
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import BaseMemory
from llama_index.core.objects import ObjectRetriever
from llama_index.core.tools import BaseTool

from spectool_core.annotation import policy_of
from spectool_core.errors import ConfigurationError, NotSpeculatableError
from spectool_core.speculation import Speculation
from spectool_llamaindex._agent_run import RUNS
from spectool_llamaindex._engine import follow_llm
from spectool_llamaindex._observers import is_early
from spectool_llamaindex._step import AgentStep, Listening
from spectool_llamaindex.tool import SpeculativeRetriever, SpeculativeTool, with_early_runs

__all__ = ["SpeculativeAgent", "SpeculativeCodeActAgent", "SpeculativeFunctionAgent", "SpeculativeReActAgent"]


class SpeculativeAgent(BaseWorkflowAgent):
    """Mixin before an agent class of LlamaIndex: its marked tools may run before its model asks for them.

    Args:
        speculation: speculators and limits; one may serve many agents.
        stock: every argument of the agent class, by name.

    Raises:
        ConfigurationError: `speculation` is not a `Speculation`.
        NotSpeculatableError: a marked tool cannot be run early, and why.
    """

    _speculation: Speculation = PrivateAttr()
    _own_tools: list[Any] | None = PrivateAttr(default=None)

    def __init__(self, *, speculation: Speculation, **stock: Any) -> None:
        super().__init__(**stock)
        self.speculate_with(speculation)

    @property
    def speculation(self) -> Speculation:
        """Speculators and limits."""
        return self._speculation

    def speculate_with(self, speculation: Speculation) -> None:
        """Take these speculators and limits from now on."""
        if not isinstance(speculation, Speculation):
            raise ConfigurationError("speculation", speculation, "a spectool_core.Speculation")
        if isinstance(self, CodeActAgent) and (policy := policy_of(self.code_execute_fn)) and policy.runs_early:
            raise NotSpeculatableError(EXECUTE_TOOL_NAME, "runs code that the model wrote")
        self._speculation = speculation
        self._own_tools = None
        self._enlist(refuse=True)
        self._own_tools = self.tools

    async def take_step(
        self, ctx: Any, llm_input: list[ChatMessage], tools: Sequence[Any], memory: BaseMemory
    ) -> AgentOutput:
        """Ask the model, and the speculators what it will answer."""
        self._enlist()
        # An agent that does not speculate may still write what others of its run have read.
        run = None if is_early() else RUNS.find_or_start(ctx) if self._speculation.is_on else RUNS.current()
        if run is None:
            return await super().take_step(ctx, llm_input, tools, memory)  # type: ignore[safe-super]
        step = AgentStep(self, self._speculation, run, self._served(tools))
        try:
            follow_llm(self.llm, self._speculation.engine)
            stock: Any = super()
            output: AgentOutput = await stock.take_step(Listening(ctx, step.heard), llm_input, tools, memory)
        except BaseException:
            step.failed()
            raise
        step.answered(output.tool_calls)
        return output

    async def handle_tool_call_results(self, ctx: Any, results: list[ToolCallResult], memory: BaseMemory) -> None:
        """Take the results of the model's calls, all of which have ended."""
        self._calls_ended()
        await super().handle_tool_call_results(ctx, results, memory)  # type: ignore[safe-super]

    async def finalize(self, ctx: Any, output: AgentOutput, memory: BaseMemory) -> AgentOutput:
        """End the agent's part of the run."""
        self._calls_ended()
        return await super().finalize(ctx, output, memory)  # type: ignore[safe-super]

    def _calls_ended(self) -> None:
        run = None if is_early() else RUNS.current()
        if run is not None:
            run.close_turns()

    def _served(self, tools: Sequence[Any]) -> Sequence[Any]:
        """`tools` as the agent holds them: they were got before those that were added had been enlisted."""
        ours = {id(tool.binding.tool): tool for tool in self.tools or () if isinstance(tool, SpeculativeTool)}
        return [ours.get(id(tool), tool) for tool in tools]

    def _enlist(self, *, refuse: bool = False) -> None:
        """Have marked tools serve from early runs, those too that were added since the agent was made."""
        if not self._speculation.is_on or isinstance(self, CodeActAgent):
            return
        if self.tools:
            theirs = cast("list[BaseTool]", self.tools)  # functions have become tools when the agent was made
            tools = [with_early_runs(tool, self._speculation, refuse=refuse) for tool in theirs]
            if any(ours is not other for ours, other in zip(tools, theirs, strict=True)):
                if self._own_tools is not None and self.tools is self._own_tools:
                    self._own_tools[:] = tools
                else:  # a new list: the user may have given theirs to another agent
                    self.tools = self._own_tools = list(tools)
        if self.tool_retriever is not None:
            retriever = SpeculativeRetriever.around(self.tool_retriever, self._speculation)
            self.tool_retriever = cast("ObjectRetriever[Any]", retriever)


class SpeculativeFunctionAgent(SpeculativeAgent, FunctionAgent):
    """A `FunctionAgent` whose marked tools may run before its model asks for them; see `SpeculativeAgent`."""


class SpeculativeReActAgent(SpeculativeAgent, ReActAgent):
    """A `ReActAgent` whose marked tools may run before its model asks for them; see `SpeculativeAgent`.

    Speculators are asked without tools, as its model is, and their text is read by the agent's output parser.
    """


class SpeculativeCodeActAgent(SpeculativeAgent, CodeActAgent):
    """A `CodeActAgent` for workflows of speculative agents; see `SpeculativeAgent`.

    Nothing of its own runs early and no speculator is asked: its model calls `execute`, which runs code that the
    model wrote, and nothing else but a handoff. What `execute` may change is stale for the other agents of the run.
    """

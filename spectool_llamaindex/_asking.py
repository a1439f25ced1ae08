"""What the main model is asked, by each kind of agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.agent.react.types import ActionReasoningStep
from llama_index.core.agent.workflow import CodeActAgent, FunctionAgent, ReActAgent
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.tools import BaseTool

from spectool_core.calls import Answer, Prompt, ToolCall
from spectool_llamaindex._messages import in_openai_format

__all__ = ["Asked", "callable_tools", "prompt_of"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a main model of LlamaIndex was asked; the `native` part of a prompt.

    Args:
        messages: the history.
        tools: what the model was given to choose from; none where they are told in the text.
        tool_choice: as the agent gave it to the model.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[BaseTool]
    tool_choice: str | None = None


def callable_tools(agent: BaseWorkflowAgent, tools: Sequence[BaseTool]) -> Sequence[BaseTool]:
    """The tools whose names the main model's calls may have; a CodeActAgent gives its model functions instead."""
    return () if isinstance(agent, CodeActAgent) else tools


def prompt_of(
    agent: BaseWorkflowAgent, messages: Sequence[ChatMessage], tools: Sequence[BaseTool], answer: Answer | None
) -> Prompt:
    """The prompt that `agent` has just written to the event stream, with the options that it gives to its model.

    `answer` is the model's answer as it is written, where anyone reads it.
    """
    history = list(messages)  # the model may append to the agent's own list
    if isinstance(agent, ReActAgent):
        return Prompt(
            lambda: in_openai_format(history), native=Asked(history, ()), read_text=lambda text: _action_in(agent, text)
        )
    choice: str | None = None
    parallel: bool | None = None
    if isinstance(agent, FunctionAgent):
        parallel = None if agent.allow_parallel_tool_calls else False
        if history[-1].role == MessageRole.USER:
            choice = agent.initial_tool_choice
    return Prompt(
        lambda: in_openai_format(history),
        native=Asked(history, tools, choice),
        tool_choice=_in_openai_format(choice),
        parallel_tool_calls=parallel,
        answer=answer,
    )


def _action_in(agent: ReActAgent, text: str) -> Sequence[ToolCall]:
    """The call in an answer's text, read as the agent reads its own model's."""
    step = agent.output_parser.parse(text, is_streaming=False)
    return [ToolCall(step.action, step.action_input)] if isinstance(step, ActionReasoningStep) else []


def _in_openai_format(choice: str | None) -> Any:
    if choice is None or choice in ("auto", "none", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}}

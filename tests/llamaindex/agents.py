"""Scripted agents, built stock or speculative, and all that can be seen of a run of them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llama_index.core.agent.workflow import AgentWorkflow, CodeActAgent, FunctionAgent, ReActAgent
from llama_index.core.callbacks import CallbackManager
from llama_index.core.memory import BaseMemory
from llama_index.core.tools import BaseTool
from llama_index.core.workflow import Event
from workflows.events import InputRequiredEvent, InternalDispatchEvent
from workflows.handler import WorkflowHandler

from spectool_core import Speculation
from spectool_llamaindex import SpeculativeCodeActAgent, SpeculativeFunctionAgent, SpeculativeReActAgent
from tests.guessing import Call, Reply
from tests.llamaindex.recording import Names, recorded
from tests.llamaindex.scripted import ScriptedLLM, ScriptedTextLLM

HANDOFF = Call("handoff", {"to_agent": "back", "reason": "it knows"}, "handoff")

STOCK = {
    SpeculativeFunctionAgent: FunctionAgent,
    SpeculativeReActAgent: ReActAgent,
    SpeculativeCodeActAgent: CodeActAgent,
}


def function_agent(
    llm: Sequence[Reply] | ScriptedLLM,
    tools: Sequence[BaseTool] | None,
    speculation: Speculation | None = None,
    **settings: Any,
) -> Any:
    """A FunctionAgent; with a `speculation` the class is the one thing that changes."""
    llm = llm if isinstance(llm, ScriptedLLM) else ScriptedLLM(replies=list(llm))
    return _made(SpeculativeFunctionAgent, speculation, llm=llm, tools=tools and list(tools), **settings)


def react_agent(
    llm: Sequence[Reply] | ScriptedTextLLM,
    tools: Sequence[BaseTool],
    speculation: Speculation | None = None,
    **settings: Any,
) -> Any:
    """A ReActAgent, whose model answers in text."""
    llm = llm if isinstance(llm, ScriptedTextLLM) else ScriptedTextLLM(replies=list(llm))
    return _made(SpeculativeReActAgent, speculation, llm=llm, tools=list(tools), **settings)


def code_agent(
    replies: Sequence[Reply],
    tools: Sequence[BaseTool],
    execute: Callable[[str], Any],
    speculation: Speculation | None = None,
    **settings: Any,
) -> Any:
    """A CodeActAgent, whose model answers in code."""
    llm = ScriptedTextLLM(replies=list(replies))
    return _made(SpeculativeCodeActAgent, speculation, llm=llm, tools=list(tools), code_execute_fn=execute, **settings)


def _made(agent_class: Any, speculation: Speculation | None, **settings: Any) -> Any:
    if speculation is None:
        return STOCK[agent_class](**settings)
    return agent_class(**settings, speculation=speculation)


def alone(agent: Any, **settings: Any) -> AgentWorkflow:
    """An AgentWorkflow of one agent."""
    return AgentWorkflow(agents=[agent], **settings)


def team(
    replies: Sequence[Reply],
    tools: Sequence[BaseTool],
    speculation: Speculation | None = None,
    *,
    streaming: bool = True,
    **settings: Any,
) -> AgentWorkflow:
    """Two agents with one script and the same tools; `HANDOFF` goes from `front` to `back`."""
    llm = ScriptedLLM(replies=list(replies))
    agents = [
        function_agent(llm, tools, speculation, name=name, description=f"The {name}.", streaming=streaming)
        for name in ("front", "back")
    ]
    return AgentWorkflow(agents=agents, root_agent="front", **settings)


@dataclass(frozen=True)
class GiveUp:
    """When and how the user ends a run early."""

    after_s: float
    how: Literal["cancel_run", "stop_awaiting", "abort"] = "cancel_run"


@dataclass
class Seen:
    """All that a user can see of one run."""

    events: list[Any] = field(default_factory=list)
    internal: list[Any] = field(default_factory=list)
    result: Any = None
    error: str | None = None
    memory: list[Any] = field(default_factory=list)
    state: Any = None
    context: Any = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    trace: list[tuple[Any, ...]] = field(default_factory=list)
    callbacks: list[tuple[Any, ...]] = field(default_factory=list)
    duration_s: float = 0.0
    tasks_left: list[str] = field(default_factory=list)
    threads_left: list[str] = field(default_factory=list)

    def of(self, *types: str) -> list[Any]:
        """The events of these types."""
        return [event for event in self.events if event["type"] in types]

    @property
    def tools_said(self) -> list[str]:
        """The text of each tool's output, in the order of the stream."""
        return [_text(event["tool_output"]) for event in self.of("ToolCallResult")]


def _text(output: Any) -> str:
    return "\n".join(block["text"] for block in output["blocks"])


async def run(
    agent: Any,
    user_msg: str | None = "go",
    *,
    give_up: GiveUp | None = None,
    answer: Callable[[Event], Event] | Event | None = None,
    answer_after_s: float = 0.0,
    restored_memory: BaseMemory | None = None,
    **options: Any,
) -> Seen:
    """Run the agent or workflow to its end, an error or a cancellation, and write down what is seen.

    `answer` is what a human says, to each event that requires it or to the run as such; `restored_memory` is put back
    into a context that was saved without.
    """
    seen, names, loop = Seen(), Names(), asyncio.get_running_loop()
    llms = llms_of(agent)
    num_asked = [len(llm.requests) for llm in llms]
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    started_s = loop.time()

    async def consume(handler: WorkflowHandler) -> None:
        async for event in handler.stream_events(expose_internal=True):
            (seen.internal if isinstance(event, InternalDispatchEvent) else seen.events).append(names.plain(event))
            if callable(answer) and isinstance(event, InputRequiredEvent):
                await asyncio.sleep(answer_after_s)
                handler.ctx.send_event(answer(event))

    with recorded([*managers_of(agent)]) as (trace, callbacks):
        handler = agent.run(user_msg=user_msg, **options)
        if restored_memory is not None:
            await handler.ctx.store.set("memory", restored_memory)
        if isinstance(answer, Event):
            loop.call_later(answer_after_s, handler.ctx.send_event, answer)
        consumer = asyncio.create_task(consume(handler))
        try:
            seen.result = names.plain(await ended(handler, give_up))
        except (Exception, asyncio.CancelledError) as exc:
            seen.error = repr(exc)
        seen.duration_s = loop.time() - started_s
        await asyncio.wait([consumer], timeout=1.0)  # an aborted run leaves its stream open
        consumer.cancel()
        await settle()
    seen.trace, seen.callbacks = trace.log, callbacks.log
    seen.requests = [vars(request) for llm, num in zip(llms, num_asked, strict=True) for request in llm.requests[num:]]
    await _look_into(handler, seen, names)
    seen.tasks_left = [str(task.get_coro()) for task in asyncio.all_tasks() - tasks]
    seen.threads_left = [thread.name for thread in set(threading.enumerate()) - threads]
    return seen


async def ended(handler: WorkflowHandler, give_up: GiveUp | None) -> Any:
    match give_up:
        case None:
            return await handler
        case GiveUp(after_s, "stop_awaiting"):
            async with asyncio.timeout(after_s):
                return await handler
        case GiveUp(after_s, how):
            await asyncio.wait([handler._result_task], timeout=after_s)
            if how == "cancel_run":
                await handler.cancel_run()
            elif not handler.is_done():
                # What `handler.cancel()` does, which warns of its deprecation.
                handler._external_adapter.abort()
                handler._result_task.cancel()
            return await handler


async def _look_into(handler: WorkflowHandler, seen: Seen, names: Names) -> None:
    memory = await handler.ctx.store.get("memory", default=None)
    seen.memory = [names.plain(message) for message in memory.get_all()] if memory is not None else []
    seen.state = await handler.ctx.store.get("state", default=None)
    seen.context = opened(handler.ctx.to_dict(), names)


async def settle() -> None:
    """Let cancelled tasks end."""
    for _ in range(5):
        await asyncio.sleep(0)


def not_stock(tasks: Iterable[str], give_up: GiveUp | None) -> list[str]:
    """Those of `tasks` that stock does not leave behind: a run that is cancelled forgets its youngest step.

    Such a step goes on, and with it the early run that it may have joined.
    """
    if give_up is None or give_up.how == "cancel_run":
        return list(tasks)
    forgotten = [task for task in tasks if "_run_worker" in task]
    joined = [task for task in tasks if "ToolCache._execute" in task][: len(forgotten)]
    return [task for task in tasks if task not in forgotten + joined and "_single_pull" not in task]


def llms_of(agent: Any) -> list[Any]:
    """The distinct LLMs of an agent or a workflow."""
    agents = agent.agents.values() if isinstance(agent, AgentWorkflow) else [agent]
    return list({id(each.llm): each.llm for each in agents}.values())


def managers_of(agent: Any) -> Iterable[CallbackManager]:
    """The callback managers of an agent's LLMs, query engines and retrievers."""
    for llm in llms_of(agent):
        yield llm.callback_manager
    agents = agent.agents.values() if isinstance(agent, AgentWorkflow) else [agent]
    for each in agents:
        for tool in each.tools or ():
            source = getattr(tool, "query_engine", None) or getattr(tool, "retriever", None)
            if source is not None:
                yield source.callback_manager


# How long a run took differs between runs that are otherwise the same.
_TIMES = {
    "elapsed_alive",
    "last_alive_stamp",
    "first_attempt_at",
    "last_failed_at",
    "stamped_at",
    "not_before",
    "started_at",
}


def opened(value: Any, names: Names | None = None) -> Any:
    """A context's dict with the JSON inside it parsed, without times."""
    match value:
        case str() if value[:1] in ("{", "["):
            try:
                return opened(json.loads(value), names)
            except ValueError:
                return names.plain(value) if names else value
        case dict():
            return {key: opened(item, names) for key, item in value.items() if key not in _TIMES}
        case list():
            return [opened(item, names) for item in value]
    return names.plain(value) if names else value

"""Starts a turn when a graph's chat model is called, and ends it when the model has answered.

LangChain asks every registered configure hook for a handler each time that it sets up callbacks, so one handler sees
every chat model of the process, and no model object changes. For each call it asks the running graph whether a
speculative tool node is in it; if not, the call stays as it was.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tracers.context import register_configure_hook
from langgraph.prebuilt import ToolNode

from spectool_core.calls import Prompt, ToolCall, ToolSchema
from spectool_core.engine import set_current_turn
from spectool_core.speculation import Speculation
from spectool_langgraph._agent_run import AgentRun, AgentRuns, OpenTurn
from spectool_langgraph._binding import ToolBinding
from spectool_langgraph._pregel import GraphRun, running_graph
from spectool_langgraph._schemas import offered_tools
from spectool_langgraph._toolbox import RunToolbox
from spectool_langgraph._unseen import unseen

__all__ = ["FOLLOWER", "RUNS", "Enlisted", "SpeculativeTools", "TurnCallback", "enlisted"]

_logger = logging.getLogger("spectool")


@dataclass(frozen=True, slots=True, eq=False)
class Enlisted:
    """Marked tools and the `Speculation` that may run them early."""

    speculation: Speculation
    marked: Mapping[str, ToolBinding]


class SpeculativeTools:
    """Base of tool nodes that the callback looks for in a running graph."""

    enlisted: Enlisted


RUNS = AgentRuns()

_enlisted: ContextVar[Enlisted | None] = ContextVar("spectool_enlisted", default=None)


@contextmanager
def enlisted(tools: Enlisted) -> Iterator[None]:
    """Within this context, chat models are main models whose tools are `tools`."""
    token = _enlisted.set(tools)
    try:
        yield
    finally:
        _enlisted.reset(token)


class TurnCallback(BaseCallbackHandler):
    """Follows chat models inside graphs. Runs inline: it neither blocks nor raises."""

    run_inline = True
    ignore_chain = ignore_agent = ignore_retriever = ignore_retry = ignore_custom_event = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answering: dict[UUID, list[OpenTurn]] = {}

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        **kwargs: Any,
    ) -> None:
        """The main model is asked: start a turn for each `Speculation` whose tools it may call."""
        if run_id not in self._answering:
            self.start_turns(run_id, messages[0], kwargs.get("invocation_params") or {}, explicit=_enlisted.get())

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, run_id: UUID, **kwargs: Any) -> None:
        """The main model goes on with its answer."""
        message = getattr(chunk, "message", None)
        if isinstance(message, AIMessageChunk) and message.tool_call_chunks:
            for open_turn in self._answering.get(run_id, ()):
                if open_turn.answer is not None:
                    open_turn.answer.feed(_delta(message))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """The main model has answered."""
        turns = self._take(run_id)
        if turns:
            calls = _calls_in(response)
            for open_turn in turns:
                open_turn.calls = calls
                open_turn.turn.answer(calls)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """The main model failed: a retry or a fallback goes on with the turn."""
        for open_turn in self._take(run_id):
            open_turn.failed = True

    def start_turns(
        self, run_id: UUID, messages: list[BaseMessage], params: Mapping[str, Any], *, explicit: Enlisted | None
    ) -> None:
        """Start the turns of one call of a chat model; `explicit` tools are taken without a look at the graph."""
        set_current_turn(None)
        try:
            if not params.get("tools") or params.get("tool_choice") == "none":
                return
            graph = running_graph()
            if graph is None:
                return
            candidates = [explicit] if explicit is not None else _tools_in(graph)
            turns = [_turn(tools, graph, messages, params) for tools in candidates]
            started = [open_turn for open_turn in turns if open_turn is not None]
        except Exception:
            _logger.exception("no turn was started")
            return
        if started:
            engine_turns = (open_turn.turn.engine_turn for open_turn in started)
            set_current_turn(next((each for each in engine_turns if each is not None), None))
            with self._lock:
                self._answering[run_id] = started
            graph.when_done(partial(self._take, run_id))  # a model that is cancelled may never say so

    def _take(self, run_id: UUID) -> Sequence[OpenTurn]:
        if not self._answering:
            return ()
        with self._lock:
            return self._answering.pop(run_id, ())


def _tools_in(graph: GraphRun) -> list[Enlisted]:
    """Whose tools the main model may call: those of the speculative tool nodes in its graph and the ones around it.

    One entry for each `Speculation`. A tool node of an inner graph, stock or not, hides tools of the same names
    further out; a name that stands for different tools of one graph is left out, since which would run is not known.
    """
    found: dict[Speculation, dict[str, ToolBinding]] = {}
    hidden: set[str] = set()
    for nodes, inside in graph.levels():
        tool_nodes = [node for node in nodes.values() if isinstance(node, ToolNode)]
        if isinstance(nodes.get(inside or ""), ToolNode):
            break  # a model inside a tool is not the main model of that graph
        tools_of_name: dict[str, set[int]] = {}
        for node in tool_nodes:
            for name, tool in node.tools_by_name.items():
                tools_of_name.setdefault(name, set()).add(id(tool))
        clear = {name for name, tools in tools_of_name.items() if len(tools) == 1} - hidden
        for node in tool_nodes:
            if isinstance(node, SpeculativeTools):
                marked = {name: known for name, known in node.enlisted.marked.items() if name in clear}
                found.setdefault(node.enlisted.speculation, {}).update(marked)
        hidden.update(tools_of_name)
    return [Enlisted(speculation, marked) for speculation, marked in found.items()]


def _turn(tools: Enlisted, graph: GraphRun, messages: list[BaseMessage], params: Mapping[str, Any]) -> OpenTurn | None:
    speculation = tools.speculation
    if not speculation.is_on:
        return None
    schemas = offered_tools(params["tools"], tools.marked)
    if not any(schema["function"]["name"] in tools.marked for schema in schemas):
        return None
    run = RUNS.find_or_start(graph)
    if run is None:
        return None
    open_turn = run.failed_turn(speculation, graph, messages)
    if open_turn is None:
        open_turn = _new_turn(tools, graph, run, messages, params, schemas)
        run.add(open_turn)
    elif open_turn.answer is not None:
        open_turn.answer.restart()
    open_turn.failed = False
    return open_turn


def _new_turn(
    tools: Enlisted,
    graph: GraphRun,
    run: AgentRun,
    messages: list[BaseMessage],
    params: Mapping[str, Any],
    schemas: Sequence[ToolSchema],
) -> OpenTurn:
    prompt = Prompt(
        lambda: _in_openai_format(messages),
        native=messages,
        tool_choice=params.get("tool_choice"),
        parallel_tool_calls=params.get("parallel_tool_calls"),
        answer=(answer := tools.speculation.answer_stream(graph.event_loop)),
    )
    toolbox = RunToolbox(
        tools.marked,
        waiting=graph.tools_that_wait(),
        config=graph.config,
        asynchronous=graph.event_loop is not None,
    )
    # The turn's speculators may be models or graphs of LangChain: none of the run's observers is to see them, and
    # none of them is to start turns of its own.
    start_turn = partial(tools.speculation.start_turn, loop=graph.event_loop, conversation=graph.place)
    turn = unseen().run(start_turn, prompt, schemas, toolbox, run.context)
    return OpenTurn(turn, tools.speculation, tools.marked, graph, messages, answer)


def _in_openai_format(messages: list[BaseMessage]) -> Sequence[Mapping[str, Any]]:
    converted = convert_to_openai_messages(messages)
    return converted if isinstance(converted, list) else [converted]


def _delta(message: AIMessageChunk) -> Mapping[str, Any]:
    calls = [
        {
            "index": piece["index"],
            "id": piece["id"],
            "function": {"name": piece["name"], "arguments": piece["args"]},
        }
        for piece in message.tool_call_chunks
    ]
    return {"tool_calls": calls}


def _calls_in(response: LLMResult) -> Sequence[ToolCall]:
    generation = response.generations[0][0] if response.generations and response.generations[0] else None
    message = generation.message if isinstance(generation, ChatGeneration) else None
    if not isinstance(message, AIMessage):
        return ()
    return tuple(ToolCall(call["name"], call["args"], call["id"]) for call in message.tool_calls)


FOLLOWER = TurnCallback()

# The default makes the handler visible in every context and thread.
register_configure_hook(ContextVar("spectool_callback", default=FOLLOWER), inheritable=False)

"""One scripted agent, built stock or speculative, and all that can be seen of a run of it."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.callbacks import adispatch_custom_event
from langchain_core.messages import AnyMessage, BaseMessage, HumanMessage
from langchain_core.tools import BaseTool, tool
from langgraph._internal._runnable import RunnableCallable
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import RetryPolicy

from spectool_core import Speculation, speculatable
from spectool_langgraph import SpeculativeToolNode
from tests.guessing import Reply
from tests.langgraph.scripted import CallbackLog, ScriptedChatModel, StreamingChatModel
from tests.tool_log import ToolLog

STREAM_MODES = ["values", "updates", "messages", "custom"]


def make_tools(log: ToolLog) -> list[BaseTool]:
    @tool
    @speculatable
    async def lookup(q: str, n: int = 1) -> str:
        """Look something up."""
        return await log.run("lookup", f"{q}{n}")

    @tool(response_format="content_and_artifact")
    @speculatable
    async def weigh(q: str) -> tuple[str, dict[str, Any]]:
        """Weigh something, with an artifact."""
        result = await log.run("weigh", q)
        return result, {"weighed": [q]}

    @tool
    @speculatable
    async def announce(q: str) -> str:
        """Say what it does while it runs."""
        writer = get_stream_writer()
        writer({"begun": q})
        result = await log.run("announce", q)
        await adispatch_custom_event("announced", {"q": q})
        writer({"ended": q})
        return result

    @tool
    async def note(text: str) -> str:
        """Write something down: not marked."""
        return await log.run("note", text)

    return [lookup, weigh, announce, note]


def build(
    replies: Sequence[Reply],
    tools: Sequence[BaseTool],
    speculation: Speculation | None,
    *,
    model_class: type[ScriptedChatModel] = StreamingChatModel,
    model: Any = None,
    retry_policy: RetryPolicy | None = None,
    **node_arguments: Any,
) -> Any:
    """A model node and a tool node; with a `speculation` the tool node is the one line that changes."""
    model = model or model_class(replies=list(replies)).bind_tools(tools)

    async def acall(state: MessagesState) -> dict[str, list[AnyMessage]]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def call(state: MessagesState) -> dict[str, list[AnyMessage]]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", RunnableCallable(call, acall), retry_policy=retry_policy)
    graph.add_node("tools", tool_node(tools, speculation, **node_arguments), retry_policy=retry_policy)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition, ["tools", END])
    graph.add_edge("tools", "agent")
    return graph


def tool_node(tools: Sequence[BaseTool], speculation: Speculation | None, **arguments: Any) -> ToolNode:
    """The stock node, or the speculative one."""
    return ToolNode(tools, **arguments) if speculation is None else SpeculativeToolNode(tools, speculation, **arguments)


@dataclass
class Seen:
    """All that a user can see of one run."""

    messages: list[Any] = field(default_factory=list)
    stream: list[Any] = field(default_factory=list)
    callbacks: list[Any] = field(default_factory=list)
    error: str | None = None
    duration_s: float = 0.0
    num_tasks_left: int = 0


QUESTION = {"messages": [HumanMessage("go", id="human")]}


async def run(
    graph: Any,
    given: Any = QUESTION,
    *,
    cancel_after_s: float | None = None,
    config: Any = None,
    stream_mode: Sequence[str] = STREAM_MODES,
    **options: Any,
) -> Seen:
    """Stream the compiled graph to its end, an error or a cancellation, and write down what is seen."""
    seen, log, loop = Seen(), CallbackLog(), asyncio.get_running_loop()
    started_s = loop.time()
    values: dict[str, Any] = {}

    async def consume() -> None:
        settings = {**(config or {}), "callbacks": [log]}
        stream = graph.astream(given, settings, stream_mode=list(stream_mode), **options)
        async for *where, mode, chunk in stream:
            if mode == "values":
                values.update(chunk)
            seen.stream.append((plain(where), mode, plain(chunk)))

    try:
        async with asyncio.timeout(cancel_after_s):
            await consume()
    except Exception as exc:
        seen.error = repr(exc)
    seen.duration_s = loop.time() - started_s
    seen.messages = [plain(message) for message in values.get("messages", [])]
    seen.callbacks = log.events
    await asyncio.sleep(0)  # lets cancelled tasks end
    await asyncio.sleep(0)
    seen.num_tasks_left = len(asyncio.all_tasks()) - 1
    return seen


_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def plain(value: Any) -> Any:
    """A comparable form of a stream chunk: messages field by field, without random ids."""
    match value:
        case BaseMessage():
            fields = value.model_dump(exclude={"id"} if _UUID.search(value.id or "") else None)
            return (type(value).__name__, _named(repr(sorted(fields.items(), key=lambda item: item[0]))))
        case dict():
            return {key: plain(item) for key, item in value.items() if key not in _RANDOM}
        case list() | tuple():
            return [plain(item) for item in value]
    return _named(repr(value))


_VERSION = re.compile(r"\d{32}\.0\.\d+")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00")


def _named(text: str) -> str:
    return _TIME.sub("<time>", _VERSION.sub("<version>", _UUID.sub("<uuid>", text)))


_RANDOM = {"langgraph_checkpoint_ns", "checkpoint_ns", "langgraph_path", "run_id", "timestamp"}


def per_run(callbacks: Sequence[tuple[Any, ...]]) -> Counter[Any]:
    """Callbacks grouped by run, as a multiset: each run's own events in order, with the path of its parents."""
    names: dict[int | None, Any] = {None: ()}
    groups: dict[int | None, list[Any]] = {}
    for event, (run_number, parent), tags, payload in callbacks:
        names.setdefault(run_number, (*names[parent], event, _UUID.sub("<uuid>", payload)))
        groups.setdefault(run_number, []).append((event, tags, _UUID.sub("<uuid>", payload)))
    return Counter((names[number], tuple(events)) for number, events in groups.items())


def in_order(callbacks: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Callbacks as they came."""
    return [(event, place, tags, _UUID.sub("<uuid>", payload)) for event, place, tags, payload in callbacks]

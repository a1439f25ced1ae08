"""A hit gives what stock gives: message, callbacks and streams of a replayed call against those of a real one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import (
    AsyncCallbackHandler,
    AsyncCallbackManagerForToolRun,
    BaseCallbackHandler,
    CallbackManagerForToolRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, StructuredTool, Tool, ToolException, tool
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel, Field, PrivateAttr

from spectool_core.annotation import ToolPolicy, mark
from spectool_core.calls import ToolCall
from spectool_core.runs import NotReplayable, Scope
from spectool_langgraph._binding import ToolBinding
from spectool_langgraph._recording import Recorded
from spectool_langgraph._replay import replaying

NUM_RUNS: dict[str, int] = {}


def ran(name: str) -> None:
    NUM_RUNS[name] = NUM_RUNS.get(name, 0) + 1


# The tools: each takes `x: int`, but for the single-input one.


@tool
def plain(x: int) -> str:
    """Return text."""
    ran("plain")
    return f"<{x}>"


@tool
async def aplain(x: int, y: int = 3) -> str:
    """Return text, later."""
    ran("aplain")
    await asyncio.sleep(0)
    return f"<{x + y}>"


@tool
def number(x: int) -> int:
    """Return what is no text."""
    ran("number")
    return x


@tool
def structure(x: int) -> dict[str, Any]:
    """Return a dict."""
    ran("structure")
    return {"x": x, "é": [1, None]}


@tool
def blocks(x: int) -> list[Any]:
    """Return content blocks."""
    ran("blocks")
    return [{"type": "text", "text": str(x)}, {"type": "image_url", "image_url": {"url": "http://x"}}]


@tool
def message(x: int) -> ToolMessage:
    """Return a message."""
    ran("message")
    return ToolMessage(str(x), tool_call_id="call_1", name="someone else", artifact={"x": x}, status="error")


@tool(response_format="content_and_artifact")
def with_artifact(x: int) -> tuple[str, list[Document]]:
    """Return content and artifact."""
    ran("with_artifact")
    return f"<{x}>", [Document("page", metadata={"x": x})]


@tool(response_format="content_and_artifact")
def with_broken_artifact(x: int) -> Any:
    """Return no pair."""
    ran("with_broken_artifact")
    return "no pair"


class Aliased(BaseModel):
    x_: int = Field(alias="x")
    flag: bool = True


@tool("renamed", args_schema=Aliased)
def aliased(x_: int, flag: bool) -> str:
    """Take a schema with an alias."""
    ran("renamed")
    return f"{x_} {flag}"


def schemaless(**arguments: Any) -> str:
    ran("json_schema")
    return str(arguments)


json_schema = StructuredTool(
    name="json_schema",
    description="Has a JSON schema.",
    args_schema={"type": "object", "properties": {"x": {"type": "integer"}}},
    func=schemaless,
    tags=["own tag"],
    metadata={"own": "metadata"},
)


def shout(text: str) -> str:
    ran("single")
    return text.upper()


single = Tool(name="single", description="Takes one text.", func=shout)


class SubclassBase(BaseTool):
    name: str = "subclass"
    description: str = "Has state of its own."
    suffix: str = "!"
    _num_calls: int = PrivateAttr(default=0)

    def _run(self, x: int, run_manager: CallbackManagerForToolRun | None = None) -> str:
        ran("subclass")
        assert run_manager is not None
        return f"{x}{self.suffix}"


class Subclass(SubclassBase):
    pass


class AsyncSubclass(SubclassBase):
    name: str = "async_subclass"

    async def _arun(
        self, x: int, config: RunnableConfig, run_manager: AsyncCallbackManagerForToolRun | None = None
    ) -> str:
        ran("async_subclass")
        assert run_manager is not None
        await adispatch_custom_event("from", "subclass", config=config)
        return f"{x}{self.suffix}"

    def _run(self, x: int, config: RunnableConfig, run_manager: CallbackManagerForToolRun | None = None) -> str:
        ran("async_subclass")
        dispatch_custom_event("from", "subclass", config=config)
        return f"{x}{self.suffix}"


@tool
def talkative(x: int, config: RunnableConfig) -> str:
    """Emit all there is to emit."""
    ran("talkative")
    write = get_stream_writer()
    write({"chunk": 1})
    dispatch_custom_event("own", {"x": x})
    write({"chunk": 2})
    dispatch_custom_event("caller's", [x], config=config)
    return f"<{config['configurable']['user']}>"


@tool
async def atalkative(x: int, config: RunnableConfig) -> str:
    """Emit all there is to emit, later."""
    ran("atalkative")
    write = get_stream_writer()
    write({"chunk": 1})
    await adispatch_custom_event("own", {"x": x})
    await asyncio.sleep(0)
    write({"chunk": 2})
    await adispatch_custom_event("caller's", [x], config=config)
    return f"<{config['configurable']['user']}>"


def both_sync(x: int) -> str:
    ran("both")
    return f"sync {x}"


async def both_async(x: int) -> str:
    ran("both")
    return f"async {x}"


both = StructuredTool.from_function(both_sync, both_async, name="both", description="Is sync and async.")

SYNC_TOOLS: list[BaseTool] = [
    *(plain, number, structure, blocks, message, with_artifact, with_broken_artifact, aliased, json_schema, single),
    *(Subclass(), AsyncSubclass(), talkative, both),
]
ASYNC_TOOLS: list[BaseTool] = [*SYNC_TOOLS, aplain, atalkative]


# Stock and replayed execution in a real graph, and all that can be seen of them


class Trace:
    """Every callback in order, with run ids numbered as they appear."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._ids: dict[UUID, int] = {}

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.events.append((name, self._plain(args), self._plain(kwargs)))

    def _plain(self, value: Any) -> Any:
        if isinstance(value, UUID):
            return self._ids.setdefault(value, len(self._ids))
        if isinstance(value, dict):
            return {key: self._plain(item) for key, item in value.items() if key not in _VARYING}
        if isinstance(value, list | tuple):
            return [self._plain(item) for item in value]
        if isinstance(value, BaseMessage):
            return self._plain(value.model_dump(exclude={"id"}))
        if isinstance(value, Document):
            return value.model_dump()
        if isinstance(value, str) and value.startswith("lc_"):
            return "an id made at random by langchain_core"
        return repr(value) if isinstance(value, Exception) else value


_VARYING = {"langgraph_checkpoint_ns", "checkpoint_ns"}  # hold random ids
_CALLBACKS = [name for name, _ in inspect.getmembers(BaseCallbackHandler) if name.startswith("on_")]


class SyncObserver(BaseCallbackHandler):
    raise_error = True

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __getattribute__(self, name: str) -> Any:
        if name in _CALLBACKS:
            return lambda *args, **kwargs: self.trace.note(name, args, kwargs)
        return super().__getattribute__(name)


class AsyncObserver(AsyncCallbackHandler):
    raise_error = True

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __getattribute__(self, name: str) -> Any:
        async def note(*args: Any, **kwargs: Any) -> None:
            self.trace.note(name, args, kwargs)

        return note if name in _CALLBACKS else super().__getattribute__(name)


def prepared(bound: BaseTool, request: Any, *, asynchronous: bool) -> Any:
    call = ToolCall(request.tool_call["name"], request.tool_call["args"], request.tool_call["id"])
    return ToolBinding(bound, ToolPolicy()).prepare(
        call, scope=Scope("run", None), config=request.runtime.config, asynchronous=asynchronous
    )


def replayed_sync(request: Any, execute: Callable[[Any], Any]) -> Any:
    recorded = prepared(request.tool, request, asynchronous=False).run()
    return execute(request.override(tool=replaying(request.tool, recorded)))


async def replayed_async(request: Any, execute: Callable[[Any], Any]) -> Any:
    call = prepared(request.tool, request, asynchronous=True)
    recorded = await (asyncio.to_thread(call.run) if call.blocking else call.run())
    return await execute(request.override(tool=replaying(request.tool, recorded)))


def stock_sync(request: Any, execute: Callable[[Any], Any]) -> Any:
    return execute(request)


async def stock_async(request: Any, execute: Callable[[Any], Any]) -> Any:
    return await execute(request)


MODES: Any = ["custom", "updates", "values", "tools", "messages"]


def graph_of(bound: BaseTool, **wrappers: Any) -> Any:
    node = ToolNode([bound], handle_tool_errors=True, **wrappers)
    return StateGraph(MessagesState).add_node("tools", node).add_edge(START, "tools").compile()


def asking(bound: BaseTool, args: dict[str, Any] | None = None) -> Any:
    args = args or ({"text": "hi"} if bound is single else {"x": 1})
    call = {"name": bound.name, "args": args, "id": "call_1", "type": "tool_call"}
    return {"messages": [AIMessage("", tool_calls=[call], id="m1")]}


def config_with(observer: BaseCallbackHandler) -> RunnableConfig:
    return {
        "callbacks": [observer],
        "tags": ["run tag"],
        "metadata": {"run": "metadata"},
        "configurable": {"user": "ada"},
    }


def seen_sync(bound: BaseTool, wrapper: Any, args: dict[str, Any] | None = None) -> Any:
    trace = Trace()
    graph = graph_of(bound, wrap_tool_call=wrapper)
    config = config_with(SyncObserver(trace))
    NUM_RUNS.clear()
    chunks = [trace._plain(chunk) for chunk in graph.stream(asking(bound, args), config, stream_mode=MODES)]
    return chunks, trace.events, dict(NUM_RUNS)


async def seen_async(bound: BaseTool, wrapper: Any, make_observer: Any, args: dict[str, Any] | None = None) -> Any:
    trace = Trace()
    graph = graph_of(bound, awrap_tool_call=wrapper)
    config = config_with(make_observer(trace))
    NUM_RUNS.clear()
    chunks = [trace._plain(chunk) async for chunk in graph.astream(asking(bound, args), config, stream_mode=MODES)]
    return chunks, trace.events, dict(NUM_RUNS)


@pytest.mark.parametrize("bound", SYNC_TOOLS, ids=lambda bound: bound.name)
def test_a_sync_hit_looks_like_stock(bound: BaseTool) -> None:
    stock, replayed = seen_sync(bound, stock_sync), seen_sync(bound, replayed_sync)
    assert replayed == stock
    assert stock[2] == {bound.name: 1}
    assert [event[0] for event in stock[1]].count("on_tool_start") == 1


@pytest.mark.parametrize("observer", [SyncObserver, AsyncObserver])
@pytest.mark.parametrize("bound", ASYNC_TOOLS, ids=lambda bound: bound.name)
async def test_an_async_hit_looks_like_stock(bound: BaseTool, observer: Any) -> None:
    stock = await seen_async(bound, stock_async, observer)
    replayed = await seen_async(bound, replayed_async, observer)
    assert replayed == stock
    assert stock[2] == {bound.name: 1}


async def test_event_streams_are_equal() -> None:
    async def events(wrapper: Any) -> list[Any]:
        trace = Trace()
        graph = graph_of(atalkative, awrap_tool_call=wrapper)
        config: RunnableConfig = {"configurable": {"user": "ada"}}
        found = []
        async for event in graph.astream_events(asking(atalkative), config, version="v2"):
            run_ids = [UUID(event["run_id"]), *map(UUID, event["parent_ids"])]
            found.append(trace._plain({**event, "run_id": run_ids[0], "parent_ids": run_ids[1:]}))
        return found

    stock = await events(stock_async)
    assert await events(replayed_async) == stock
    assert "on_custom_event" in [event["event"] for event in stock]


def test_the_tool_s_own_callbacks_see_a_hit_once() -> None:
    def calls(wrapper: Any) -> list[Any]:
        trace = Trace()
        bound = plain.model_copy(update={"callbacks": [SyncObserver(trace)], "verbose": False})
        graph_of(bound, wrap_tool_call=wrapper).invoke(asking(bound))
        return trace.events

    stock = calls(stock_sync)
    assert [event[0] for event in stock] == ["on_tool_start", "on_tool_end"]
    assert calls(replayed_sync) == stock


def test_a_replay_is_of_the_tool_s_class_and_leaves_the_tool_alone() -> None:
    bound = AsyncSubclass(suffix="?")
    before = dict(bound.__dict__)
    replay = replaying(bound, Recorded("x"))
    assert type(replay) is AsyncSubclass
    assert replay.suffix == "?"
    assert bound.__dict__ == before
    assert replay.invoke({"x": 1}) == "x"


def test_a_stored_result_is_handed_out_as_a_copy_each_time() -> None:
    recorded = Recorded([{"type": "text", "text": "a"}])
    call: Any = {"name": "blocks", "args": {"x": 1}, "id": "c", "type": "tool_call"}
    replay = replaying(blocks, recorded)
    first = replay.invoke(call)
    first.content[0]["text"] = "changed"
    assert replay.invoke(call).content == [{"type": "text", "text": "a"}]
    assert replaying(blocks, recorded).invoke(call).content == [{"type": "text", "text": "a"}]


def test_arguments_are_validated_on_a_hit_too() -> None:
    bound = plain.model_copy(update={"handle_validation_error": "no good"})
    call: Any = {"name": "plain", "args": {"x": "many"}, "id": "c", "type": "tool_call"}
    assert replaying(bound, Recorded("x")).invoke(call).content == "no good"


class OnlyOnce:
    """Can be copied, but its copy cannot."""

    def __init__(self, *, is_copy: bool = False) -> None:
        self.is_copy = is_copy

    def __deepcopy__(self, memo: Any) -> OnlyOnce:
        if self.is_copy:
            raise TypeError("no")
        return OnlyOnce(is_copy=True)


def test_a_value_that_cannot_be_copied_is_refused_before_the_node_executes() -> None:
    with pytest.raises(NotReplayable):
        replaying(plain, Recorded(OnlyOnce(is_copy=True)))


def test_a_tool_exception_is_a_failure_and_not_a_result() -> None:
    @tool
    def failing(x: int) -> str:
        """Fail."""
        raise ToolException("no")

    failing.handle_tool_error = True
    call = ToolBinding(failing, ToolPolicy()).prepare(
        ToolCall("failing", {"x": 1}), scope=Scope("run", None), config={}, asynchronous=False
    )
    with pytest.raises(ToolException):
        call.run()


# Tools of an MCP server


async def early_error(bound: BaseTool) -> Exception:
    """What an early run inside a graph ends with; the call itself is then stock's."""
    errors: list[Exception] = []

    async def fall_back(request: Any, execute: Callable[[Any], Any]) -> Any:
        with pytest.raises(Exception) as caught:
            await prepared(request.tool, request, asynchronous=True).run()
        errors.append(caught.value)
        return await execute(request)

    await graph_of(bound, awrap_tool_call=fall_back).ainvoke(asking(bound))
    return errors[0]


async def test_an_mcp_tool_runs_early_and_is_replayed() -> None:
    adapters = pytest.importorskip("langchain_mcp_adapters.tools")
    memory = pytest.importorskip("mcp.shared.memory")
    server_module = pytest.importorskip("mcp.server.fastmcp")
    server = server_module.FastMCP("numbers")
    asked: list[int] = []

    @server.tool()
    def double(x: int) -> int:
        """Double a number."""
        asked.append(x)
        return 2 * x

    @server.tool()
    def fail(x: int) -> int:
        """Fail."""
        raise ValueError("no")

    seen: list[Any] = []

    async def look(request: Any, handler: Any) -> Any:
        seen.append(request.runtime.context)
        return await handler(request)

    async def read_state(request: Any, handler: Any) -> Any:
        if request.runtime.state:
            return await handler(request)
        return ToolMessage("no state", tool_call_id="call_1")

    async with memory.create_connected_server_and_client_session(server) as session:
        for interceptors in ([], [look]):
            tools = await adapters.load_mcp_tools(session, tool_interceptors=interceptors)
            mark(tools, names=["double"])
            bound = next(one for one in tools if one.name == "double")
            binding = ToolBinding.of(bound)
            assert binding is not None
            forged, honest = (
                binding.prepare(ToolCall("double", args), scope=Scope("run", None), config={}, asynchronous=True)
                for args in ({"x": 1, "runtime": "forged"}, {"x": 1})
            )
            assert forged.key == honest.key
            asked.clear()
            stock = await seen_async(bound, stock_async, SyncObserver)
            replayed = await seen_async(bound, replayed_async, SyncObserver)
            assert replayed == stock
            assert asked == [1, 1]
        assert seen == [None, None]

        careful = await adapters.load_mcp_tools(session, tool_interceptors=[read_state])
        assert isinstance(await early_error(careful[0]), NotReplayable)
        failing = (await adapters.load_mcp_tools(session))[1]
        assert failing.name == "fail"
        assert isinstance(await early_error(failing), ToolException)

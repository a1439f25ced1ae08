"""Where a tool runs early: what it sees, what it cannot reach, and that nobody sees it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from langchain_core.callbacks import (
    BaseCallbackHandler,
    CallbackManagerForToolRun,
    adispatch_custom_event,
    dispatch_custom_event,
    get_usage_metadata_callback,
)
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool, StructuredTool, create_retriever_tool, tool
from langchain_core.tracers.context import _configure_hooks, collect_runs, register_configure_hook
from langgraph.config import get_config, get_store, get_stream_writer
from langgraph.errors import GraphInterrupt
from langgraph.graph import START, StateGraph
from langgraph.runtime import get_runtime
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command, interrupt
from langsmith import traceable
from langsmith.run_helpers import get_current_run_tree, get_tracing_context
from langsmith.utils import get_env_var, tracing_is_enabled
from typing_extensions import TypedDict

from spectool_core.annotation import ToolPolicy
from spectool_core.calls import ToolCall
from spectool_core.runs import NotReplayable, Scope
from spectool_langgraph._binding import ToolBinding
from spectool_langgraph._recording import CustomEvent, Recorded, StreamChunk


class State(TypedDict, total=False):
    done: bool


@dataclass
class Settings:
    tenant: str = "t1"


def from_function(function: Callable[..., Any], **fields: Any) -> BaseTool:
    is_async = asyncio.iscoroutinefunction(function)
    implementation = {"coroutine": function} if is_async else {"func": function}
    return StructuredTool.from_function(**implementation, name="t", description="t", **fields)


def early(bound: BaseTool, config: RunnableConfig, *, asynchronous: bool = False) -> Any:
    binding = ToolBinding(bound, ToolPolicy())
    return binding.prepare(
        ToolCall(bound.name, {}), scope=Scope("run", None), config=config, asynchronous=asynchronous
    ).run()


def in_node(body: Callable[[RunnableConfig], Any], config: RunnableConfig | None = None, **compile_with: Any) -> Any:
    """What `body` returns when it is called, with the node's config, inside a node of a running graph."""
    results: list[Any] = []

    def node(state: State, config: RunnableConfig) -> State:
        results.append(body(config))
        return {"done": True}

    context = compile_with.pop("context", None)
    graph = StateGraph(State, context_schema=Settings).add_node("node", node).add_edge(START, "node")
    compiled = graph.compile(**compile_with)
    compiled.invoke({}, config, context=context)  # type: ignore[call-overload]
    return results[0]


async def in_async_node(body: Callable[[RunnableConfig], Awaitable[Any]], config: RunnableConfig | None = None) -> Any:
    results: list[Any] = []

    async def node(state: State, config: RunnableConfig) -> State:
        results.append(await body(config))
        return {"done": True}

    graph = StateGraph(State, context_schema=Settings).add_node("node", node).add_edge(START, "node")
    await graph.compile().ainvoke({}, config)  # type: ignore[call-overload]
    return results[0]


def value_of(function: Callable[..., Any], config: RunnableConfig | None = None, **compile_with: Any) -> Any:
    """What `function` returns when it runs early, as a tool, from inside a graph."""
    recorded = in_node(lambda node_config: early(from_function(function), node_config), config, **compile_with)
    assert isinstance(recorded, Recorded)
    return recorded.value


def failure_of(function: Callable[..., Any], config: RunnableConfig | None = None, **compile_with: Any) -> Any:
    """The exception that an early run of `function` ends with."""

    def body(node_config: RunnableConfig) -> Exception:
        with pytest.raises(Exception) as caught:
            early(from_function(function), node_config)
        return caught.value

    return in_node(body, config, **compile_with)


# What the tool sees


def test_the_user_s_settings_are_there_and_the_graph_s_own_are_not() -> None:
    def look(config: RunnableConfig) -> Any:
        ambient = get_config()
        assert ambient["configurable"] == config["configurable"]
        configurable = {**config["configurable"]}
        assert configurable.pop("__pregel_runtime") is not None
        return configurable, config["tags"], config["metadata"], config["recursion_limit"]

    config: RunnableConfig = {
        "configurable": {"thread_id": "7", "user": "ada"},
        "tags": ["mine"],
        "metadata": {"ticket": 1},
        "recursion_limit": 77,
    }
    recorded = in_node(lambda node_config: early(from_function(look), node_config), config)
    configurable, tags, metadata, recursion_limit = recorded.value
    assert configurable == {"thread_id": "7", "user": "ada"}
    assert "mine" in tags
    assert "nostream" in tags
    assert metadata["ticket"] == 1
    assert not [key for key in metadata if key.startswith("langgraph_")]
    assert recursion_limit == 77


def test_runs_outside_a_graph_too() -> None:
    def look(config: RunnableConfig) -> str:
        return str(config["configurable"]["user"])

    assert early(from_function(look), {"configurable": {"user": "ada"}, "callbacks": None}).value == "ada"


def test_the_user_s_static_context_is_there() -> None:
    assert value_of(lambda: get_runtime(Settings).context.tenant, context=Settings("t2")) == "t2"


def test_the_user_s_context_variables_are_there_and_changes_stay_inside() -> None:
    tenant = contextvars.ContextVar("tenant", default="none")

    def look() -> str:
        seen = tenant.get()
        tenant.set("changed")
        return seen

    def body(config: RunnableConfig) -> tuple[str, str]:
        tenant.set("t3")
        return early(from_function(look), config).value, tenant.get()

    assert in_node(body) == ("t3", "t3")


def test_the_context_is_that_of_the_preparation_whatever_thread_runs_it() -> None:
    tenant = contextvars.ContextVar("tenant", default="none")
    binding = ToolBinding(from_function(lambda: tenant.get()), ToolPolicy())
    tenant.set("t4")
    prepared = binding.prepare(ToolCall("t", {}), scope=Scope("run", None), config={}, asynchronous=False)
    results: list[Recorded] = []
    thread = threading.Thread(target=lambda: results.append(prepared.run()))
    thread.start()
    thread.join()
    assert results[0].value == "t4"


def test_a_given_context_is_used_and_not_changed() -> None:
    tenant = contextvars.ContextVar("tenant", default="none")
    context = contextvars.copy_context()
    context.run(tenant.set, "t5")

    def look() -> str:
        seen = tenant.get()
        tenant.set("changed")
        return seen

    binding = ToolBinding(from_function(look), ToolPolicy())
    for _ in range(2):
        prepared = binding.prepare(
            ToolCall("t", {}), scope=Scope("run", None), config={}, asynchronous=False, context=context
        )
        assert prepared.run().value == "t5"
    assert context[tenant] == "t5"


def test_nothing_leaks_into_the_caller_s_context() -> None:
    def body(config: RunnableConfig) -> None:
        before = dict(contextvars.copy_context().items())
        early(from_function(lambda: "x"), config)
        after = dict(contextvars.copy_context().items())
        assert before == after
        assert all(value is after[variable] for variable, value in before.items())

    in_node(body)


# What it cannot reach


def test_an_interrupt_fails_and_leaves_the_human_s_answer_alone() -> None:
    asked: list[str] = []

    def approve() -> str:
        asked.append("early")
        return str(interrupt("may I?"))

    error = failure_of(approve)
    assert isinstance(error, Exception)
    assert not isinstance(error, GraphInterrupt)
    assert asked == ["early"]


def test_a_store_is_out_of_reach_even_if_the_tool_swallows_the_error() -> None:
    def remember() -> str:
        try:
            get_store().put(("a",), "k", {})
        except Exception:
            return "no store"
        return "stored"

    store = InMemoryStore()
    assert isinstance(failure_of(remember, store=store), NotReplayable)
    assert store.get(("a",), "k") is None


def test_where_the_graph_has_no_store_the_tool_sees_none() -> None:
    assert value_of(lambda: get_store() is None) is True


@pytest.mark.parametrize(
    "use",
    [
        lambda runtime: runtime.store.get(("a",), "k"),
        lambda runtime: bool(runtime.store),
        lambda runtime: runtime.execution_info.task_id,
        lambda runtime: str(runtime.execution_info),
        lambda runtime: runtime.store["x"],
    ],
)
def test_what_is_not_there_yet_fails_the_run_however_it_is_used(use: Callable[[Any], Any]) -> None:
    assert isinstance(failure_of(lambda: str(use(get_runtime())), store=InMemoryStore()), NotReplayable)


class Documents(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        raise AssertionError("runs although nobody could see it")


class Observer(BaseCallbackHandler):
    """Notes the name of every callback."""

    raise_error = True

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_, **__: self.seen.append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    "nested",
    [
        lambda: FakeListChatModel(responses=["x"]).invoke("hi"),
        lambda: RunnableLambda(lambda x: x).invoke("hi"),
        lambda: tool(lambda_tool).invoke({}),
        lambda: Documents().invoke("hi"),
    ],
)
def test_a_nested_run_is_not_replayable_even_if_the_tool_swallows_the_error(nested: Callable[[], Any]) -> None:
    def nest() -> str:
        try:
            nested()
        except Exception:
            return "fallback"
        return "done"

    observer = Observer()
    error = failure_of(nest, {"callbacks": [observer]})
    assert isinstance(error, NotReplayable)
    assert set(observer.seen) <= {"on_chain_start", "on_chain_end"}  # those of the graph and its node


def lambda_tool() -> str:
    """Do nothing."""
    return "x"


def test_a_nested_run_handed_over_as_callbacks_is_not_replayable() -> None:
    bound = create_retriever_tool(Documents(), "docs", "d")
    binding = ToolBinding(bound, ToolPolicy())
    call = ToolCall("docs", {"query": "q"})
    with pytest.raises(NotReplayable):
        binding.prepare(call, scope=Scope("run", None), config={}, asynchronous=False).run()


class Narrator(BaseTool):
    name: str = "t"
    description: str = "Speaks to its run manager."

    def _run(self, run_manager: CallbackManagerForToolRun | None = None) -> str:
        assert run_manager is not None
        run_manager.on_text("hello")
        return "x"


def test_text_for_the_run_manager_is_not_replayable() -> None:
    with pytest.raises(NotReplayable):
        early(Narrator(), {})


def test_an_event_under_tags_of_its_own_is_not_replayable() -> None:
    def dispatch() -> str:
        dispatch_custom_event("e", 1, config={"tags": ["own"]})
        return "x"

    assert isinstance(failure_of(dispatch), NotReplayable)


# Nobody sees it


def test_no_handler_of_the_user_sees_an_early_run() -> None:
    hooked: contextvars.ContextVar[Any] = contextvars.ContextVar("hooked", default=None)
    register_configure_hook(hooked, inheritable=True)
    try:
        given, ambient = Observer(), Observer()

        def emit() -> str:
            dispatch_custom_event("e", 1)
            return "x"

        def body(config: RunnableConfig) -> None:
            ambient.seen.clear()
            given.seen.clear()
            early(from_function(emit, callbacks=[given], verbose=True), config)
            assert given.seen == ambient.seen == []

        hooked.set(ambient)
        with collect_runs() as runs, get_usage_metadata_callback() as usage:
            in_node(body, {"callbacks": [given]})
        assert usage.usage_metadata == {}
        assert [run.name for run in runs.traced_runs] == ["LangGraph"]
    finally:
        del _configure_hooks[-1]


class SelfMade(BaseCallbackHandler):
    num_made = 0

    def __init__(self) -> None:
        type(self).num_made += 1


def test_a_hook_that_makes_its_own_handler_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("self_made", default=None)
    register_configure_hook(variable, inheritable=True, handle_class=SelfMade, env_var="SELF_MADE_HANDLER")
    monkeypatch.setenv("SELF_MADE_HANDLER", "true")

    def emit() -> str:
        dispatch_custom_event("e", 1)
        return "x"

    try:
        recorded = early(from_function(emit), {})
        assert SelfMade.num_made == 0
        assert recorded.emissions == (CustomEvent("e", 1, of_caller=False),)
    finally:
        del _configure_hooks[-1]


def test_langsmith_tracing_is_off_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "true")
    get_env_var.cache_clear()
    monkeypatch.setattr("langsmith.utils.get_env_var", get_env_var.__wrapped__)  # would remember the setting
    assert tracing_is_enabled()

    @traceable
    def step() -> Any:
        return get_current_run_tree()

    def look() -> list[Any]:
        return [tracing_is_enabled(), get_tracing_context()["parent"], step()]

    assert early(from_function(look), {}).value == [False, None, None]


# What it emits


def test_chunks_and_events_are_recorded_in_order_as_they_were_then() -> None:
    def emit(config: RunnableConfig) -> str:
        write = get_stream_writer()
        progress = {"step": 1}
        write(progress)
        progress["step"] = 2
        dispatch_custom_event("own", progress)
        progress["step"] = 3
        dispatch_custom_event("caller's", progress, config=config)
        get_runtime().stream_writer("last")
        return "x"

    recorded = in_node(lambda config: early(from_function(emit), config), {"tags": ["a"], "metadata": {"b": 1}})
    assert recorded.emissions == (
        StreamChunk({"step": 1}),
        CustomEvent("own", {"step": 2}, of_caller=False),
        CustomEvent("caller's", {"step": 3}, of_caller=True),
        StreamChunk("last"),
    )


async def test_a_coroutine_s_emissions_are_recorded_in_order() -> None:
    async def emit(config: RunnableConfig) -> str:
        await adispatch_custom_event("own", 1)
        get_stream_writer()(2)
        await asyncio.sleep(0)
        await adispatch_custom_event("caller's", 3, config=config)
        dispatch_custom_event("sync", 4)
        return "x"

    recorded = await in_async_node(lambda config: early(from_function(emit), config, asynchronous=True))
    assert recorded.emissions == (
        CustomEvent("own", 1, of_caller=False),
        StreamChunk(2),
        CustomEvent("caller's", 3, of_caller=True),
        CustomEvent("sync", 4, of_caller=False),
    )


def test_what_cannot_be_copied_is_not_emitted() -> None:
    def emit() -> str:
        try:
            get_stream_writer()(threading.Lock())
        except Exception:
            return "swallowed"
        return "x"

    assert isinstance(failure_of(emit), NotReplayable)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Command(goto="b"),
        lambda: [Command(goto="b")],
        lambda: iter([1]),
        lambda: (x for x in [1]),
        lambda: ("content", iter([1])),
        lambda: ("content", threading.Lock()),
        lambda: open("/dev/null", "rb"),  # noqa: PTH123, SIM115
        lambda: asyncio.sleep(0),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_results_that_cannot_be_handed_out_again_are_not_kept(make: Callable[[], Any]) -> None:
    with pytest.raises(NotReplayable):
        early(from_function(make), {})


def test_a_result_is_what_it_was_when_the_tool_returned_it() -> None:
    rows = [{"n": 1}]
    recorded = early(from_function(lambda: rows), {})
    rows[0]["n"] = 2
    copied = recorded.copied()
    copied.value[0]["n"] = 3
    assert recorded.value == [{"n": 1}]


# How it ends


async def test_cancelling_reaches_the_coroutine_and_waits_for_it() -> None:
    events: list[str] = []

    async def wait() -> str:
        events.append("started")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            events.append("cleaned up")
            raise
        return "x"

    run = asyncio.ensure_future(early(from_function(wait), {}, asynchronous=True))
    while not events:
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert events == ["started", "cleaned up"]


async def test_a_coroutine_runs_on_the_same_loop() -> None:
    async def look() -> bool:
        return asyncio.get_running_loop() is loop

    loop = asyncio.get_running_loop()
    assert (await early(from_function(look), {}, asynchronous=True)).value is True


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError(), GraphInterrupt(), ValueError("x")])
async def test_whatever_a_tool_raises_is_an_ordinary_failure(error: BaseException) -> None:
    def fail() -> str:
        raise error

    async def afail() -> str:
        raise error

    with pytest.raises(Exception):  # noqa: B017
        early(from_function(fail), {})
    with pytest.raises(Exception):  # noqa: B017
        await early(from_function(afail), {}, asynchronous=True)


def test_a_run_keeps_nothing_of_the_graph_once_it_has_begun() -> None:
    binding = ToolBinding(from_function(lambda: "x"), ToolPolicy())
    prepared = binding.prepare(ToolCall("t", {}), scope=Scope("run", None), config={"tags": ["a"]}, asynchronous=False)
    early_call = prepared.run.__self__  # type: ignore[attr-defined]
    prepared.run()
    assert early_call._origin is None
    assert var_child_runnable_config.get() is None

"""Whom a `Speculation` asks: chat models, short names, any object with the protocol. The run sees none of it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.language_models import BaseChatModel, FakeListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import BaseTool, tool
from langchain_core.tracers.context import _configure_hooks, collect_runs, register_configure_hook
from langchain_core.utils.function_calling import convert_to_openai_tool
from langsmith.utils import tracing_is_enabled

from spectool_core import ConfigurationError, ModelSpeculator, Speculation, speculatable
from spectool_core.calls import Prompt, ToolCall, ToolSchema
from spectool_core.speculators.adopt import adopt
from spectool_core.testing import FakeTool, run_virtual
from spectool_langgraph import ChatModelSpeculator, SpeculationMiddleware
from tests.guessing import Call, Reply, outcomes
from tests.langgraph.agents import QUESTION, STREAM_MODES, Seen, build, in_order, make_tools, plain, run
from tests.langgraph.scripted import ScriptedChatModel, StreamingChatModel, wait_for
from tests.tool_log import ToolLog

LOOK = Reply(calls=(Call("lookup", {"q": "a"}, "call_0"),))
TELL = Reply(calls=(Call("announce", {"q": "b"}, "call_0"),), text="let me see")
DONE = Reply(text="done")
REPLIES = [LOOK, TELL, DONE]


class SmallModel(StreamingChatModel):
    """A quick chat model that records how it was asked."""

    bound: list[dict[str, Any]] = []  # noqa: RUF012 - pydantic copies defaults
    asked: list[list[BaseMessage]] = []  # noqa: RUF012
    observed: list[Any] = []  # noqa: RUF012

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        names = [convert_to_openai_tool(tool)["function"]["name"] for tool in tools]
        self.bound.append({"tools": names, **kwargs})
        return super().bind_tools(tools, **kwargs)

    def _reply(self, messages: list[BaseMessage]) -> tuple[int, Reply]:
        self.asked.append(messages)
        self.observed.append(tracing_is_enabled())
        return super()._reply(messages)


def quick(replies: Sequence[Reply] = REPLIES) -> list[Reply]:
    return [Reply(calls=reply.calls, text="PREDICTED", generation_s=0.3) for reply in replies]


def small(**fields: Any) -> SmallModel:
    return SmallModel(replies=quick(), bound=[], asked=[], observed=[], **fields)


def agent(speculation: Speculation | None, log: ToolLog | None = None) -> Any:
    return build(REPLIES, make_tools(log or ToolLog(lambda *_: 0.4)), speculation).compile()


def middleware_agent(speculation: Speculation) -> Any:
    tools = make_tools(ToolLog(lambda *_: 0.4))
    return create_agent(StreamingChatModel(replies=REPLIES), tools, middleware=[SpeculationMiddleware(speculation)])


# Chat models


def test_a_chat_model_is_adopted_through_the_entry_point() -> None:
    speculation = Speculation([model := small()])
    (speculator,) = speculation.speculators
    assert isinstance(speculator, ChatModelSpeculator)
    assert speculator.model is model
    assert speculator.name == "SmallModel"
    assert isinstance(adopt(FakeListChatModel(responses=[])), ChatModelSpeculator)


def test_a_chat_model_as_speculator_makes_the_run_faster_and_is_not_seen() -> None:
    model, log = small(), ToolLog(lambda *_: 0.4)
    speculation = Speculation([model])
    stock, ours = run_virtual(lambda: run(agent(None))), run_virtual(lambda: run(agent(speculation, log)))
    assert ours.stream == stock.stream
    assert in_order(ours.callbacks) == in_order(stock.callbacks)
    assert "PREDICTED" not in repr(ours)
    assert outcomes(speculation) == (2, 0, 0)
    assert ours.duration_s == pytest.approx(stock.duration_s - 0.8)
    assert sum(log.counts("started").values()) == 2
    assert ours.num_tasks_left == 0


@pytest.mark.parametrize("make", [agent, middleware_agent])
def test_it_starts_no_turns_of_its_own(make: Any) -> None:
    model = small()
    speculation = Speculation([model])
    run_virtual(lambda: run(make(speculation)))
    assert len(model.asked) == 3
    assert speculation.statistics().num_turns == 3


def test_it_is_asked_what_the_main_model_is_asked() -> None:
    model = small()
    run_virtual(lambda: run(agent(Speculation([model]))))
    assert [[message.type for message in prompt] for prompt in model.asked] == [
        ["human"],
        ["human", "ai", "tool"],
        ["human", "ai", "tool", "ai", "tool"],
    ]
    assert model.bound == [{"tools": ["lookup", "weigh", "announce", "note"]}] * 3


def test_choices_of_the_main_model_are_passed_on() -> None:
    model, tools = small(), make_tools(ToolLog(lambda *_: 0.4))
    bound = StreamingChatModel(replies=REPLIES).bind_tools(tools, tool_choice="any", parallel_tool_calls=False)
    run_virtual(lambda: run(build([], tools, Speculation([model]), model=bound).compile()))
    assert {(each["tool_choice"], each["parallel_tool_calls"]) for each in model.bound} == {("any", False)}


class Observer(BaseCallbackHandler):
    num_made = 0
    run_inline = True

    def __init__(self) -> None:
        type(self).num_made += 1
        self.heard: list[Any] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **_: Any) -> None:
        self.heard.append("start")

    def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self.heard.append(token)


@pytest.fixture
def hook() -> Iterator[contextvars.ContextVar[Any]]:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("observer", default=None)
    register_configure_hook(variable, inheritable=True)
    yield variable
    del _configure_hooks[-1]


class AsksAModel:
    """An object with the protocol that is built on a chat model, or on a whole agent."""

    name = "asks"

    def __init__(self, model: Any) -> None:
        self.model = model

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        message = await self.model.bind_tools([dict(tool) for tool in tools]).ainvoke(list(prompt.native))
        for call in message.tool_calls:
            yield ToolCall(call["name"], call["args"], call["id"])


class AsksAnAgent(AsksAModel):
    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        if len(prompt.messages) == 1:
            offline = make_tools(ToolLog(lambda *_: 0.0))
            result = await build([], offline, None, model=self.model.bind_tools(offline)).compile().ainvoke(QUESTION)
            for call in result["messages"][1].tool_calls:
                yield ToolCall(call["name"], call["args"], call["id"])


@pytest.mark.parametrize("wrapped", [lambda model: model, AsksAModel, AsksAnAgent], ids=["model", "object", "agent"])
@pytest.mark.parametrize("make", [agent, middleware_agent])
def test_no_observer_of_the_run_hears_of_a_speculator(
    make: Any, wrapped: Any, hook: contextvars.ContextVar[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither callbacks nor hooks, tracers, usage counters or streams; and none of them recurses into turns."""
    model, hooked = small(), Observer()
    speculation = Speculation([wrapped(model)])
    hook.set(hooked)

    async def main() -> tuple[Seen, list[Any], Any]:
        with collect_runs() as traced, get_usage_metadata_callback() as usage:
            seen = await run(make(speculation))
        return seen, [each.name for each in traced.traced_runs], usage.usage_metadata

    seen, traced, _ = run_virtual(main)
    assert seen.error is None
    assert "SmallModel" not in traced
    assert traced.count("LangGraph") == 1
    assert traced.count("StreamingChatModel") == 3
    assert "PREDICTED" not in repr(seen)
    assert "PREDICTED" not in repr(hooked.heard)
    assert hooked.heard.count("start") == 3
    assert speculation.statistics().num_turns == 3
    assert sum(outcomes(speculation)[:2]) >= 1


def test_a_hook_with_an_environment_variable_makes_no_handler_for_a_speculator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("made", default=None)
    register_configure_hook(variable, inheritable=True, handle_class=Observer, env_var="MAKES_OBSERVERS")
    try:
        model = small()

        async def main() -> Seen:
            seen = run(agent(Speculation([model])))
            return await seen

        monkeypatch.setenv("MAKES_OBSERVERS", "true")
        Observer.num_made = 0
        run_virtual(lambda: run(agent(None)))
        in_stock = Observer.num_made
        Observer.num_made = 0
        run_virtual(main)
        assert Observer.num_made == in_stock > 0
        assert len(model.asked) == 3
    finally:
        del _configure_hooks[-1]


def test_langsmith_tracing_is_off_for_speculators(monkeypatch: pytest.MonkeyPatch) -> None:
    from langsmith import tracing_context

    model = small()

    async def main() -> Seen:
        with tracing_context(enabled="local"):
            return await run(agent(Speculation([model])))

    run_virtual(main)
    assert model.observed == [False] * 3


def test_a_slow_speculator_is_cancelled_when_the_model_answers() -> None:
    slow = SmallModel(replies=[Reply(calls=LOOK.calls, generation_s=1000.0)] * 3, bound=[], asked=[], observed=[])
    speculation = Speculation([slow])
    stock, ours = run_virtual(lambda: run(agent(None))), run_virtual(lambda: run(agent(speculation)))
    assert ours.stream == stock.stream
    assert ours.duration_s == stock.duration_s
    assert ours.num_tasks_left == 0
    assert speculation.statistics().num_speculators_cancelled == 3


class Broken(SmallModel):
    def _reply(self, messages: list[BaseMessage]) -> tuple[int, Reply]:
        raise ConnectionError("no such speculator")


class SaysNonsense(SmallModel):
    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        invalid: Any = {"name": "lookup", "args": "{", "id": "x", "error": "no", "type": "invalid_tool_call"}
        return ChatResult(generations=[ChatGeneration(message=AIMessage("?", invalid_tool_calls=[invalid]))])

    async def _astream(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> Any:
        raise AssertionError("a speculator is not asked to stream")
        yield


@pytest.mark.parametrize(
    "speculator",
    [
        Broken(replies=[]),
        SaysNonsense(replies=[]),
        FakeListChatModel(responses=["no tools"]),  # has no bind_tools
        GenericFakeChatModel(messages=iter([])),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_bad_chat_model_is_no_prediction(speculator: BaseChatModel) -> None:
    speculation = Speculation([speculator])
    stock, ours = run_virtual(lambda: run(agent(None))), run_virtual(lambda: run(agent(speculation)))
    assert ours.stream == stock.stream
    assert in_order(ours.callbacks) == in_order(stock.callbacks)
    assert outcomes(speculation) == (0, 0, 2)


def test_a_prompt_of_another_framework_is_converted() -> None:
    model = small()
    prompt = Prompt([{"role": "user", "content": "hello"}], native=object())

    async def main() -> list[ToolCall]:
        predicted = ChatModelSpeculator(model).predict(prompt, [])
        return [call async for call in predicted]

    assert [(call.name, call.arguments) for call in run_virtual(main)] == [("lookup", {"q": "a"})]
    assert model.asked == [[HumanMessage("hello")]]


@pytest.mark.parametrize("wrapped", [lambda model: model, AsksAModel], ids=["model", "object"])
def test_a_sync_run_with_a_chat_model_as_speculator(wrapped: Any) -> None:
    fake = FakeTool("lookup")
    replies = [Reply(calls=(Call("lookup", {"query": "a"}, "call_0"),)), DONE]
    guess = SmallModel(
        replies=[Reply(calls=reply.calls, text="PREDICTED", generation_s=0.0) for reply in replies],
        bound=[],
        asked=[],
        observed=[],
    )
    speculation = Speculation([wrapped(guess)])
    tools: list[BaseTool] = [speculatable(tool(fake.function))]

    def wait(turn: int) -> None:
        if turn == 0:
            wait_for(lambda: speculation.statistics().total.num_runs_succeeded == 1)

    model = StreamingChatModel(replies=replies, before_answer=wait).bind_tools(tools)
    graph = build([], tools, speculation, model=model).compile()
    with collect_runs() as traced:
        chunks = [plain(chunk) for chunk in graph.stream(QUESTION, stream_mode=STREAM_MODES)]
    assert [each.name for each in traced.traced_runs if each.run_type == "llm"] == ["StreamingChatModel"] * 2
    assert "PREDICTED" not in repr(chunks)
    assert outcomes(speculation) == (1, 0, 0)
    assert speculation.statistics().num_turns == 2
    speculation.close()


# Short names and other objects


def test_a_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    (speculator,) = Speculation(["openai:gpt-5-nano"]).speculators
    assert isinstance(speculator, ModelSpeculator)


def test_a_short_name_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="api_key"):
        Speculation(["openai:gpt-5-nano"])


def test_any_object_with_the_protocol_is_taken_as_it_is() -> None:
    class Mine:
        async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
            await asyncio.sleep(0.1)
            yield ToolCall("lookup", {"q": "a"})

    speculation = Speculation([mine := Mine()])
    assert speculation.speculators == (mine,)
    assert run_virtual(lambda: run(agent(speculation))).error is None
    assert outcomes(speculation) == (1, 0, 1)


@pytest.mark.parametrize(
    "given",
    [
        None,
        42,
        "gpt-5-nano",
        "anthropic:claude",
        "openai:",
        object(),
        ScriptedChatModel,
        ScriptedChatModel(replies=[]).bind(tools=[]),
        lambda prompt, tools: [],
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_speculator(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    with pytest.raises(ConfigurationError, match="speculators="):
        Speculation([given])


@pytest.mark.parametrize("given", [small(), "openai:gpt-5-nano", None, 3], ids=["model", "text", "none", "number"])
def test_speculators_are_given_as_a_list(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="speculators="):
        Speculation(given)


def test_what_a_speculator_does_to_its_context_is_not_seen_by_early_runs() -> None:
    tenant = contextvars.ContextVar("tenant", default="nobody")
    seen: list[str] = []

    @tool
    @speculatable
    async def whose() -> str:
        """Say whose it is."""
        seen.append(tenant.get())
        return tenant.get()

    class Meddles:
        async def predict(self, prompt: Any, tools: Any) -> Any:
            tenant.set("the speculator's")
            yield ToolCall("whose", {})

    async def main() -> Any:
        tenant.set("acme's")
        replies = [Reply((Call("whose", {}, "1"),)), Reply(text="done")]
        return await run(build(replies, [whose], Speculation([Meddles()])).compile())

    run_virtual(main)
    assert seen == ["acme's"] * 2  # one of them after the answer that has no call, wasted

"""Tools and agents that are not what they look like: wrappers, tools of one name, other marks, work left behind."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.core.tools.function_tool import sync_to_async
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers.base import BaseEventHandler

from spectool_core import Speculation, ToolCall, speculatable
from spectool_llamaindex import SpeculativeFunctionAgent, speculate
from tests.guessing import Call, Guess, GuessingSpeculator, Reply, outcomes
from tests.llamaindex.agents import function_agent
from tests.llamaindex.clock import run_virtual
from tests.llamaindex.scripted import ScriptedLLM

DONE = Reply(text="done")
Asked = tuple[str, dict[str, Any]]


def asking(*calls: Asked) -> Reply:
    return Reply(tuple(Call(name, arguments, f"id-{n}") for n, (name, arguments) in enumerate(calls)))


def guessing(*turns: Sequence[Asked]) -> Speculation:
    return Speculation([GuessingSpeculator([Guess(tuple(ToolCall(*call) for call in calls)) for calls in turns])])


def said(agent: Any) -> list[str]:
    """What the tools said to the agent in a whole run."""

    async def main() -> list[str]:
        handler = agent.run(user_msg="go")
        results = [event async for event in handler.stream_events() if type(event).__name__ == "ToolCallResult"]
        await handler
        return [event.tool_output.content for event in results]

    return run_virtual(main)


def both(tool: Callable[[], Any], call: Asked, guess: Asked) -> tuple[list[str], list[str], Speculation]:
    """What one tool says to `call`, stock and where `guess` was predicted."""
    speculation = guessing([guess])
    stock, ours = (said(function_agent([asking(call), DONE], [tool()], given)) for given in (None, speculation))
    return stock, ours, speculation


@pytest.mark.parametrize("first", [True, False])
def test_the_defaults_of_a_wrapped_function_are_not_its_wrappers(first: bool) -> None:
    async def search(q: str, n: int = 1) -> str:
        """Search."""
        return f"{q} n={n}"

    @functools.wraps(search)
    async def wrapper(*args: Any, **kwargs: Any) -> str:
        kwargs.setdefault("n", 10)
        return await search(*args, **kwargs)

    calls: list[Asked] = [("search", {"q": "a"}), ("search", {"q": "a", "n": 1})]
    call, guess = calls if first else calls[::-1]
    stock, ours, speculation = both(lambda: FunctionTool.from_defaults(async_fn=speculatable(wrapper)), call, guess)
    assert ours == stock
    assert outcomes(speculation) == (0, 0, 1)


def test_further_keyword_arguments_have_an_order() -> None:
    @speculatable
    async def names(**kwargs: Any) -> list[str]:
        """List them."""
        return list(kwargs)

    call = ("names", {"b": 1, "a": 2})
    stock, ours, speculation = both(
        lambda: FunctionTool.from_defaults(async_fn=names), call, ("names", {"a": 2, "b": 1})
    )
    assert ours == stock
    assert outcomes(speculation) == (0, 0, 1)
    assert outcomes(both(lambda: FunctionTool.from_defaults(async_fn=names), call, call)[2]) == (1, 0, 0)


def test_of_two_tools_of_one_name_the_last_counts() -> None:
    """The one that a model's call runs writes, and is not marked; the other one never runs."""

    def make(given: Speculation | None) -> tuple[Any, list[int]]:
        value, hidden = [0], []

        async def read(q: str) -> str:
            """Read."""
            return f"{q}={value[0]}"

        async def harmless(v: int) -> str:
            """Nothing."""
            hidden.append(v)
            return "nothing"

        async def store(v: int) -> str:
            """Store."""
            value[0] = v
            return "ok"

        tools = [
            speculatable(FunctionTool.from_defaults(async_fn=read), reuse="ttl"),
            speculatable(FunctionTool.from_defaults(async_fn=harmless, name="store")),
            FunctionTool.from_defaults(async_fn=store),
        ]
        reading, storing = ("read", {"q": "a"}), ("store", {"v": 7})
        return function_agent([asking(reading), asking(storing), asking(reading), DONE], tools, given), hidden

    agent, hidden = make(guessing([("read", {"q": "a"})], [("store", {"v": 7})]))
    assert said(agent) == said(make(None)[0]) == ["a=0", "ok", "a=7"]
    assert hidden == []


def test_a_mark_on_one_function_says_nothing_of_the_other() -> None:
    ran: list[str] = []

    def marked(q: str) -> str:
        """Search."""
        return "marked"

    async def other(q: str) -> str:
        ran.append(q)
        return "other"

    def make() -> FunctionTool:
        return FunctionTool.from_defaults(fn=speculatable(marked), async_fn=other)

    stock, ours, _ = both(make, ("marked", {"q": "a"}), ("marked", {"q": "wrong"}))
    assert ours == stock == ["other"]
    assert ran == ["a", "a"]
    _, _, speculation = both(lambda: speculatable(make()), ("marked", {"q": "a"}), ("marked", {"q": "a"}))
    assert outcomes(speculation) == (1, 0, 0)


def test_the_thread_of_another_function_is_not_taken_for_the_tools_own() -> None:
    def one(q: str) -> str:
        """Search."""
        return "one"

    def another(q: str) -> str:
        return "another"

    tool = FunctionTool.from_defaults(fn=one, async_fn=sync_to_async(another))
    stock, ours, _ = both(lambda: speculatable(tool), ("one", {"q": "a"}), ("one", {"q": "a"}))
    assert ours == stock == ["another"]


def test_the_last_mark_counts_also_when_the_agent_has_been_made() -> None:
    runs: list[str] = []

    async def search(q: str) -> str:
        """Search."""
        runs.append(q)
        return q

    tool = speculatable(FunctionTool.from_defaults(async_fn=search))
    agent = function_agent([asking(("search", {"q": "a"})), DONE], [tool], guessing([("search", {"q": "wrong"})]))
    speculatable(tool, needs_approval=True)
    assert said(agent) == runs == ["a"]


def test_a_value_that_is_known_by_its_identity_is_not_copied() -> None:
    nothing = object()

    async def search(q: str) -> Any:
        """Search."""
        return nothing

    def make() -> FunctionTool:
        answer = lambda found: "nothing" if found is nothing else "something"  # noqa: E731
        return speculatable(FunctionTool.from_defaults(async_fn=search, callback=answer))

    stock, ours, speculation = both(make, ("search", {"q": "a"}), ("search", {"q": "a"}))
    assert ours == stock == ["nothing"]
    assert speculation.statistics().resting == {"search": "not_replayable"}


def test_tools_that_only_get_tools_knows_are_not_run_early() -> None:
    runs: list[str] = []

    @speculatable
    async def search(q: str) -> str:
        """Search."""
        runs.append(q)
        return q

    class Late(SpeculativeFunctionAgent):
        async def get_tools(self, input_str: str | None = None) -> Any:
            return [FunctionTool.from_defaults(async_fn=search)]

    speculation = guessing([("search", {"q": "a"})])
    llm = ScriptedLLM(replies=[asking(("search", {"q": "a"})), DONE])
    assert said(Late(llm=llm, speculation=speculation)) == runs == ["a"]


class Note(BaseEvent):
    text: str = ""


class Notes(BaseEventHandler):
    seen: list[str] = []  # noqa: RUF012 - a field of a pydantic model

    def handle(self, event: BaseEvent, **_: Any) -> None:
        if isinstance(event, Note):
            self.seen.append(event.text)

    async def ahandle(self, event: BaseEvent, **_: Any) -> None:
        if isinstance(event, Note):
            self.seen.append(f"async {event.text}")


@pytest.fixture
def notes() -> Any:
    handler, root = Notes(), get_dispatcher()
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)


class Client:
    """Starts its worker at first use, as many clients do."""

    def __init__(self) -> None:
        self.worker: asyncio.Task[None] | None = None

    async def _work(self) -> None:
        while True:
            text, answered = await self.asked.get()
            get_dispatcher(__name__).event(Note(text=text))
            answered.set_result(text)

    async def ask(self, text: str) -> str:
        if self.worker is None:
            self.asked: asyncio.Queue[Any] = asyncio.Queue()
            self.worker = asyncio.create_task(self._work())
        answered = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((text, answered))
        return str(await answered)


def test_a_worker_that_an_early_run_has_left_behind_is_heard(notes: Notes) -> None:
    def heard(given: Speculation | None) -> list[str]:
        notes.seen.clear()
        client = Client()

        @speculatable
        async def search(q: str) -> str:
            """Search."""
            return await client.ask(q)

        async def note(q: str) -> str:
            """Note."""
            return await client.ask(f"note {q}")

        calls = [("search", {"q": "a"}), ("note", {"q": "b"}), ("search", {"q": "c"})]
        tools = [FunctionTool.from_defaults(async_fn=function) for function in (search, note)]
        agent = function_agent([*(asking(call) for call in calls), DONE], tools, given)

        async def main() -> None:
            await agent.run(user_msg="go")
            if client.worker is not None:
                client.worker.cancel()

        run_virtual(main)
        return list(notes.seen)

    speculation = guessing([("search", {"q": "a"})])
    assert heard(speculation) == heard(None) == ["a", "note b", "c"]
    assert outcomes(speculation) == (1, 0, 1)


def test_what_handlers_hear_asynchronously_is_not_replayed_but_heard(notes: Notes) -> None:
    @speculatable
    async def search(q: str) -> str:
        """Search."""
        await get_dispatcher(__name__).aevent(Note(text=q))
        return q

    _, _, speculation = both(
        lambda: FunctionTool.from_defaults(async_fn=search), ("search", {"q": "a"}), ("search", {"q": "a"})
    )
    assert notes.seen == ["async a", "async a"]
    assert outcomes(speculation) == (0, 0, 1)


# Agents


@pytest.mark.parametrize("mode", ["client", "off"])
def test_what_an_agent_of_another_speculation_writes_is_seen(mode: Any) -> None:
    value = [0]

    async def read(q: str) -> str:
        """Read."""
        return f"{q}={value[0]}"

    async def store(v: int) -> str:
        """Store."""
        value[0] = v
        return "ok"

    def to(name: str) -> Asked:
        return ("handoff", {"to_agent": name, "reason": "x"})

    reading: Asked = ("read", {"q": "a"})
    front_llm = ScriptedLLM(replies=[asking(reading), asking(to("back")), asking(reading), DONE], in_turn=True)
    back_llm = ScriptedLLM(replies=[asking(("store", {"v": 7})), asking(to("front"))], in_turn=True)
    kept = speculatable(FunctionTool.from_defaults(async_fn=read), reuse="ttl")
    front = SpeculativeFunctionAgent(
        name="front", description="reads", llm=front_llm, tools=[kept], speculation=guessing([reading])
    )
    back = SpeculativeFunctionAgent(
        name="back",
        description="writes",
        llm=back_llm,
        tools=[FunctionTool.from_defaults(async_fn=store)],
        speculation=Speculation(mode=mode),
    )
    results = said(AgentWorkflow([front, back], root_agent="front"))
    assert [text for text in results if "=" in text] == ["a=0", "a=7"]


@pytest.mark.parametrize("made", [copy.deepcopy, lambda agent: agent.model_copy(deep=True), copy.copy])
def test_a_copy_of_an_agent_speculates_too(made: Callable[[Any], Any]) -> None:
    @speculatable
    async def search(q: str) -> str:
        """Search."""
        return q

    speculation = guessing([("search", {"q": "a"})])
    agent = function_agent(
        [asking(("search", {"q": "a"})), DONE], [FunctionTool.from_defaults(async_fn=search)], speculation
    )
    assert said(made(agent)) == ["a"]
    assert outcomes(speculation) == (1, 0, 0)


def test_tools_may_be_added_to_the_list_that_the_agent_gave_out() -> None:
    def tool(name: str) -> FunctionTool:
        async def run(q: str) -> str:
            """Search."""
            return f"{name} {q}"

        return speculatable(FunctionTool.from_defaults(async_fn=run, name=name))

    speculation = guessing([("one", {"q": "a"})], [("two", {"q": "b"})])
    agent = function_agent([asking(("one", {"q": "a"})), asking(("two", {"q": "b"})), DONE], [], speculation)
    given_out = agent.tools
    given_out.append(tool("one"))
    given_out.append(tool("two"))
    assert said(agent) == ["one a", "two b"]
    assert agent.tools is given_out


def test_classes_that_were_speculated_on_are_forgotten() -> None:
    def derived() -> weakref.ref[Any]:
        class Own(FunctionAgent):
            pass

        agent = speculate(Own(llm=ScriptedLLM(replies=[DONE])), Speculation())
        assert type(speculate(Own(llm=ScriptedLLM(replies=[DONE])), Speculation())) is type(agent)
        return weakref.ref(Own)

    references = [derived() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in references] == [None] * 3

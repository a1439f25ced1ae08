"""A main model that is streamed: the calls that it has written run while it writes on, and the run is the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage, ToolMessage
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import tools_condition
from langgraph.types import RetryPolicy

from spectool_core import Speculation, StreamSpeculator, speculatable
from spectool_core.calls import ToolCall
from spectool_core.testing import FakeTool, LeakCheck, run_virtual
from spectool_langgraph import SpeculationMiddleware
from tests.guessing import Guess, GuessingSpeculator, Reply, outcomes
from tests.langgraph.agents import (
    QUESTION,
    STREAM_MODES,
    Seen,
    build,
    in_order,
    make_tools,
    per_run,
    plain,
    run,
    tool_node,
)
from tests.langgraph.scripted import CallbackLog, ScriptedChatModel, wait_for
from tests.langgraph.test_middleware import SpeculationPlaceholder
from tests.tool_log import ToolLog

ALL_MODES = ["values", "updates", "messages", "custom", "debug", "tasks", "checkpoints", "tools"]


@dataclass(frozen=True)
class Written:
    """What a model writes next, `after_s`: text and pieces of calls; or that it breaks off."""

    after_s: float
    text: str = ""
    pieces: tuple[dict[str, Any], ...] = ()
    error: Exception | None = None


def piece(args: str = "", *, index: int | None = 0, name: str | None = None, id: str | None = None) -> dict[str, Any]:
    return dict(tool_call_chunk(name=name, args=args, id=id, index=index))


class WritingChatModel(ScriptedChatModel):
    """Writes the answer of each turn piece by piece; the n-th attempt at a turn writes its n-th script, or the last.

    `before_piece` is called with turn and number before each piece of a sync answer.
    """

    replies: list[Reply] = []  # noqa: RUF012 - a field
    scripts: list[list[list[Written]]]
    streaming: bool = False
    before_piece: Callable[[int, int], None] | None = None

    def _script(self, messages: list[BaseMessage]) -> tuple[int, list[Written]]:
        turn = sum(message.type == "ai" for message in messages)
        scripts = self.scripts[turn]
        script = scripts[min(self.attempts.count(turn), len(scripts) - 1)]
        self.attempts.append(turn)
        return turn, script

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> Iterator[ChatGenerationChunk]:
        turn, script = self._script(messages)
        for number, written in enumerate(script):
            if self.before_piece is not None:
                self.before_piece(turn, number)
            yield _chunk(turn, written)

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        turn, script = self._script(messages)
        for written in script:
            await asyncio.sleep(written.after_s)
            yield _chunk(turn, written)

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        return generate_from_stream(self._stream(messages))

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> ChatResult:
        return generate_from_stream(iter([chunk async for chunk in self._astream(messages)]))


def _chunk(turn: int, written: Written) -> ChatGenerationChunk:
    if written.error is not None:
        raise written.error
    pieces: Any = [dict(each) for each in written.pieces]
    message = AIMessageChunk(content=written.text, id=f"ai-{turn}", tool_call_chunks=pieces)
    return ChatGenerationChunk(message=message)


# The call closes at 0.75; the answer ends at 1.75.
CALL_THEN_TEXT = [
    Written(0.25, pieces=(piece(name="announce", id="call_0"),)),
    Written(0.25, pieces=(piece('{"q": '),)),
    Written(0.25, pieces=(piece('"a"}'),)),
    Written(0.5, "I look "),
    Written(0.5, "that up."),
]

# The first call closes at 0.5, the second one at 1.5, with the answer.
TWO_CALLS = [
    Written(0.25, "Both.", (piece('{"q"', name="lookup", id="call_0"),)),
    Written(0.25, pieces=(piece(': "a"}'),)),
    Written(0.5, pieces=(piece('{"q": "b"', name="weigh", id="call_1", index=1),)),
    Written(0.5, pieces=(piece("}", index=1),)),
]

# The second one closes first, at 0.75, the first one at 1.0; the answer ends at 2.0.
INTERLEAVED = [
    Written(0.25, pieces=(piece(name="lookup", id="call_0"), piece('{"q"', name="weigh", id="call_1", index=1))),
    Written(0.25, pieces=(piece('{"q": '), piece(': "b', index=1))),
    Written(0.25, pieces=(piece('"}', index=1),)),
    Written(0.25, pieces=(piece('"a"}'),)),
    Written(1.0, "Both at once."),
]

END = [Written(0.25, "That "), Written(0.25, "is it.")]
END_S = 0.5


def answering(*scripts: list[Written], **settings: Any) -> WritingChatModel:
    return WritingChatModel(scripts=[[script] for script in [*scripts, END]], **settings)


def streaming(*others: Any, **settings: Any) -> Speculation:
    return Speculation([StreamSpeculator(), *others], **settings)


def play(
    model: ScriptedChatModel,
    speculation: Speculation | None,
    log: ToolLog,
    *,
    stream_mode: Sequence[str] = STREAM_MODES,
    **settings: Any,
) -> Seen:
    tools = make_tools(log)

    async def main() -> Seen:
        graph = build([], tools, speculation, model=model.bind_tools(tools), **settings)
        compiled = graph.compile(checkpointer=InMemorySaver())
        return await run(compiled, config={"configurable": {"thread_id": "t"}}, stream_mode=stream_mode)

    return run_virtual(main)


@dataclass
class Compared:
    """Two runs with the same messages, and the runs of their tools."""

    ours: Seen
    stock: Seen
    log: ToolLog
    stock_log: ToolLog

    @property
    def saved_s(self) -> float:
        return self.stock.duration_s - self.ours.duration_s


def compare(
    make_model: Callable[[], ScriptedChatModel],
    speculation: Speculation,
    *,
    tool_s: Callable[[str, str], float] = lambda *_: 0.4,
    is_sequential: bool = True,
    **settings: Any,
) -> Compared:
    """Play it stock and with `speculation`; in total order where no two tools run at once."""
    stock_log, log = ToolLog(tool_s), ToolLog(tool_s)
    stock, ours = play(make_model(), None, stock_log, **settings), play(make_model(), speculation, log, **settings)
    assert ours.messages == stock.messages
    assert ours.error == stock.error
    assert ours.num_tasks_left == 0
    if is_sequential:
        assert ours.stream == stock.stream
        assert in_order(ours.callbacks) == in_order(stock.callbacks)
    else:
        assert Counter(map(repr, ours.stream)) == Counter(map(repr, stock.stream))
        assert per_run(ours.callbacks) == per_run(stock.callbacks)
    assert speculation.statistics().num_settled_turns == speculation.statistics().num_turns
    return Compared(ours, stock, log, stock_log)


@pytest.mark.parametrize(
    ("tool_s", "outcome", "saved_s"),
    [(0.4, (1, 0, 0), 0.4), (1.0, (1, 0, 0), 1.0), (1.6, (0, 1, 0), 1.0)],
)
@pytest.mark.parametrize("stream_mode", [STREAM_MODES, ALL_MODES])
def test_a_call_runs_while_the_model_goes_on_with_text(
    tool_s: float, outcome: tuple[int, int, int], saved_s: float, stream_mode: list[str]
) -> None:
    speculation = streaming()
    compared = compare(
        lambda: answering(CALL_THEN_TEXT), speculation, tool_s=lambda *_: tool_s, stream_mode=stream_mode
    )
    assert compared.stock.duration_s == pytest.approx(1.75 + tool_s + END_S)
    assert compared.saved_s == pytest.approx(saved_s)
    assert outcomes(speculation) == outcome
    assert compared.log.events == compared.stock_log.events
    assert len(compared.ours.messages) == 4


@pytest.mark.parametrize("mode", ALL_MODES)
def test_each_stream_mode_of_a_model_that_always_streams(mode: str) -> None:
    """LangChain streams a model by itself only where somebody watches its tokens."""
    speculation = streaming()
    compared = compare(lambda: answering(CALL_THEN_TEXT, streaming=True), speculation, stream_mode=[mode])
    assert compared.stock.stream
    assert compared.saved_s == pytest.approx(0.4)
    assert outcomes(speculation) == (1, 0, 0)


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")
def test_astream_events(version: Any) -> None:
    async def events(speculation: Speculation | None) -> list[Any]:
        tools = make_tools(ToolLog(lambda *_: 0.4))
        graph = build([], tools, speculation, model=answering(CALL_THEN_TEXT).bind_tools(tools)).compile()
        return [plain(event) async for event in graph.astream_events(QUESTION, version=version)]

    speculation = streaming()
    stock = run_virtual(lambda: events(None))
    assert run_virtual(lambda: events(speculation)) == stock
    assert len(stock) > 15
    assert outcomes(speculation) == (1, 0, 0)


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_astream_events_of_the_newest_kind() -> None:
    """Their models send events in place of tokens."""

    async def events(speculation: Speculation | None) -> list[Any]:
        tools = make_tools(ToolLog(lambda *_: 0.4))
        graph = build([], tools, speculation, model=answering(CALL_THEN_TEXT).bind_tools(tools)).compile()
        return [plain(event) async for event in await graph.astream_events(QUESTION, version="v3")]

    speculation = streaming()
    stock = run_virtual(lambda: events(None))
    assert run_virtual(lambda: events(speculation)) == stock
    assert len(stock) > 15
    assert sum(outcomes(speculation)) == 1


def test_tokens_arrive_when_they_would_have() -> None:
    async def tokens(speculation: Speculation | None) -> list[tuple[float, Any]]:
        tools, loop = make_tools(ToolLog(lambda *_: 0.4)), asyncio.get_running_loop()
        graph = build([], tools, speculation, model=answering(CALL_THEN_TEXT).bind_tools(tools)).compile()
        stream = graph.astream(QUESTION, stream_mode="messages")
        return [
            (round(loop.time(), 6), (token.content, token.tool_call_chunks))
            async for token, _ in stream
            if isinstance(token, AIMessageChunk)
        ]

    stock, ours = run_virtual(lambda: tokens(None)), run_virtual(lambda: tokens(streaming()))
    assert [token for _, token in ours] == [token for _, token in stock]
    first = len(CALL_THEN_TEXT) + 1  # LangChain adds one that says that it was the last
    assert (
        [at_s for at_s, _ in ours[:first]] == [at_s for at_s, _ in stock[:first]] == [0.25, 0.5, 0.75, 1.25, 1.75, 1.75]
    )
    assert [at_s for at_s, _ in ours[first:]] == pytest.approx([at_s - 0.4 for at_s, _ in stock[first:]])


@pytest.mark.parametrize(
    ("script", "outcome", "saved_s"),
    [
        # 0.9 s of `lookup` from 0.5 on, in time; 1.3 s of `weigh` from 1.5 on, with the end of the answer.
        (TWO_CALLS, (1, 1, 0), 0.0),
        # 0.9 s of `lookup` from 1.0 on; 1.3 s of `weigh` from 0.75 on, which ends 1.25 s before it would have.
        (INTERLEAVED, (1, 1, 0), 1.25),
    ],
    ids=["one after the other", "interleaved"],
)
def test_calls_run_while_the_model_goes_on_with_calls(
    script: list[Written], outcome: tuple[int, int, int], saved_s: float
) -> None:
    speculation = streaming()
    compared = compare(
        lambda: answering(script),
        speculation,
        tool_s=lambda name, _: 0.9 if name == "lookup" else 1.3,
        is_sequential=False,
    )
    assert compared.saved_s == pytest.approx(saved_s)
    assert outcomes(speculation) == outcome
    assert compared.log.counts("started") == compared.stock_log.counts("started")


def without_indexes(script: list[Written]) -> list[Written]:
    return [
        Written(each.after_s, each.text, tuple({**part, "index": None} for part in each.pieces), each.error)
        for each in script
    ]


def test_pieces_without_indexes() -> None:
    """LangChain merges none of them: each piece is a call of its own to it, and those that are whole are run."""
    script = [
        Written(0.25, pieces=(piece('{"q": "a"}', name="lookup", id="call_0", index=None),)),
        Written(0.25, pieces=(piece('{"q": "b"}', name="weigh", id="call_1", index=None),)),
        Written(1.0, "Both."),
    ]
    speculation = streaming()
    compared = compare(
        lambda: answering(script),
        speculation,
        tool_s=lambda name, _: 0.5 if name == "lookup" else 0.7,
        is_sequential=False,
    )
    assert compared.saved_s == pytest.approx(0.7)
    assert outcomes(speculation) == (2, 0, 0)
    compare(lambda: answering(without_indexes(CALL_THEN_TEXT)), streaming())


def test_an_id_that_arrives_late() -> None:
    script = [
        Written(0.25, pieces=(piece('{"q": ', name="lookup"),)),
        Written(0.25, pieces=(piece('"a"}'),)),
        Written(0.25, pieces=(piece(id="call_0"),)),
        Written(1.0, "Wait."),
    ]
    speculation = streaming()
    compared = compare(lambda: answering(script), speculation, tool_s=lambda *_: 2.0)
    assert compared.saved_s == pytest.approx(1.25)
    assert outcomes(speculation) == (0, 1, 0)


def test_only_marked_tools_run_early() -> None:
    script = [
        Written(0.25, pieces=(piece('{"text": "n"}', name="note", id="call_0"),)),
        Written(0.25, pieces=(piece("{}", name="unknown", id="call_1", index=1),)),
        Written(1.0, "Noted."),
    ]
    speculation = streaming()
    compared = compare(lambda: answering(script), speculation)
    assert compared.saved_s == 0.0
    assert speculation.statistics().num_launched == 0
    assert compared.log.events == compared.stock_log.events


@pytest.mark.parametrize("rest", ['"a"', '"a"]', '"a", "n": ', ""])
def test_arguments_that_never_close_start_nothing(rest: str) -> None:
    """LangChain closes them by itself where it can, once the answer has ended."""
    script = [*CALL_THEN_TEXT[:2], Written(0.25, pieces=(piece(rest),)), Written(1.0, "Oh.")]
    speculation = streaming()
    compared = compare(lambda: answering(script), speculation)
    assert compared.saved_s == 0.0
    assert speculation.statistics().num_launched == 0


# How the graph is called


@pytest.mark.parametrize("streams", [True, False])
def test_ainvoke(streams: bool) -> None:
    """Where nobody watches, a model is streamed only if it says so; otherwise there is nothing to hear."""

    async def result(speculation: Speculation | None) -> tuple[list[Any], float]:
        tools, loop = make_tools(ToolLog(lambda *_: 0.4)), asyncio.get_running_loop()
        settings = {"streaming": True} if streams else {}
        model = answering(CALL_THEN_TEXT, **settings).bind_tools(tools)
        state = await build([], tools, speculation, model=model).compile().ainvoke(QUESTION)
        return [plain(message) for message in state["messages"]], loop.time()

    speculation = streaming()
    stock, stock_s = run_virtual(lambda: result(None))
    ours, ours_s = run_virtual(lambda: result(speculation))
    assert ours == stock
    assert stock_s == pytest.approx(1.75 + 0.4 + END_S)
    assert stock_s - ours_s == pytest.approx(0.4 if streams else 0.0)
    assert outcomes(speculation) == ((1, 0, 0) if streams else (0, 0, 1))
    assert speculation.statistics().num_launched == int(streams)


def test_a_model_that_is_not_streamed() -> None:
    speculation = streaming()
    compared = compare(lambda: answering(CALL_THEN_TEXT, disable_streaming=True), speculation)
    assert compared.saved_s == 0.0
    assert compared.log.events == compared.stock_log.events
    assert outcomes(speculation) == (0, 0, 1)
    assert speculation.statistics().speculators["stream"].num_predictions == 0
    assert speculation.statistics().num_speculators_failed == 0


def test_a_stream_that_nobody_reads() -> None:
    speculation = Speculation([GuessingSpeculator([Guess((ToolCall("announce", {"q": "a"}),))])])
    compared = compare(lambda: answering(CALL_THEN_TEXT), speculation)
    assert compared.saved_s == pytest.approx(0.4)
    assert outcomes(speculation) == (1, 0, 0)


@pytest.mark.parametrize("streamed_by", ["stream", "invoke"])
def test_sync_runs(streamed_by: str) -> None:
    """The tool runs on the library's threads while the model writes: it goes on only once an early run is done."""
    log_of_runs: list[str] = []

    def play_sync(speculation: Speculation | None) -> Any:
        def wait(turn: int, number: int) -> None:
            if speculation is not None and (turn, number) == (0, 3):
                wait_for(lambda: speculation.statistics().total.num_runs_succeeded == 1)

        @tool
        @speculatable
        def announce(q: str) -> str:
            """Say it."""
            log_of_runs.append(q)
            return f"announce of {q}"

        settings = {"streaming": True} if streamed_by == "invoke" else {}
        model = answering(CALL_THEN_TEXT, before_piece=wait, **settings).bind_tools([announce])
        graph = build([], [announce], speculation, model=model).compile()
        log = CallbackLog()
        if streamed_by == "stream":
            seen = [plain(chunk) for chunk in graph.stream(QUESTION, {"callbacks": [log]}, stream_mode=STREAM_MODES)]
        else:
            seen = [plain(message) for message in graph.invoke(QUESTION, {"callbacks": [log]})["messages"]]
        return seen, in_order(log.events)

    with LeakCheck(allowed_threads=("asyncio_", "ThreadPoolExecutor")), closing(streaming()) as speculation:
        assert play_sync(speculation) == play_sync(None)
        assert outcomes(speculation) == (1, 0, 0)
        assert log_of_runs == ["a", "a"]  # once in each of the two


def test_a_sync_node_in_an_async_graph() -> None:
    """The model is called on an executor's thread; what it writes there is heard on the graph's loop."""
    fake = FakeTool("announce", parameters={"q": str})
    speculation = streaming()

    def wait(turn: int, number: int) -> None:
        if (turn, number) == (0, 3):
            wait_for(lambda: speculation.statistics().total.num_runs_succeeded == 1)

    tools = [speculatable(tool(fake.coroutine))]
    model = answering(CALL_THEN_TEXT, before_piece=wait, streaming=True).bind_tools(tools)

    def call(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", call)
    graph.add_node("tools", tool_node(tools, speculation))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    assert len(asyncio.run(graph.compile().ainvoke(QUESTION))["messages"]) == 4
    assert outcomes(speculation) == (1, 0, 0)
    assert fake.statistics().num_started == 1


@pytest.mark.parametrize("streams", [True, False])
def test_create_agent(streams: bool) -> None:
    def play_agent(speculation: Speculation | None) -> Seen:
        middleware = SpeculationPlaceholder() if speculation is None else SpeculationMiddleware(speculation)
        model = answering(CALL_THEN_TEXT, disable_streaming=not streams)
        agent = create_agent(model, make_tools(ToolLog(lambda *_: 0.4)), middleware=[middleware])
        return run_virtual(lambda: run(agent))

    speculation = streaming()
    stock, ours = play_agent(None), play_agent(speculation)
    assert stock.error is None
    assert ours.messages == stock.messages
    assert ours.stream == stock.stream
    assert in_order(ours.callbacks) == in_order(stock.callbacks)
    assert stock.duration_s - ours.duration_s == pytest.approx(0.4 if streams else 0.0)
    assert outcomes(speculation) == ((1, 0, 0) if streams else (0, 0, 1))


def test_agents_at_once_do_not_hear_one_another() -> None:
    """Each writes under the ids and indexes of the others, in pieces that fit those of the others."""

    def script(number: int) -> list[Written]:
        return [
            Written(0.25, pieces=(piece('{"q": "', name="lookup", id="call_0"),)),
            Written(0.25, pieces=(piece(f'{number}"}}'),)),
            Written(1.0, "Wait."),
        ]

    async def ask(given: Speculation | None, number: int) -> list[Any]:
        tools = make_tools(ToolLog(lambda *_: 0.4))
        graph = build([], tools, given, model=answering(script(number), streaming=True).bind_tools(tools)).compile()
        return [plain(message) for message in (await graph.ainvoke(QUESTION))["messages"]]

    async def all_at_once(given: Speculation | None) -> tuple[list[Any], float]:
        answers = await asyncio.gather(*(ask(given, number) for number in range(8)))
        return answers, asyncio.get_running_loop().time()

    speculation = streaming(adaptive=False, max_concurrency_per_tool=8)
    stock, stock_s = run_virtual(lambda: all_at_once(None))
    ours, ours_s = run_virtual(lambda: all_at_once(speculation))
    assert ours == stock
    assert stock_s - ours_s == pytest.approx(0.4)
    assert outcomes(speculation) == (8, 0, 0)


# Attempts

# It breaks off with one call written and another one begun; the next attempt writes under the same ids.
BROKEN_OFF = [
    Written(0.25, pieces=(piece('{"q": "early"}', name="lookup", id="call_0"),)),
    Written(0.25, pieces=(piece('{"q": "a', name="announce", id="call_1", index=1),)),
    Written(0.25, error=ConnectionError("busy")),
]
HEAD = piece('{"q": ', name="announce", id="call_0")
REST = [Written(0.25, pieces=(piece('"b"}'),)), Written(1.0, "At last.")]
NEXT_ATTEMPTS = {
    "whole": [Written(0.25, pieces=(HEAD,)), *REST],
    "with a stray piece": [Written(0.25, pieces=(piece('"}', index=1), HEAD)), *REST],
}


def by_model(model: WritingChatModel, tools: list[BaseTool]) -> Any:
    return model.bind_tools(tools).with_retry(wait_exponential_jitter=False, stop_after_attempt=2)


def by_fallback(model: WritingChatModel, tools: list[BaseTool]) -> Any:
    return model.bind_tools(tools).with_fallbacks([model.bind_tools(tools)])


def by_node(model: WritingChatModel, tools: list[BaseTool]) -> Any:
    return model.bind_tools(tools)


@pytest.mark.parametrize("retried", [by_model, by_fallback, by_node])
@pytest.mark.parametrize("second", NEXT_ATTEMPTS.values(), ids=NEXT_ATTEMPTS)
def test_an_attempt_that_broke_off_is_not_mixed_with_the_next(
    retried: Callable[..., Any], second: list[Written]
) -> None:
    """Only calls that one attempt wrote in full are run: `a` was never closed, and `b` never begun, by the first."""
    policy = (
        RetryPolicy(initial_interval=0.5, jitter=False, retry_on=(ConnectionError,)) if retried is by_node else None
    )

    def play_retried(given: Speculation | None, log: ToolLog) -> Seen:
        tools = make_tools(log)
        model = WritingChatModel(scripts=[[BROKEN_OFF, second], [END]], streaming=True)
        graph = build([], tools, given, model=retried(model, tools), retry_policy=policy).compile()
        return run_virtual(lambda: run(graph))

    speculation = streaming()
    logs = [ToolLog(lambda *_: 0.4), ToolLog(lambda *_: 0.4)]
    stock, ours = play_retried(None, logs[0]), play_retried(speculation, logs[1])
    assert stock.error is None
    assert ours.messages == stock.messages
    assert ours.stream == stock.stream
    assert in_order(ours.callbacks) == in_order(stock.callbacks)
    assert logs[0].counts("started") == {("announce", "b"): 1}
    assert logs[1].counts("started") == {("lookup", "early1"): 1, ("announce", "b"): 1}
    assert stock.duration_s - ours.duration_s == pytest.approx(0.4)
    assert outcomes(speculation) == (1, 0, 0)
    assert speculation.statistics().num_turns == 2


# Reads and writes


def file_tools(**policy: Any) -> list[BaseTool]:
    """Tools that read and write two files."""
    texts = {"a": "old", "b": "other"}

    @tool
    @speculatable(**policy)
    async def read(path: str) -> str:
        """Read a file."""
        await asyncio.sleep(0.1)
        text = texts[path]
        await asyncio.sleep(0.2)
        return text

    @tool
    async def write(path: str, text: str) -> str:
        """Write a file."""
        await asyncio.sleep(0.2)
        texts[path] = text
        await asyncio.sleep(0.2)
        return "written"

    return [read, write]


def read_of(path: str, index: int = 0) -> tuple[dict[str, Any], ...]:
    return (piece(f'{{"path": "{path}"}}', name="read", id=f"call_{index}", index=index),)


def write_of(path: str, text: str, index: int = 0) -> tuple[dict[str, Any], ...]:
    return (piece(f'{{"path": "{path}", "text": "{text}"}}', name="write", id=f"call_{index}", index=index),)


# Read, write, read; write beside a read that closes first; read again. The model goes on with text after each.
READS_AND_WRITES = [
    [Written(0.25, pieces=read_of("a")), Written(1.0, "It says")],
    [Written(0.25, pieces=write_of("a", "new")), Written(1.0, "Now it says")],
    [Written(0.25, pieces=read_of("a")), Written(1.0, "It says")],
    [Written(0.25, pieces=read_of("a")), Written(0.5, pieces=write_of("a", "newer", 1)), Written(1.0, "Again")],
    [Written(0.25, pieces=read_of("a")), Written(0.25, pieces=read_of("b", 1)), Written(1.0, "They say")],
]


@pytest.mark.parametrize("policy", [{}, {"reuse": "ttl"}, {"reuse": "ttl", "reads": ["files"]}], ids=str)
@pytest.mark.parametrize("hasty", [True, False])
def test_what_was_read_early_is_never_older_than_what_was_written(policy: dict[str, Any], hasty: bool) -> None:
    """A hasty speculator names each read one step early, before the write that comes first, and both reads always."""
    reads = (ToolCall("read", {"path": "a"}), ToolCall("read", {"path": "b"}))
    others = [GuessingSpeculator([Guess(reads, 0.0)] * 6)] if hasty else []
    speculation = streaming(*others)

    async def ask(given: Speculation | None) -> tuple[list[str], float]:
        tools, loop = file_tools(**policy), asyncio.get_running_loop()
        model = answering(*READS_AND_WRITES, streaming=True).bind_tools(tools)
        messages = (await build([], tools, given, model=model).compile().ainvoke(QUESTION))["messages"]
        return [message.content for message in messages if isinstance(message, ToolMessage)], loop.time()

    stock, stock_s = run_virtual(lambda: ask(None))
    ours, ours_s = run_virtual(lambda: ask(speculation))
    assert stock == ["old", "written", "new", "new", "written", "newer", "other"]
    assert ours == stock
    assert outcomes(speculation, "read") == (4, 0, 1)  # the one beside a write
    assert stock_s - ours_s == pytest.approx(3 * 0.3)

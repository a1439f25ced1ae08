"""What the engine is told of a turn's early runs: when, how often, and what it is not told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from spectool_core import Speculation
from spectool_core.calls import ToolCall
from spectool_core.engine import EngineTurn
from spectool_core.engine.current import current_turn, set_current_turn
from spectool_core.engine.endpoint import Address, EngineEndpoint
from spectool_core.engine.idle_streams import IdleStreams, Place
from spectool_core.events import EngineUnavailable, Event, OutputsPosted, UnavailableReason
from spectool_core.runs import RunContext
from spectool_core.turn import Turn
from spectool_core.vllm.tool_cache import Limits
from spectool_core.vllm.wire import MAX_OUTPUT_BYTES
from tests.core.engine.test_idle_streams import resident
from tests.core.fakes import PROMPT, RUN, FakeToolbox, FromFunction, Predicts, call, search, start, virtual

ADDRESS, OTHER = Address("http://engine/x", ()), Address("http://engine/y", ())


@dataclass
class Engine:
    """Stands for an `EngineClient`: keeps what is posted until the test answers."""

    endpoint: EngineEndpoint = field(default_factory=lambda: EngineEndpoint("http://engine/v1"))
    idle_streams: IdleStreams = field(default_factory=IdleStreams)
    has_answered: bool | None = None
    events: list[Event] = field(default_factory=list)
    warnings: list[tuple[UnavailableReason, int | None]] = field(default_factory=list)
    posts: list[list[dict[str, Any]]] = field(default_factory=list)
    sent: list[tuple[Address, bytes, int]] = field(default_factory=list)
    ended: list[Address] = field(default_factory=list)
    status: int | None = 200
    is_slow: bool = False

    def announce(self, event: Event) -> None:
        self.events.append(event)

    def warn(self, reason: UnavailableReason, status: int | None = None) -> None:
        self.warnings.append((reason, status))

    def post(self, turn: EngineTurn, address: Address, body: bytes, num_outputs: int) -> None:
        self.posts.append(json.loads(body))
        self.sent.append((address, body, num_outputs))
        if not self.is_slow:
            self.answer(turn)

    def end(self, address: Address, loop: asyncio.AbstractEventLoop) -> None:
        self.ended.append(address)

    def answer(self, turn: EngineTurn) -> None:
        address, _, num_outputs = self.sent[-1]
        turn.posted(address, self.status, num_outputs)

    def turn(self, number: int, context: RunContext, conversation: Any, loop: asyncio.AbstractEventLoop) -> EngineTurn:
        made = EngineTurn(number, Place(context.run, conversation), loop, self)  # type: ignore[arg-type]
        made.seen()
        return made

    def end_run(self, run: Any) -> None:
        self.idle_streams.end_run(run)

    @property
    def told(self) -> list[tuple[str, Any]]:
        """(query, "pending", "withdrawn" or the output) in the order of the posts."""
        return [(entry["params"]["query"], _what(entry)) for entries in self.posts for entry in entries]


def _what(entry: dict[str, Any]) -> Any:
    if "output" in entry:
        return entry["output"]
    return "pending" if entry["pending"] else "withdrawn"


def begin(
    *queries: str, toolbox: FakeToolbox | None = None, engine: Engine | None = None, **settings: Any
) -> tuple[Turn, Engine]:
    """A turn whose speculator says `queries` at once; its main model's request has been accepted."""
    engine = engine or Engine()
    toolbox = toolbox or FakeToolbox()
    if not toolbox._bound:
        toolbox.add(search(1.0))

    async def at_once() -> AsyncIterator[ToolCall]:
        for query in queries:
            yield call(query=query)

    speculation = Speculation([FromFunction(at_once)], **settings)
    speculation.engine = engine  # type: ignore[assignment]
    turn = start(speculation, toolbox)
    assert turn.engine_turn is not None
    turn.engine_turn.accepted(ADDRESS)
    return turn, engine


@virtual
async def test_a_run_is_pending_when_it_begins_and_has_an_output_when_it_ends() -> None:
    turn, engine = begin("x")
    await asyncio.sleep(0.5)
    assert engine.told == [("x", "pending")]
    await asyncio.sleep(1.0)
    assert engine.told == [("x", "pending"), ("x", "x#1")]
    assert engine.posts[1] == [{"name": "search", "params": {"query": "x"}, "output": "x#1", "turn": 1}]
    assert [event.num_outputs for event in engine.events if isinstance(event, OutputsPosted)] == [0, 1]
    turn.settle()


@virtual
async def test_what_happens_at_once_is_one_post() -> None:
    turn, engine = begin("x", "y", "z")
    await asyncio.sleep(2.0)
    assert [len(entries) for entries in engine.posts] == [3, 3]
    turn.settle()


@virtual
async def test_what_happens_while_a_post_is_under_way_goes_into_the_next() -> None:
    engine = Engine(is_slow=True)
    turn, _ = begin("x", "y", engine=engine)
    await asyncio.sleep(2.0)
    assert engine.told == [("x", "pending"), ("y", "pending")]
    assert turn.engine_turn is not None
    engine.answer(turn.engine_turn)
    await asyncio.sleep(0)
    assert [output for _, output in engine.told[2:]] == ["x#1", "y#2"]
    turn.settle()


@virtual
async def test_a_run_that_fails_is_withdrawn() -> None:
    toolbox = FakeToolbox()
    toolbox.add(search(1.0, error=ConnectionError("down")))
    turn, engine = begin("x", toolbox=toolbox)
    await asyncio.sleep(2.0)
    assert engine.told == [("x", "pending"), ("x", "withdrawn")]
    turn.settle()


@virtual
async def test_a_run_that_times_out_is_withdrawn() -> None:
    turn, engine = begin("x", timeout_s=0.5)
    await asyncio.sleep(2.0)
    assert engine.told == [("x", "pending"), ("x", "withdrawn")]
    turn.settle()


@virtual
async def test_a_run_that_fails_before_the_engine_has_heard_of_it_is_not_spoken_of() -> None:
    toolbox, engine = FakeToolbox(), Engine(is_slow=True)
    toolbox.add(search(lambda arguments: 1.0 if arguments["query"] == "x" else 0.25, error=ConnectionError("down")))
    turn, _ = begin("x", "y", toolbox=toolbox, engine=engine, max_concurrency=1)
    await asyncio.sleep(1.1)
    assert engine.told == [("x", "pending")]
    await asyncio.sleep(1.0)  # y has begun and failed while the first post was under way
    assert turn.engine_turn is not None
    engine.answer(turn.engine_turn)
    await asyncio.sleep(0)
    assert engine.told == [("x", "pending"), ("x", "withdrawn")]
    turn.settle()


@virtual
async def test_queued_runs_are_not_spoken_of_and_dropped_by_the_answer() -> None:
    turn, engine = begin("x", "y", max_concurrency=1)
    await asyncio.sleep(0.5)
    assert engine.told == [("x", "pending")]
    turn.answer([call(query="y")])
    await asyncio.sleep(5.0)
    assert engine.told == [("x", "pending")]  # nor is the withdrawal of what the model has not asked for
    turn.settle()


@virtual
async def test_after_the_answer_only_what_it_asked_for_is_told() -> None:
    turn, engine = begin("x", "y")
    await asyncio.sleep(0.5)
    turn.answer([call(query="y")])
    claimed = await turn.claim(call(query="y"))
    assert claimed.outcome == "join"
    await asyncio.sleep(0)
    assert engine.told == [("x", "pending"), ("y", "pending"), ("y", claimed.result)]


@virtual
async def test_runs_that_the_answer_itself_begins_are_not_spoken_of() -> None:
    turn, engine = begin("x")
    await asyncio.sleep(0.5)
    turn.answer([call(query="y", id="1"), call(query="y", id="2")])
    await asyncio.sleep(0.1)
    assert [(await turn.claim(call(query="y"))).outcome for _ in range(2)] == ["join", "hit"]
    await asyncio.sleep(0)
    assert engine.told == [("x", "pending")]


@virtual
async def test_an_output_that_the_answer_asks_for_twice_is_told_once() -> None:
    turn, engine = begin("x")
    await asyncio.sleep(2.0)
    turn.answer([call(query="x", id="1"), call(query="x", id="2")])
    assert [(await turn.claim(call(query="x"))).outcome for _ in range(2)] == ["hit", "hit"]
    await asyncio.sleep(0)
    assert engine.told == [("x", "pending"), ("x", "x#1")]


@virtual
async def test_the_output_of_a_joined_run_is_posted_though_the_turn_is_settled() -> None:
    engine = Engine(is_slow=True)
    turn, _ = begin("x", engine=engine)
    await asyncio.sleep(0.5)
    turn.answer([call(query="x")])
    await turn.claim(call(query="x"))  # the post of "pending" is still under way
    await asyncio.sleep(1.0)
    assert engine.told == [("x", "pending")]
    assert turn.engine_turn is not None
    engine.answer(turn.engine_turn)
    await asyncio.sleep(0)
    assert engine.told == [("x", "pending"), ("x", "x#1")]


@virtual
async def test_the_next_model_call_waits_for_no_tool_that_still_runs() -> None:
    turn, engine = begin("x")
    await asyncio.sleep(0.5)
    turn.answer([call(query="x")])  # and somebody else answers it
    assert turn.engine_turn is not None
    kept = resident()
    turn.engine_turn.keep(kept)
    assert engine.idle_streams.take(turn.engine_turn.place) == [kept]
    await asyncio.sleep(0)
    assert engine.told == [("x", "pending"), ("x", "withdrawn")]
    turn.settle()


@virtual
async def test_a_join_that_is_cancelled_is_withdrawn_though_the_turn_is_settled() -> None:
    turn, engine = begin("x")
    await asyncio.sleep(0.5)
    turn.answer([call(query="x")])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(turn.claim(call(query="x")), 0.1)
    await asyncio.sleep(0.1)
    assert engine.told == [("x", "pending"), ("x", "withdrawn")]


@pytest.mark.parametrize(
    "value", [7, None, ["text"], "x" * (MAX_OUTPUT_BYTES + 1), "\0" * MAX_OUTPUT_BYTES, "half \ud83d of a pair"]
)
def test_what_is_no_text_or_too_long_is_withdrawn(value: Any) -> None:
    @virtual
    async def check() -> None:
        toolbox = FakeToolbox()
        toolbox.add(search(1.0, result=value))
        turn, engine = begin("x", toolbox=toolbox)
        await asyncio.sleep(2.0)
        assert engine.told == [("x", "pending"), ("x", "withdrawn")]
        turn.answer([call(query="x")])
        assert (await turn.claim(call(query="x"))).outcome == "hit"

    check()


@virtual
async def test_a_call_that_utf_8_cannot_write_is_not_spoken_of() -> None:
    turn, engine = begin("half \ud83d of a pair", "x")
    await asyncio.sleep(2.0)
    assert engine.told == [("x", "pending"), ("x", "x#2")]
    turn.settle()


@pytest.mark.parametrize("text", ["x" * 750_000, "é" * 360_000, "\U0001f600" * (MAX_OUTPUT_BYTES // 4)])
def test_no_post_is_larger_than_the_server_takes(text: str) -> None:
    @virtual
    async def check() -> None:
        toolbox = FakeToolbox()
        toolbox.add(search(1.0, result=text))
        turn, engine = begin("x", "y", "z", toolbox=toolbox)
        await asyncio.sleep(2.0)
        assert engine.told[3:] == [("x", text), ("y", text), ("z", text)]
        assert max(len(body) for _, body, _ in engine.sent) <= Limits().max_body_bytes
        assert [event.num_outputs for event in engine.events if isinstance(event, OutputsPosted)] == [0, 1, 1, 1]
        turn.settle()

    check()


@virtual
async def test_what_becomes_of_a_post_for_an_attempt_that_failed_is_all_the_same_to_the_next() -> None:
    turn, engine = begin("x", engine=Engine(is_slow=True, has_answered=True))
    await asyncio.sleep(0.5)
    assert turn.engine_turn is not None
    turn.engine_turn.closed()
    turn.engine_turn.opened(OTHER, is_streamed=True)
    engine.status = 404
    engine.answer(turn.engine_turn)
    await asyncio.sleep(0)
    assert [address for address, _, _ in engine.sent] == [ADDRESS, OTHER]
    assert (engine.told, engine.events, engine.ended) == ([("x", "pending")] * 2, [], [])
    turn.settle()


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_post_that_came_before_its_request_is_sent_again(*, has_begun: bool) -> None:
    """The request may wait for a connection; whether the post's answer or the reply comes first is chance."""

    @virtual
    async def check() -> None:
        speculation = Speculation([Predicts(call(), delay_s=0)])
        speculation.engine = engine = Engine(has_answered=True, is_slow=True, status=404)  # type: ignore[assignment]
        toolbox = FakeToolbox()
        toolbox.add(search(1.0))
        turn = start(speculation, toolbox)
        assert turn.engine_turn is not None
        turn.engine_turn.opened(ADDRESS, is_streamed=True)
        await asyncio.sleep(0.5)
        steps = [lambda made: made.accepted(ADDRESS), engine.answer]
        for step in steps if has_begun else reversed(steps):
            step(turn.engine_turn)
        await asyncio.sleep(0)
        assert engine.told == [("x", "pending")] * 2
        assert (engine.events, engine.warnings, engine.ended) == ([], [], [])
        turn.settle()

    check()


@virtual
async def test_a_retry_is_told_all_again() -> None:
    turn, engine = begin("x")
    await asyncio.sleep(2.0)
    assert turn.engine_turn is not None
    turn.engine_turn.closed("cut")
    turn.engine_turn.accepted(OTHER)
    await asyncio.sleep(0)
    assert engine.told == [("x", "pending"), ("x", "x#1"), ("x", "x#1")]
    turn.settle()


@virtual
async def test_an_engine_that_has_not_shown_itself_is_told_nothing() -> None:
    speculation = Speculation([Predicts(call(), delay_s=0)])
    engine = Engine()
    speculation.engine = engine  # type: ignore[assignment]
    toolbox = FakeToolbox()
    toolbox.add(search(1.0))
    turn = start(speculation, toolbox)
    assert turn.engine_turn is not None
    turn.engine_turn.opened(ADDRESS, is_streamed=True)
    await asyncio.sleep(2.0)
    assert engine.posts == []
    turn.engine_turn.accepted(ADDRESS)
    await asyncio.sleep(0)
    assert engine.told == [("x", "x#1")]
    turn.settle()


@pytest.mark.parametrize(
    ("has_answered", "is_streamed", "is_told"),
    [(None, True, False), (None, False, True), (True, True, True), (True, False, True), (False, False, False)],
)
def test_posts_may_overtake_a_request_where_its_reply_does_not_show_the_engine(
    *, has_answered: bool | None, is_streamed: bool, is_told: bool
) -> None:
    @virtual
    async def check() -> None:
        speculation = Speculation([Predicts(call(), delay_s=0)])
        speculation.engine = engine = Engine(has_answered=has_answered)  # type: ignore[assignment]
        toolbox = FakeToolbox()
        toolbox.add(search(1.0))
        turn = start(speculation, toolbox)
        assert turn.engine_turn is not None
        turn.engine_turn.opened(ADDRESS, is_streamed=is_streamed)
        await asyncio.sleep(0.5)
        assert bool(engine.posts) is is_told
        turn.settle()

    check()


@virtual
async def test_a_post_to_what_is_no_engine_is_not_spoken_of() -> None:
    """The reply, which says that the plugin is absent, is still to come."""
    turn, engine = begin("x", engine=Engine(status=404, is_slow=True))
    await asyncio.sleep(0.5)
    engine.has_answered = None
    assert turn.engine_turn is not None
    engine.answer(turn.engine_turn)
    await asyncio.sleep(2.0)
    assert len(engine.posts) == 1
    assert engine.events == []
    turn.settle()


@pytest.mark.parametrize(
    ("status", "reason"), [(404, "post_refused"), (413, "post_refused"), (None, "post_failed"), (409, None)]
)
def test_a_refused_post_ends_the_posts_of_its_turn(status: int | None, reason: str | None) -> None:
    @virtual
    async def check() -> None:
        turn, engine = begin("x", engine=Engine(status=status))
        await asyncio.sleep(2.0)
        assert engine.told == [("x", "pending")]
        told = [(event.reason, event.status) for event in engine.events if isinstance(event, EngineUnavailable)]
        assert told == engine.warnings == ([] if reason is None else [(reason, status)])
        assert engine.ended == ([] if reason is None else [ADDRESS])  # nor does the engine wait for what it took
        turn.settle()

    check()


@virtual
async def test_a_post_that_is_refused_after_the_answer_came_too_late() -> None:
    engine = Engine(is_slow=True, status=404)
    turn, _ = begin("x", engine=engine)
    await asyncio.sleep(0.5)
    turn.answer([])
    assert turn.engine_turn is not None
    engine.answer(turn.engine_turn)
    assert engine.events == []


@virtual
async def test_a_model_whose_request_nobody_saw_is_client_mode() -> None:
    engine = Engine()
    made = EngineTurn(1, Place("run", None), asyncio.get_running_loop(), engine)  # type: ignore[arg-type]
    made.answered(())
    assert engine.warnings == [("request_not_seen", None)]


@virtual
async def test_the_turn_of_a_context_ends_with_the_next_call() -> None:
    turn, _ = begin()
    assert current_turn() is None
    set_current_turn(turn.engine_turn)
    assert current_turn() is turn.engine_turn
    set_current_turn(None)
    assert current_turn() is None
    turn.settle()


def test_without_an_agent_run_there_is_no_turn_in_the_engine() -> None:
    async def check() -> None:
        speculation = Speculation(engine="vllm", engine_url="http://127.0.0.1:9/v1")
        toolbox = FakeToolbox()
        toolbox.add(search(1.0))
        without = start(speculation, toolbox, RunContext(run=None))
        assert without.engine_turn is None
        assert start(speculation, toolbox, RUN).engine_turn is not None
        assert speculation.start_turn(PROMPT, (), toolbox, RUN, loop=asyncio.get_running_loop()).engine_turn is not None

    asyncio.run(check())

"""The main model's own stream: which calls are heard in it and when, and what a turn makes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from spectool_core.annotation import ToolPolicy
from spectool_core.calls import Prompt, ToolCall, ToolSchema
from spectool_core.events import CallPredicted, RunFinished
from spectool_core.speculation import Speculation
from spectool_core.speculators.stream import AnswerStream, StreamSpeculator
from spectool_core.statistics import SourceStatistics
from spectool_core.testing import sleep_until
from tests.core.fakes import (
    RUN,
    FakeToolbox,
    Predicts,
    Recorder,
    call,
    no_tasks,
    now,
    real_call,
    search,
    skips,
    toolbox_of,
    virtual,
)
from tests.core.speculators.strategies import json_objects, json_values, pieces_of

Delta = dict[str, Any]


def piece(arguments: Any = None, *, name: str | None = None, id: str | None = None, index: int | None = None) -> Delta:
    """One entry of a delta's `tool_calls`, without the fields that are None."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {key: value for key, value in (("index", index), ("id", id), ("function", function)) if value is not None}


def delta(*pieces: Any) -> Delta:
    return {"role": "assistant", "content": None, "tool_calls": list(pieces)}


def text(content: str) -> Delta:
    return {"content": content}


def search_of(query: str, id: str | None = None) -> ToolCall:
    return ToolCall("search", {"query": query}, id)


class Ear:
    """An answer as it is written, and all that has been heard of it."""

    def __init__(self) -> None:
        self.stream = AnswerStream(asyncio.get_running_loop())
        self.heard: list[ToolCall] = []
        self._listener = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        prompt = Prompt([], answer=self.stream)
        async for heard in StreamSpeculator().predict(prompt, [{"type": "function"}]):
            self.heard.append(heard)

    async def after(self, *deltas: Mapping[str, Any]) -> list[ToolCall]:
        """What these deltas let it hear."""
        num_before = len(self.heard)
        for each in deltas:
            self.stream.feed(each)
        await asyncio.sleep(1)
        return self.heard[num_before:]

    async def close(self) -> None:
        self._listener.cancel()
        await asyncio.wait([self._listener])


async def heard_after_each(*deltas: Mapping[str, Any]) -> list[list[ToolCall]]:
    """The calls that each of the deltas lets be heard."""
    ear = Ear()
    heard = [await ear.after(each) for each in deltas]
    await ear.close()
    return heard


# What is heard


@virtual
async def test_a_call_is_heard_when_its_arguments_close_and_not_before() -> None:
    heard = await heard_after_each(
        text("Let me see."),
        delta(piece("", name="search", id="1", index=0)),
        delta(piece('{"query"', index=0)),
        delta(piece(': "x', index=0)),
        delta(piece('"}', index=0)),
        delta(piece("", index=0)),
        text("And that is that."),
        {},
    )
    assert heard == [[], [], [], [], [search_of("x", "1")], [], [], []]


@virtual
async def test_interleaved_calls_are_heard_in_the_order_in_which_they_close() -> None:
    heard = await heard_after_each(
        delta(piece(name="search", id="1", index=0), piece(name="search", id="2", index=1)),
        delta(piece('{"query": ', index=0), piece('{"query"', index=1)),
        delta(piece(': "b"}', index=1), piece('"a', index=0)),
        delta(piece('"}', index=0)),
    )
    assert heard == [[], [], [search_of("b", "2")], [search_of("a", "1")]]


@virtual
async def test_two_calls_that_close_in_one_delta_are_heard_in_its_order() -> None:
    heard = await heard_after_each(
        delta(piece('{"query": "a"', name="search", index=0), piece('{"query": "b"', name="search", index=1)),
        delta(piece("}", index=1), piece("}", index=0)),
    )
    assert heard == [[], [search_of("b"), search_of("a")]]


@virtual
async def test_calls_without_indexes_follow_one_another() -> None:
    heard = await heard_after_each(
        delta(piece('{"query": ', name="search", id="1")),
        delta(piece('"a"}')),
        delta(piece('{"query": ', name="search", id="2")),
        delta(piece('"b"}')),
    )
    assert heard == [[], [search_of("a", "1")], [], [search_of("b", "2")]]


@virtual
async def test_an_id_may_come_late_or_after_all() -> None:
    """With a later piece it is the call's; after the call has closed it is too late for it, and no other call."""
    heard = await heard_after_each(
        delta(piece('{"query": ', name="search", index=0)),
        delta(piece('"a"}', id="1", index=0)),
        delta(piece('{"query": "b"}', name="search", index=1)),
        delta(piece(id="2", index=1)),
        delta(piece("", id="2", index=1)),
    )
    assert heard == [[], [search_of("a", "1")], [search_of("b")], [], []]


@virtual
async def test_arguments_may_close_in_the_middle_of_a_piece() -> None:
    heard = await heard_after_each(
        delta(piece('{"query": "a', name="search", index=0)),
        delta(piece('}"} \n', index=0)),
        delta(piece(" ", index=0), piece('{"query": "b"}', name="search", index=1)),
    )
    assert heard == [[], [search_of("a}")], [search_of("b")]]


@virtual
async def test_a_placeholder_before_the_arguments_is_never_heard() -> None:
    """`{}` may be a call without arguments, or come before them: which of the two is known only at the end."""
    heard = await heard_after_each(
        delta(piece("{}", name="search", index=0)),
        delta(piece('{"query": "a"}', index=0)),
        delta(piece('{"query": "b"}', name="search", index=1)),
    )
    assert heard == [[], [], [search_of("b")]]


@virtual
async def test_equal_pieces_are_all_part_of_the_call() -> None:
    heard = await heard_after_each(
        delta(piece('{"query": "', name="search", index=0)),
        *[delta(piece("ha", index=0))] * 3,
        delta(piece('"}', index=0)),
    )
    assert heard == [[], [], [], [], [search_of("hahaha")]]


@pytest.mark.parametrize("whole", ['{"query": "x"', '{"query": {"a": 1}', '{"query": "x}', "{", '["x"]', "x", "NaN"])
@virtual
async def test_what_is_no_whole_object_is_never_heard(whole: str) -> None:
    assert not any(await heard_after_each(*[delta(piece(each, name="search", index=0)) for each in ("", *whole)]))


@virtual
async def test_arguments_that_come_as_an_object_are_heard() -> None:
    assert await heard_after_each(delta(piece({"query": "x"}, name="search"))) == [[search_of("x")]]


BROKEN: list[Any] = [
    {"tool_calls": "search"},
    {"tool_calls": {"index": 0}},
    {"tool_calls": 1},
    delta(None),
    delta("search"),
    delta({"index": 0, "function": "search"}),
    delta({"index": 0, "function": None}),
    delta(piece("}", index=0), []),
]


@pytest.mark.parametrize("broken", BROKEN, ids=repr)
@virtual
async def test_after_a_broken_delta_nothing_is_heard(broken: Any) -> None:
    """A piece of some call may have been in it; what was heard before stands."""
    heard = await heard_after_each(
        delta(piece('{"query": "a"}', name="search", id="1", index=0)),
        delta(piece('{"query": "b"', name="search", id="2", index=1)),
        broken,
        delta(piece("}", index=1)),
        delta(piece('{"query": "c"}', name="search", id="3", index=2)),
    )
    assert heard == [[search_of("a", "1")], [], [], [], []]


@pytest.mark.parametrize("broken", [[], [{"tool_calls": "search"}]], ids=["cut off", "broken"])
@virtual
async def test_another_attempt_begins_from_nothing(broken: list[Any]) -> None:
    """It writes under the same indexes and ids: pieces of the two must not become one call."""
    ear = Ear()
    first = [delta(piece('{"query": "a', name="search", id="call_0", index=0)), *broken]
    assert await ear.after(*first) == []
    ear.stream.restart()
    assert await ear.after(delta(piece('{"query": ', name="search", id="call_0", index=0))) == []
    assert await ear.after(delta(piece('"b"}', index=0))) == [search_of("b", "call_0")]
    ear.stream.restart()
    assert await ear.after(delta(piece('"c"}', index=0))) == []
    assert await ear.after(delta(piece('{"query": "d"}', name="search", index=1))) == [search_of("d")]
    await ear.close()


@virtual
async def test_more_calls_than_anyone_asks_for_are_not_heard() -> None:
    ear = Ear()
    many = [delta(piece('{"query": "x"}', name="search", index=index)) for index in range(1000)]
    assert len(await ear.after(*many)) == 128
    await ear.close()


# Whatever is written

made = st.lists(
    st.tuples(st.sampled_from(["search", "weigh"]), json_objects(min_size=1), st.sampled_from(["first", "late", ""])),
    min_size=1,
    max_size=3,
)


@settings(max_examples=100, deadline=None)
@given(made, st.sampled_from(["given", "missing"]), st.booleans(), st.data())
def test_each_call_is_heard_once_as_its_last_piece_comes(
    made: list[tuple[str, dict[str, Any], str]], indexes: str, interleaved: bool, data: st.DataObject
) -> None:
    """In any split; interleaved where indexes tell the calls apart; several pieces to a delta or one."""
    queues: list[list[Delta]] = []
    expected: dict[int, ToolCall] = {}
    for position, (name, arguments, id_comes) in enumerate(made):
        index, id_ = (position if indexes == "given" else None), (f"call_{position}" if id_comes else None)
        texts = [part for part in data.draw(pieces_of(json.dumps(arguments))) if part]
        queue = [piece(part, index=index) for part in texts]
        if id_comes == "late":
            queue[-1]["id"] = id_
        queues.append([piece("", name=name, id=id_ if id_comes == "first" else None, index=index), *queue])
        expected[id(queue[-1])] = ToolCall(name, arguments, id_)
    pieces: list[Delta] = []
    while any(queues):
        open_ = [queue for queue in queues if queue]
        pieces.append((data.draw(st.sampled_from(open_)) if interleaved and indexes == "given" else open_[0]).pop(0))

    @virtual
    async def main() -> None:
        ear = Ear()
        rest = pieces
        while rest:
            size = data.draw(st.integers(1, 3))
            here, rest = rest[:size], rest[size:]
            assert await ear.after(delta(*here)) == [expected[id(each)] for each in here if id(each) in expected]
        await ear.close()

    main()
    event(f"calls: {len(made)}")


junk = st.one_of(
    json_values(),
    st.fixed_dictionaries(
        {},
        optional={
            "index": st.none() | st.integers(-1, 2) | json_values(),
            "id": st.none() | st.sampled_from(["1", "2"]) | json_values(),
            "function": st.fixed_dictionaries(
                {},
                optional={
                    "name": st.sampled_from(["search", "weigh"]) | json_values(),
                    "arguments": st.sampled_from(["{", "}", "{}", '{"x": 1}']) | json_values(),
                },
            )
            | json_values(),
        },
    ),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.fixed_dictionaries({"tool_calls": st.lists(junk, max_size=3) | json_values()}), max_size=6))
def test_whatever_a_server_sends_nothing_is_raised(deltas: list[Delta]) -> None:
    @virtual
    async def main() -> None:
        ear = Ear()
        for heard in await ear.after(*deltas):
            assert isinstance(heard.name, str)
            assert heard.name
            assert heard.arguments
        await ear.close()

    main()


@pytest.mark.parametrize(
    "arguments", [object(), {"query": object()}, {"query": {1, 2}}, b"{}"], ids=["object", "of objects", "set", "bytes"]
)
@virtual
async def test_arguments_that_are_no_json_are_a_broken_delta(arguments: Any) -> None:
    heard = await heard_after_each(
        delta(piece(arguments, name="search", index=0)), delta(piece('{"query": "x"}', name="search", index=1))
    )
    assert not any(heard)


# Who listens, and from where


async def test_deltas_may_come_from_another_thread() -> None:
    stream = AnswerStream(asyncio.get_running_loop())
    calls = stream.calls()

    def write() -> None:
        stream.feed(delta(piece('{"query": ', name="search", id="1", index=0)))
        stream.restart()
        for part in ('{"query"', ': "a', '"}'):
            stream.feed(delta(piece(part, name="search", id="1", index=0)))

    heard = asyncio.ensure_future(anext(calls))
    await asyncio.to_thread(write)
    assert await heard == search_of("a", "1")
    await calls.aclose()  # type: ignore[attr-defined]


@virtual
async def test_what_closed_before_anyone_listened_is_heard_then() -> None:
    stream = AnswerStream(asyncio.get_running_loop())
    for index, query in enumerate("ab"):
        stream.feed(delta(piece(json.dumps({"query": query}), name="search", index=index)))
    await no_tasks()
    calls = stream.calls()
    assert [await anext(calls), await anext(calls)] == [search_of("a"), search_of("b")]


def test_deltas_for_a_loop_that_has_closed_go_nowhere() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    stream = AnswerStream(loop)
    stream.feed(delta(piece('{"query": "x"}', name="search")))
    stream.restart()


@virtual
async def test_without_a_stream_or_without_tools_nothing_is_predicted() -> None:
    stream = AnswerStream(asyncio.get_running_loop())
    stream.feed(delta(piece('{"query": "x"}', name="search")))
    unheard = Prompt([])
    assert [each async for each in StreamSpeculator().predict(unheard, [SEARCH])] == []
    assert [each async for each in StreamSpeculator().predict(Prompt([], answer=stream), [])] == []


class Reads(Predicts):
    reads_answers = True


@virtual
async def test_an_answer_is_streamed_to_a_speculation_only_if_one_of_its_speculators_reads_it() -> None:
    loop = asyncio.get_running_loop()
    assert Speculation([Predicts()]).answer_stream(loop) is None
    assert Speculation([]).answer_stream(loop) is None
    for reader in (StreamSpeculator(), Reads()):
        assert isinstance(Speculation([Predicts(), reader]).answer_stream(loop), AnswerStream)


# In a turn

SEARCH: ToolSchema = {"type": "function", "function": {"name": "search"}}


def streaming(*others: Any, **config: Any) -> Speculation:
    return Speculation([StreamSpeculator(), *others], **config)


async def write_turn(
    speculation: Speculation,
    toolbox: FakeToolbox,
    written: Mapping[float, Delta],
    *calls: ToolCall,
    generation_s: float = 1.0,
) -> list[tuple[str, Any]]:
    """One turn of a main model that writes `written` at these seconds; outcomes and results of its calls in order."""
    loop, started_s = asyncio.get_running_loop(), now()
    answer = speculation.answer_stream(loop)
    turn = speculation.start_turn(Prompt([], answer=answer), [SEARCH], toolbox, RUN, loop=loop)
    for at_s, each in written.items():
        await sleep_until(started_s + at_s)
        if answer is not None:
            answer.feed(each)
    await sleep_until(started_s + generation_s)
    turn.answer(calls)

    async def serve(asked: ToolCall) -> tuple[str, Any]:
        claimed = await turn.claim(asked)
        return claimed.outcome, await real_call(toolbox, claimed, asked)

    return await asyncio.gather(*map(serve, calls))


def started_s(hook: Recorder) -> list[tuple[str, str, float | None]]:
    return [(event.tool, event.source, event.started_s) for event in hook.of(RunFinished)]


def whole(query: str, id: str | None = None, index: int = 0, name: str = "search") -> Delta:
    """A call in one piece."""
    return delta(piece(json.dumps({"query": query}), name=name, id=id, index=index))


@pytest.mark.parametrize(
    ("tool_s", "outcome", "ends_s"), [(0.0, "hit", 1.0), (0.25, "hit", 1.0), (0.625, "hit", 1.0), (2.0, "join", 2.375)]
)
@virtual
async def test_a_call_runs_as_soon_as_its_arguments_have_closed(tool_s: float, outcome: str, ends_s: float) -> None:
    """The main model writes on until second 1; the tool would have run from then on."""
    tool, hook = search(tool_s), Recorder()
    speculation = streaming(hooks=[hook])
    written = {
        0.125: delta(piece('{"query": ', name="search", id="1", index=0)),
        0.25: delta(piece('"x', index=0)),
        0.375: delta(piece('"}', index=0)),
        0.5: text("and so on"),
    }
    assert await write_turn(speculation, toolbox_of(tool), written, search_of("x", "1")) == [(outcome, "x#1")]
    assert now() == ends_s
    assert started_s(hook) == [("search", "stream", 0.375)]
    assert speculation.statistics().total.saved_s == pytest.approx(1.0 + tool_s - ends_s)


@virtual
async def test_each_call_runs_while_the_next_one_is_written() -> None:
    tool, hook = search(1.0), Recorder()
    speculation = streaming(hooks=[hook])
    written = {
        0.25: delta(piece('{"query": "a"', name="search", index=0), piece('{"query": "b"', name="search", index=1)),
        0.5: delta(piece("}", index=1)),
        1.25: delta(piece("}", index=0)),
    }
    calls = [search_of(query) for query in "ab"]
    outcomes = await write_turn(speculation, toolbox_of(tool), written, *calls, generation_s=2.0)
    assert outcomes == [("join", "a#2"), ("hit", "b#1")]
    assert [at_s for _, _, at_s in started_s(hook)] == [0.5, 1.25]
    assert now() == 2.25


@pytest.mark.parametrize(("wait_s", "outcome"), [(0.0, "miss"), (0.0625, "join")])
@virtual
async def test_the_last_call_of_an_answer_runs_once(wait_s: float, outcome: str) -> None:
    """Where it closes as the answer ends there is nothing to gain."""
    tool, speculation, loop = search(0.5), streaming(), asyncio.get_running_loop()
    answer = speculation.answer_stream(loop)
    assert answer is not None
    toolbox = toolbox_of(tool)
    turn = speculation.start_turn(Prompt([], answer=answer), [SEARCH], toolbox, RUN, loop=loop)
    await asyncio.sleep(1)
    answer.feed(whole("x"))
    if wait_s:
        await asyncio.sleep(wait_s)
    turn.answer([search_of("x")])
    claimed = await turn.claim(search_of("x"))
    assert (claimed.outcome, await real_call(toolbox, claimed, search_of("x"))) == (outcome, "x#1")
    assert now() == 1.5
    assert tool.statistics().num_started == 1


@virtual
async def test_only_marked_tools_are_run() -> None:
    toolbox, hook = FakeToolbox(), Recorder()
    policies = {
        "search": ToolPolicy(),
        "write": None,
        "store": ToolPolicy(writes=["docs"]),  # type: ignore[arg-type]
        "pay": ToolPolicy(needs_approval=True),
    }
    tools = {name: toolbox.add(search(0.25, name=name), policy) for name, policy in policies.items()}
    speculation = streaming(hooks=[hook])
    names = [*tools, "unknown"]
    written = {0.125 * (index + 1): whole("x", index=index, name=name) for index, name in enumerate(names)}
    written[0.875] = delta(piece('{"quarry": "x"}', name="search", index=5))
    await write_turn(speculation, toolbox, written)
    assert {name: tool.statistics().num_started for name, tool in tools.items()} == {
        "search": 1,
        "write": 0,
        "store": 0,
        "pay": 0,
    }
    assert skips(hook) == ["unmarked", "writes", "needs_approval", "unmarked", "invalid"]


@virtual
async def test_a_broken_stream_starts_nothing_more_and_the_turn_goes_on() -> None:
    tool = search(0.25)
    written = {0.25: whole("a"), 0.375: {"tool_calls": "?"}, 0.5: whole("b", index=1)}
    outcomes = await write_turn(streaming(), toolbox_of(tool), written, search_of("a"), search_of("b"))
    assert outcomes == [("hit", "a#1"), ("miss", "b#2")]
    assert tool.statistics().num_started == 2


@virtual
async def test_a_retry_serves_what_its_own_answer_asks_for() -> None:
    """What the first attempt had written by then is a guess, and a wrong one."""
    tool, hook = search(0.25), Recorder()
    speculation, loop = streaming(hooks=[hook]), asyncio.get_running_loop()
    answer = speculation.answer_stream(loop)
    assert answer is not None
    toolbox = toolbox_of(tool)
    turn = speculation.start_turn(Prompt([], answer=answer), [SEARCH], toolbox, RUN, loop=loop)
    answer.feed(whole("a", "call_0"))
    answer.feed(delta(piece('{"query": "', name="search", id="call_1", index=1)))
    await asyncio.sleep(0.5)
    answer.restart()
    answer.feed(delta(piece('{"query": "', name="search", id="call_0", index=0)))
    answer.feed(delta(piece('b"}', index=0)))
    await asyncio.sleep(0.5)
    turn.answer([search_of("b", "call_0")])
    assert (await turn.claim(search_of("b", "call_0"))).result == "b#2"
    assert [arguments["query"] for arguments in tool.calls] == ["a", "b"]
    assert [event.time_s for event in hook.of(CallPredicted)] == [0.0, 0.5]


@virtual
async def test_what_comes_after_the_answer_starts_nothing() -> None:
    tool = search(0.25)
    speculation, loop = streaming(), asyncio.get_running_loop()
    answer = speculation.answer_stream(loop)
    assert answer is not None
    turn = speculation.start_turn(Prompt([], answer=answer), [SEARCH], toolbox_of(tool), RUN, loop=loop)
    await asyncio.sleep(0.5)
    turn.answer([])
    answer.feed(whole("x"))
    await asyncio.sleep(1)
    assert tool.statistics().num_started == 0
    await no_tasks()


@virtual
async def test_in_shadow_mode_the_stream_predicts_and_runs_nothing() -> None:
    tool = search(0.25)
    speculation = streaming(mode="shadow")
    outcomes = await write_turn(speculation, toolbox_of(tool), {0.25: whole("x")}, search_of("x"))
    assert outcomes == [("miss", "x#1")]
    assert speculation.statistics().total.acceptance_rate == 1.0
    assert tool.statistics().num_started == 1


# Beside another speculator


@pytest.mark.parametrize(
    ("speculator_s", "earner", "saved_s"),
    [
        (0.25, "fake", 0.75),  # it names the call before the main model has written it
        (0.625, "stream", 0.5),
    ],
)
@virtual
async def test_what_two_speculators_name_is_run_once_and_earned_by_the_first(
    speculator_s: float, earner: str, saved_s: float
) -> None:
    tool, hook = search(1.0), Recorder()
    speculation = streaming(Predicts(call(), delay_s=speculator_s), hooks=[hook])
    outcomes = await write_turn(speculation, toolbox_of(tool), {0.5: whole("x", "1")}, search_of("x", "1"))
    assert outcomes == [("join", "x#1")]
    assert now() == 2.0 - saved_s
    assert tool.statistics().num_started == 1
    assert skips(hook) == ["duplicate"]
    earned = {
        name: SourceStatistics(
            num_turns=1,
            num_predictions=1,
            num_right=1,
            num_hits=int(name == earner),
            saved_s=saved_s if name == earner else 0.0,
        )
        for name in ("stream", "fake")
    }
    assert speculation.statistics().speculators == earned


@virtual
async def test_each_speculator_earns_what_its_own_runs_save() -> None:
    """The other one is right about the first call and wrong about the second, which the stream hears in time."""
    tool = search(0.5)
    speculation = streaming(Predicts(search_of("a"), search_of("wrong"), delay_s=0.125))
    written = {0.5: whole("a"), 0.75: whole("b", index=1)}
    outcomes = await write_turn(speculation, toolbox_of(tool), written, search_of("a"), search_of("b"))
    assert outcomes == [("hit", "a#1"), ("join", "b#3")]
    assert now() == 1.25
    assert speculation.statistics().speculators == {
        "stream": SourceStatistics(num_turns=1, num_predictions=2, num_right=2, num_hits=1, saved_s=0.25),
        "fake": SourceStatistics(num_turns=1, num_predictions=2, num_right=1, num_hits=1, saved_s=0.5),
    }
    assert speculation.statistics().num_wasted == 1


class Echo:
    """Reads the answer too, and says each of its calls a second later."""

    name = "echo"
    reads_answers = True

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        assert prompt.answer is not None
        async for heard in prompt.answer.calls():
            await asyncio.sleep(1)
            yield heard


@virtual
async def test_a_speculator_of_the_user_can_read_the_answer() -> None:
    tool, hook = search(0.25), Recorder()
    speculation = Speculation([Echo()], hooks=[hook])
    outcomes = await write_turn(speculation, toolbox_of(tool), {0.5: whole("x")}, search_of("x"), generation_s=2.0)
    assert outcomes == [("hit", "x#1")]
    assert started_s(hook) == [("search", "echo", 1.5)]

"""With speculation on, a run is the run that it would have been: generated interleavings, stock beside speculative."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from spectool_core import Speculation
from spectool_core.calls import ToolCall
from tests.guessing import Call, Guess, GuessingSpeculator, Reply
from tests.llamaindex.agents import HANDOFF, GiveUp, Seen, alone, function_agent, not_stock, run, team
from tests.llamaindex.clock import run_virtual
from tests.llamaindex.comparing import assert_equal
from tests.llamaindex.tools import make_tools
from tests.tool_log import ToolLog

BROKEN = frozenset({"c1", "c kg", "c EUR", "c", "input is c"})

# Sums of these never meet, so that no outcome hangs on the order of two timers of one moment.
GENERATION_S = [0.301, 1.003, 2.007]
TOOL_S = [0.0, 0.413, 1.129, 2.551]
GUESS_S = [0.0, 0.0531, 0.1979, 0.7717, 5.0]
END_S = [0.1501, 0.9001, 1.7001, 3.3001]

argument = st.sampled_from(["a", "b", "c"])
marked = st.one_of(
    st.builds(lambda q: ("lookup", {"q": q}), argument),
    st.builds(lambda q, n: ("lookup", {"n": n, "q": q}), argument, st.sampled_from([1, 2, "1", 1.0])),
    st.builds(lambda q: ("weigh", {"q": q}), argument),
    st.builds(lambda q, unit: ("weigh", {"unit": unit, "q": q}), argument, st.sampled_from(["kg", "lb"])),
    st.builds(lambda q: ("quote", {"q": q}), argument),
    st.builds(lambda q, to: ("quote", {"q": q, "currency": to}), argument, st.sampled_from(["EUR", "USD"])),
    st.builds(lambda q: ("tag", {"q": q}), argument),
    st.builds(lambda q: ("search", {"input": q}), argument),
    st.builds(lambda q: ("recall", {"input": q}), argument),
)
anything = st.one_of(
    *[marked] * 5,
    st.just(("note", {"text": "n"})),
    st.just(("remember", {"text": "r"})),
    st.just(("unknown", {})),
    st.just(("lookup", {"n": "many"})),
    st.just(("lookup", {"q": "a", "other": 1})),
)
# What a model's broken JSON is read as, by the client: `{"q": "a"}` and `{}`.
broken_json = st.sampled_from([("lookup", '{"q": "a", "n'), ("lookup", "q = a")])
asked = st.one_of(*[anything] * 9, broken_json)
guesses = st.builds(
    Guess,
    calls=st.lists(anything.map(lambda call: ToolCall(*call)), max_size=3).map(tuple),
    after_s=st.sampled_from([*GUESS_S, None]),
    error=st.sampled_from([None, None, None, RuntimeError("speculator down")]),
)


@dataclass(frozen=True)
class Scenario:
    """One run: what the models say and when, how long tools take, who fails, how the run is to end."""

    replies: tuple[Reply, ...]
    guesses: tuple[tuple[Guess, ...], ...]
    latencies: dict[str, float]
    broken: frozenset[str]
    shape: str
    streaming: bool
    timeout_s: float | None
    give_up: GiveUp | None
    options: dict[str, Any]

    @property
    def is_sequential(self) -> bool:
        """Whether no two calls run at once, so that stock's order is determined."""
        return all(len(reply.calls) <= 1 for reply in self.replies)

    def latency_s(self, name: str, argument: str) -> float:
        return self.latencies.get(name, 0.0)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    ids = iter(f"call-{n}" for n in range(100))
    repeat_ids = draw(st.booleans())
    shape = draw(st.sampled_from(["agent", "workflow", "team"]))
    replies = [
        Reply(
            calls=tuple(
                Call(name, args, f"call_{index}" if repeat_ids else next(ids))
                for index, (name, args) in enumerate(draw(st.lists(asked, min_size=1, max_size=3)))
            ),
            text=draw(st.sampled_from(["", "let me see"])),
            generation_s=draw(st.sampled_from(GENERATION_S)),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    if shape == "team":
        # Stock writes a new state into the last message, which after a handoff beside another call is either's.
        has_state = any(call.name == "remember" for reply in replies for call in reply.calls)
        also = draw(st.lists(marked, max_size=0 if has_state else 1))
        calls = tuple(Call(name, args, next(ids)) for name, args in also)
        handing_off = Reply((*calls, HANDOFF), generation_s=draw(st.sampled_from(GENERATION_S)))
        replies.insert(draw(st.integers(0, len(replies))), handing_off)
    failure = draw(st.sampled_from([None] * 9 + [ConnectionError("the model is down")]))
    replies.append(Reply(text="done", generation_s=draw(st.sampled_from(GENERATION_S)), error=failure))
    right = [
        Guess(
            tuple(ToolCall(call.name, call.args) for call in reply.calls if isinstance(call.args, dict)),
            draw(st.sampled_from(GUESS_S)),
        )
        for reply in replies
    ]
    every_guess = st.tuples(*(st.one_of(st.just(guess), st.just(guess), guesses) for guess in right))
    names = ("lookup", "weigh", "quote", "tag", "search", "recall", "note", "remember")
    endings = st.one_of(
        *[st.just((None, None, {}))] * 4,
        st.builds(
            lambda after_s, how: (None, GiveUp(after_s, how), {}),
            st.sampled_from(END_S),
            st.sampled_from(["cancel_run", "stop_awaiting", "abort"]),
        ),
        st.builds(lambda timeout_s: (timeout_s, None, {}), st.sampled_from(END_S)),
        st.builds(
            lambda limit, method: (None, None, {"max_iterations": limit, "early_stopping_method": method}),
            st.integers(1, 3),
            st.sampled_from(["force", "generate"]),
        ),
    )
    timeout_s, give_up, options = draw(endings)
    return Scenario(
        replies=tuple(replies),
        guesses=tuple(draw(st.lists(every_guess, max_size=2))),
        latencies={name: draw(st.sampled_from(TOOL_S)) for name in names},
        broken=draw(st.sampled_from([frozenset(), frozenset(), BROKEN])),
        shape=shape,
        streaming=draw(st.booleans()),
        timeout_s=timeout_s,
        give_up=give_up,
        options=options,
    )


def build(scenario: Scenario, log: ToolLog, speculation: Speculation | None) -> Any:
    tools, streaming, timeout = make_tools(log), scenario.streaming, scenario.timeout_s
    match scenario.shape:
        case "agent":
            return function_agent(scenario.replies, tools, speculation, streaming=streaming, timeout=timeout)
        case "workflow":
            return alone(function_agent(scenario.replies, tools, speculation, streaming=streaming), timeout=timeout)
    return team(scenario.replies, tools, speculation, streaming=streaming, timeout=timeout)


def play(scenario: Scenario, speculation: Speculation | None) -> tuple[Seen, ToolLog]:
    log = ToolLog(scenario.latency_s, scenario.broken)

    async def main() -> Seen:
        return await run(build(scenario, log, speculation), give_up=scenario.give_up, **scenario.options)

    return run_virtual(main), log


@given(scenarios())
@settings(
    max_examples=80,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_a_run_is_the_run_it_would_have_been(scenario: Scenario) -> None:
    speculators = [GuessingSpeculator(each, f"s{index}") for index, each in enumerate(scenario.guesses)]
    speculation = Speculation(
        speculators, adaptive=False, max_runs_per_tool=8, max_concurrency_per_tool=8, max_runs_per_turn=16
    )
    stock, stock_log = play(scenario, None)
    ours, our_log = play(scenario, speculation)
    statistics = speculation.statistics()

    # A joined run that fails is the one thing that takes longer than stock, and may take too long.
    timed_out = "Timeout" in str(stock.error) or (scenario.broken and "Timeout" in str(ours.error))
    if scenario.give_up is None and not timed_out:
        assert_equal(ours, stock, in_order=scenario.is_sequential)
        if not scenario.broken:
            assert ours.duration_s <= stock.duration_s
        assert_same_tool_runs(scenario, our_log, stock_log)
    elif scenario.is_sequential and not scenario.broken:
        # Ours is at least as far when it is ended; up to there it is the same.
        so_far = without_end(stock.events)
        assert ours.events[: len(so_far)] == so_far
    assert not_stock(ours.tasks_left, scenario.give_up) == []
    assert ours.threads_left == []
    ended = our_log.counts("returned") + our_log.counts("raised") + our_log.counts("cancelled")
    assert our_log.counts("started") == ended
    assert statistics.num_settled_turns == statistics.num_turns
    total = statistics.total
    num_runs = total.num_real_runs + statistics.num_launched + runs_of("note", our_log) + runs_of("remember", our_log)
    assert sum(our_log.counts("started").values()) <= num_runs
    event(f"hits or joins: {min(3, total.num_hits + total.num_joins)}")
    event(f"wasted: {min(3, statistics.num_wasted)}")


def without_end(events: list[Any]) -> list[Any]:
    return events[:-1] if events and events[-1]["type"].startswith("Workflow") else events


def assert_same_tool_runs(scenario: Scenario, ours: ToolLog, stock: ToolLog) -> None:
    """Unmarked tools run as often as stock runs them; a success of a marked one is asked for, or was predicted."""
    for name in ("note", "remember"):
        assert runs_of(name, ours) == runs_of(name, stock)
    allowed: Counter[Any] = Counter()
    for turn, reply in enumerate(scenario.replies):
        asked_for = {key_of(call.name, call.args) for call in reply.calls}
        guessed = {key_of(c.name, dict(c.arguments)) for each in scenario.guesses for c in each[turn].calls}
        allowed.update(asked_for | guessed)
        writes = any(key_of(call.name, call.args) is None for call in reply.calls if call is not HANDOFF)
        if writes or scenario.broken:
            # Beside a write, and where a tool that failed rests, as often as it is asked for.
            allowed.update(key_of(call.name, call.args) for call in reply.calls)
    for key, count in ours.counts("returned").items():
        if key[0] not in ("note", "remember"):
            assert count <= allowed[key], key


def runs_of(name: str, log: ToolLog) -> int:
    return sum(count for (tool, _), count in log.counts("started").items() if tool == name)


def key_of(name: str, args: Any) -> tuple[str, str] | None:
    """What the tool's log says of the call; None for a call that does not get there or is not of a marked tool."""
    match name, args:
        case "lookup", {"q": q, **rest} if rest.keys() <= {"n"}:
            return name, f"{q}{rest.get('n', 1)!r}"
        case "lookup", str() if args.startswith("{"):
            return name, "a1"
        case "weigh", {"q": q, **rest}:
            return name, f"{q} {rest.get('unit', 'kg')}"
        case "quote", {"q": q, **rest}:
            return name, f"{q} {rest.get('currency', 'EUR')}"
        case "tag", {"q": q}:
            return name, str(q)
        case "search", {"input": q}:
            return name, str(q)
        case "recall", {"input": q}:
            return name, f"input is {q}"
    return None


def expected_outcome(generation_s: float, guess_s: float | None, tool_s: float) -> str:
    if guess_s is None or guess_s >= generation_s:
        return "miss"
    return "hit" if guess_s + tool_s <= generation_s else "join"


# A right and a wrong guess of each kind of tool; of the right one a different spelling where there is one.
CALLS = {
    "lookup": ({"q": "a"}, {"n": 1, "q": "a"}, {"q": "a", "n": "1"}),
    "weigh": ({"q": "a"}, {"unit": "kg", "q": "a"}, {"q": "a", "unit": "lb"}),
    "quote": ({"q": "a"}, {"currency": "EUR", "q": "a"}, {"q": "a", "currency": "USD"}),
    "tag": ({"q": "a"}, {"q": "a"}, {"q": "A"}),
    "search": ({"input": "a"}, {"input": "a"}, {"input": "b"}),
    "recall": ({"input": "a"}, {"input": "a"}, {"input": "b"}),
}


@given(
    name=st.sampled_from(list(CALLS)),
    shape=st.sampled_from(["agent", "workflow"]),
    streaming=st.booleans(),
    generation_s=st.sampled_from(GENERATION_S),
    guess_s=st.sampled_from([*GUESS_S, None]),
    tool_s=st.sampled_from(TOOL_S),
    right=st.lists(st.booleans(), min_size=1, max_size=3),
)
@settings(max_examples=40)
def test_outcomes_and_time_are_as_predicted(
    name: str,
    shape: str,
    streaming: bool,
    generation_s: float,
    guess_s: float | None,
    tool_s: float,
    right: list[bool],
) -> None:
    asked_for, same, other = CALLS[name]
    replies = [Reply((Call(name, asked_for, f"id-{turn}"),), generation_s=generation_s) for turn in range(len(right))]
    replies.append(Reply(text="done", generation_s=generation_s))
    guess = [Guess((ToolCall(name, same if is_right else other),), guess_s) for is_right in right]
    speculation = Speculation([GuessingSpeculator(guess)], adaptive=False)
    log = ToolLog(lambda *_: tool_s)

    async def main() -> Seen:
        agent = function_agent(replies, make_tools(log), speculation, streaming=streaming)
        return await run(agent if shape == "agent" else alone(agent))

    seen = run_virtual(main)
    in_time = expected_outcome(generation_s, guess_s, tool_s)
    expected = [in_time if is_right else "miss" for is_right in right]
    statistics = speculation.statistics()
    total = statistics.total
    outcomes = Counter(expected)
    assert (total.num_hits, total.num_joins, total.num_misses) == (outcomes["hit"], outcomes["join"], outcomes["miss"])
    num_launched = 0 if in_time == "miss" else len(right)
    assert (statistics.num_launched, statistics.num_wasted) == (num_launched, num_launched and right.count(False))
    assert sum(log.counts("started").values()) == num_launched + outcomes["miss"]
    expected_s = (len(right) + 1) * generation_s
    for outcome in expected:
        if outcome == "miss":
            expected_s += tool_s
        elif guess_s is not None:
            expected_s += max(0.0, guess_s + tool_s - generation_s)
    assert seen.duration_s == pytest.approx(expected_s, abs=1e-6)
    assert seen.tasks_left == []


@pytest.mark.parametrize("predicted", [True, False])
def test_identical_calls_of_a_marked_tool_run_once_and_answer_every_id(predicted: bool) -> None:
    calls = tuple(Call("lookup", {"q": "a"}, f"id-{n}") for n in range(3))
    unmarked = tuple(Call("note", {"text": "n"}, f"id-{n}") for n in range(2))
    replies = [Reply(calls), Reply(unmarked), Reply(text="done")]
    guess = [Guess((ToolCall("lookup", {"q": "a"}),) if predicted else ()), Guess((ToolCall("note", {"text": "n"}),))]
    speculation = Speculation([GuessingSpeculator(guess)])
    log = ToolLog(lambda *_: 0.4)

    async def main() -> Seen:
        return await run(function_agent(replies, make_tools(log), speculation))

    seen = run_virtual(main)
    assert log.counts("started") == {("lookup", "a1"): 1, ("note", "n"): 2}
    assert sorted(each["tool_id"] for each in seen.of("ToolCallResult")) == ["id-0", "id-0", "id-1", "id-1", "id-2"]
    assert seen.tools_said == ["lookup of a1"] * 3 + ["note of n"] * 2
    total = speculation.statistics().total
    assert total.num_hits + total.num_joins == 3


def test_the_event_loop_is_the_only_clock() -> None:
    """The virtual clock sees no wall time: a run of hours takes none."""
    replies = [Reply((Call("lookup", {"q": "a"}, "1"),), generation_s=3600.0), Reply(text="done")]
    log = ToolLog(lambda *_: 3600.0)
    speculation = Speculation([GuessingSpeculator([Guess((ToolCall("lookup", {"q": "a"}),), 600.0)])])
    seen = run_virtual(lambda: run(function_agent(replies, make_tools(log), speculation)))
    assert seen.duration_s == pytest.approx(4201.0)

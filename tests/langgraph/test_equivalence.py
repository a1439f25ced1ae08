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
from spectool_core.testing import run_virtual
from tests.guessing import Call, Guess, GuessingSpeculator, Reply
from tests.langgraph.agents import Seen, build, in_order, make_tools, per_run, run
from tests.tool_log import ToolLog

ARGUMENTS = ["a", "b", "c"]
BROKEN = frozenset({"c1", "c"})

# Sums of these never meet, so that no outcome hangs on the order of two timers of one moment.
GENERATION_S = [0.301, 1.003, 2.007]
TOOL_S = [0.0, 0.413, 1.129, 2.551]
GUESS_S = [0.0, 0.0531, 0.1979, 0.7717, 5.0]

marked = st.one_of(
    st.builds(lambda q: ("lookup", {"q": q}), st.sampled_from(ARGUMENTS)),
    st.builds(lambda q, n: ("lookup", {"n": n, "q": q}), st.sampled_from(ARGUMENTS), st.sampled_from([1, 2])),
    st.builds(lambda q: ("weigh", {"q": q}), st.sampled_from(ARGUMENTS)),
    st.builds(lambda q: ("announce", {"q": q}), st.sampled_from(ARGUMENTS)),
)
anything = st.one_of(
    marked,
    marked,
    marked,
    st.just(("note", {"text": "n"})),
    st.just(("unknown", {})),
    st.just(("lookup", {"n": "many"})),
)
guesses = st.builds(
    Guess,
    calls=st.lists(anything.map(lambda call: ToolCall(*call)), max_size=3).map(tuple),
    after_s=st.sampled_from([*GUESS_S, None]),
    error=st.sampled_from([None, None, None, RuntimeError("speculator down")]),
)


@dataclass(frozen=True)
class Scenario:
    """One agent run: what the models say and when, how long tools take, who fails, whether the user gives up."""

    replies: tuple[Reply, ...]
    guesses: tuple[tuple[Guess, ...], ...]
    latencies: dict[str, float]
    broken: frozenset[str]
    handle_tool_errors: Any
    cancel_after_s: float | None

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
    replies = [
        Reply(
            calls=tuple(
                Call(name, args, f"call_{index}" if repeat_ids else next(ids))
                for index, (name, args) in enumerate(draw(st.lists(anything, min_size=1, max_size=3)))
            ),
            text=draw(st.sampled_from(["", "let me see"])),
            generation_s=draw(st.sampled_from(GENERATION_S)),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    replies.append(Reply(text="done", generation_s=draw(st.sampled_from(GENERATION_S))))
    right = [
        Guess(tuple(ToolCall(call.name, call.args) for call in reply.calls), draw(st.sampled_from(GUESS_S)))
        for reply in replies
    ]
    every_guess = st.tuples(*(st.one_of(st.just(guess), st.just(guess), guesses) for guess in right))
    return Scenario(
        replies=tuple(replies),
        guesses=tuple(draw(st.lists(every_guess, max_size=2))),
        latencies={name: draw(st.sampled_from(TOOL_S)) for name in ("lookup", "weigh", "announce", "note")},
        broken=draw(st.sampled_from([frozenset(), frozenset(), BROKEN])),
        handle_tool_errors=draw(st.sampled_from([True, False, ConnectionError, (ValueError,)])),
        cancel_after_s=draw(st.sampled_from([None, None, 0.1501, 0.9001, 1.7001, 3.3001])),
    )


async def play(scenario: Scenario, speculation: Speculation | None) -> tuple[Seen, ToolLog]:
    log = ToolLog(scenario.latency_s, scenario.broken)
    tools = make_tools(log)
    graph = build(scenario.replies, tools, speculation, handle_tool_errors=scenario.handle_tool_errors).compile()
    return await run(graph, cancel_after_s=scenario.cancel_after_s), log


@given(scenarios())
@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_a_run_is_the_run_it_would_have_been(scenario: Scenario) -> None:
    speculators = [GuessingSpeculator(each, f"s{index}") for index, each in enumerate(scenario.guesses)]
    speculation = Speculation(speculators, max_runs_per_tool=8, max_concurrency_per_tool=8, max_runs_per_turn=16)
    stock, stock_log = run_virtual(lambda: play(scenario, None))
    ours, our_log = run_virtual(lambda: play(scenario, speculation))
    statistics = speculation.statistics()

    if not scenario.broken and scenario.cancel_after_s is None and scenario.handle_tool_errors is True:
        assert stock.error is None
    if scenario.cancel_after_s is None:
        assert ours.messages == stock.messages
        assert ours.error == stock.error
        if stock.error is None:  # an error leaves calls that ran beside it wherever they stand
            assert Counter(map(repr, ours.stream)) == Counter(map(repr, stock.stream))
            assert per_run(ours.callbacks) == per_run(stock.callbacks)
        if scenario.is_sequential:
            assert ours.stream == stock.stream
            assert in_order(ours.callbacks) == in_order(stock.callbacks)
        if not scenario.broken:
            assert ours.duration_s <= stock.duration_s
    # Stock leaves the siblings of a failed call behind; nothing else may be left.
    if stock.num_tasks_left == 0:
        assert ours.num_tasks_left == 0
    assert our_log.counts("started") == our_log.counts("returned") + our_log.counts("raised") + our_log.counts(
        "cancelled"
    )
    # Unmarked tools run exactly as often as stock runs them, and no successful run of a marked one is repeated.
    if scenario.cancel_after_s is None and stock.error is None:
        assert runs_of("note", our_log) == runs_of("note", stock_log)
        assert_successes_explained(scenario, our_log)
    total = statistics.total
    assert statistics.num_settled_turns == statistics.num_turns
    event(f"hits or joins: {min(3, total.num_hits + total.num_joins)}")
    event(f"wasted: {min(3, statistics.num_wasted)}")


def runs_of(name: str, log: ToolLog) -> int:
    return sum(count for (tool, _), count in log.counts("started").items() if tool == name)


def key_of(name: str, args: dict[str, Any]) -> tuple[str, str] | None:
    if name == "lookup" and "q" in args:
        return name, f"{args['q']}{args.get('n', 1)}"
    return (name, str(args["q"])) if name in ("weigh", "announce") else None


def assert_successes_explained(scenario: Scenario, log: ToolLog) -> None:
    """Each success is one distinct call of the answer, or a prediction of its turn that the answer did not ask for."""
    allowed: Counter[Any] = Counter()
    for turn, reply in enumerate(scenario.replies):
        asked = {key_of(call.name, call.args) for call in reply.calls}
        guessed = {key_of(c.name, dict(c.arguments)) for each in scenario.guesses for c in each[turn].calls}
        allowed.update(asked | guessed)
        if any(key_of(call.name, call.args) is None for call in reply.calls) or len(asked) < len(reply.calls):
            # Beside a write a read is run again, once for each time it is asked for.
            allowed.update(key_of(call.name, call.args) for call in reply.calls)
    for key, count in log.counts("returned").items():
        if key[0] != "note":
            assert count <= allowed[key], key


def expected_outcome(reply: Reply, guess: Guess, tool_s: float) -> str:
    if guess.after_s is None or guess.after_s >= reply.generation_s:
        return "miss"
    return "hit" if guess.after_s + tool_s <= reply.generation_s else "join"


@given(
    generation_s=st.sampled_from(GENERATION_S),
    guess_s=st.sampled_from([*GUESS_S, None]),
    tool_s=st.sampled_from(TOOL_S),
    num_turns=st.integers(1, 3),
    right=st.lists(st.booleans(), min_size=3, max_size=3),
)
@settings(max_examples=60)
def test_outcomes_and_time_are_as_predicted(
    generation_s: float, guess_s: float | None, tool_s: float, num_turns: int, right: list[bool]
) -> None:
    replies = [
        Reply(calls=(Call("lookup", {"q": f"q{turn}"}, f"id-{turn}"),), generation_s=generation_s)
        for turn in range(num_turns)
    ]
    replies.append(Reply(text="done", generation_s=generation_s))
    guess = [
        Guess((ToolCall("lookup", {"n": 1, "q": f"q{turn}" if right[turn] else "wrong"}),), guess_s)
        for turn in range(num_turns)
    ]
    speculation = Speculation([GuessingSpeculator(guess)])
    log = ToolLog(lambda _name, _argument: tool_s)

    async def main() -> Seen:
        return await run(build(replies, make_tools(log), speculation).compile())

    seen = run_virtual(main)
    outcomes = Counter(
        expected_outcome(replies[turn], guess[turn], tool_s) if right[turn] else "miss" for turn in range(num_turns)
    )
    total = speculation.statistics().total
    assert (total.num_hits, total.num_joins, total.num_misses) == (outcomes["hit"], outcomes["join"], outcomes["miss"])
    expected_s = (num_turns + 1) * generation_s
    for turn in range(num_turns):
        late = expected_outcome(replies[turn], guess[turn], tool_s) if right[turn] else "miss"
        if late == "miss":
            expected_s += tool_s
        elif guess_s is not None:
            expected_s += max(0.0, guess_s + tool_s - generation_s)
    assert abs(seen.duration_s - expected_s) < 1e-6
    assert seen.num_tasks_left == 0


def test_the_event_loop_is_the_only_clock() -> None:
    """The virtual clock sees no wall time: a run of hours takes none."""
    replies = [Reply(generation_s=3600.0, calls=(Call("lookup", {"q": "a"}, "1"),)), Reply(text="done")]
    log = ToolLog(lambda _name, _argument: 3600.0)
    speculation = Speculation([GuessingSpeculator([Guess((ToolCall("lookup", {"q": "a"}),), 600.0)])])

    async def main() -> Seen:
        return await run(build(replies, make_tools(log), speculation).compile())

    assert run_virtual(main).duration_s == pytest.approx(4201.0)

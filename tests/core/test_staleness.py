"""What is served is what the tool could have returned then: generated programs of reads and writes over shared things.

Several agent runs at once, of several threads or tenants, on one `Speculation`. Every value that is ever written is
unlike any other, and each resource remembers all of its values in the order in which the event loop wrote them: a
result that is served must be one that the resource had between the moment it was asked for and the moment it came. For
a hit these are one moment.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from spectool_core.annotation import ToolPolicy
from spectool_core.calls import Prompt, ToolCall, ToolSchema
from spectool_core.runs import RunContext
from spectool_core.speculation import Speculation
from spectool_core.turn import Turn
from tests.core.fakes import FakeToolbox, virtual

MAIL, DOCS = "mail", "docs"
CLASSES = (MAIL, DOCS)
MINE, OURS = "mail own 1", "mail all 1"

# Sums of these never meet, so that no outcome hangs on the order of two timers of one moment.
GENERATION_S = [0.3011, 1.0037, 2.0071]
READ_S = [0.0, 0.1301, 0.7079]
WRITE_S = [0.0, 0.2203, 1.3093, 3.4057]
GUESS_S = [0.0, 0.0531, 0.4177, 0.9113, 5.0]
START_S = [0.0, 0.1709, 0.8419, 2.3057]

# Each reads or writes what its query names: a class, whose it is, and which one. `fetch` and `put` declare nothing.
READS = {"read_mail": [MAIL], "read_docs": [DOCS], "read_both": [MAIL, DOCS], "fetch": None}
WRITES = {"write_mail": [MAIL], "write_docs": [DOCS], "write_both": [MAIL, DOCS], "put": None}


class Store:
    """All values that each resource has had, the present one last."""

    def __init__(self) -> None:
        self._versions = itertools.count(1)
        self._values: dict[str, list[str]] = {}

    def values(self, resource: str) -> list[str]:
        return self._values.setdefault(resource, [f"{resource}, as it was"])

    def write(self, resource: str) -> None:
        self.values(resource).append(f"{resource}, version {next(self._versions)}")


@dataclass(frozen=True)
class Step:
    """One turn of the main model, and what the speculator says in it: calls, each after so many seconds."""

    calls: tuple[ToolCall, ...]
    generation_s: float = 1.0
    guesses: tuple[tuple[float, ToolCall], ...] = ()


@dataclass(frozen=True)
class AgentRun:
    """One run of an agent."""

    steps: tuple[Step, ...]
    thread: str = "thread"
    tenant: str = "tenant"
    start_s: float = 0.0


@dataclass(frozen=True)
class Program:
    """Agent runs on one `Speculation`, and how their tools work.

    Args:
        runs: what the agents do, all at once.
        reuse: how long a result of each reading tool may be used.
        latencies: seconds that a tool takes until it reads or writes, and from then on.
        by_tenant: whether the user's `scope` is the tenant; otherwise a scope is a run, as by default.
        limits: settings of the `Speculation`.
    """

    runs: tuple[AgentRun, ...]
    reuse: Mapping[str, Any] = field(default_factory=dict)
    latencies: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    by_tenant: bool = False
    limits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """A call of the main model that is served, and the values that the resource had meanwhile."""

    call: ToolCall
    answer: tuple[ToolCall, ...]
    outcome: str
    result: Any
    possible: tuple[str, ...]

    @property
    def is_fresh(self) -> bool:
        return self.outcome == "miss" or self.result in self.possible

    @property
    def was_written(self) -> bool:
        return "version" in self.possible[0]


class Foresees:
    """Says what the step says that its prompt is of."""

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        waited_s = 0.0
        for after_s, predicted in sorted(prompt.native.guesses, key=lambda guess: guess[0]):
            await asyncio.sleep(after_s - waited_s)
            waited_s = after_s
            yield predicted


class Playing:
    """A program as it runs."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.store = Store()
        self.served: list[Served] = []
        self.num_reads = 0
        scope = (lambda _, context: context.configurable["tenant"]) if program.by_tenant else None
        self.speculation = Speculation([Foresees()], scope=scope, adaptive=False, **program.limits)
        # One tool object for all runs, as in an application: whose results they are is for the scope to tell apart.
        self._tools: dict[str, Any] = {name: lambda: None for name in (*READS, *WRITES)}

    @property
    def stale(self) -> list[Served]:
        return [each for each in self.served if not each.is_fresh]

    async def play(self) -> None:
        await asyncio.gather(*map(self._live, range(len(self.program.runs))))
        await asyncio.sleep(60)  # what other runs of the tenant could have used runs to its end

    async def _live(self, number: int) -> None:
        run = self.program.runs[number]
        context = RunContext(number, run.thread, {"tenant": run.tenant})
        owner = run.tenant if self.program.by_tenant else f"run {number}"
        toolbox = self.toolbox(owner)
        await asyncio.sleep(run.start_s)
        for step in run.steps:
            prompt = Prompt([], native=step)
            turn = self.speculation.start_turn(prompt, [], toolbox, context, loop=asyncio.get_running_loop())
            await asyncio.sleep(step.generation_s)
            turn.answer(step.calls)
            serve = functools.partial(self.serve, turn, toolbox, owner, step.calls)
            await asyncio.gather(*map(serve, step.calls))
        self.speculation.end_run(context)

    def toolbox(self, owner: str) -> FakeToolbox:
        toolbox = FakeToolbox()
        for name, reads in READS.items():
            policy = ToolPolicy(reuse=self.program.reuse.get(name, "turn"), reads=reads)  # type: ignore[arg-type]
            read = functools.partial(self._read, name, owner)
            toolbox.add_function(name, read, policy, tool=self._tools[name])
        for name, writes in WRITES.items():
            policy_ = None if writes is None else ToolPolicy(writes=writes)  # type: ignore[arg-type]
            toolbox.add_function(name, functools.partial(self._write, name, owner), policy_, tool=self._tools[name])
        return toolbox

    async def _read(self, name: str, owner: str, query: str) -> str:
        before_s, after_s = self.program.latencies.get(name, (0.0, 0.0))
        self.num_reads += 1
        await asyncio.sleep(before_s)
        value = self.store.values(resource(query, owner))[-1]
        await asyncio.sleep(after_s)
        return value

    async def _write(self, name: str, owner: str, query: str) -> str:
        before_s, after_s = self.program.latencies.get(name, (0.0, 0.0))
        await asyncio.sleep(before_s)
        self.store.write(resource(query, owner))
        await asyncio.sleep(after_s)
        return "written"

    async def serve(
        self, turn: Turn, toolbox: FakeToolbox, owner: str, answer: tuple[ToolCall, ...], asked: ToolCall
    ) -> None:
        """Serve a call as an adapter does: with an early run's result, or by the tool, with fences if it writes."""
        policy = toolbox.policy(asked.name)
        if policy is not None:
            values = self.store.values(resource(asked.arguments["query"], owner))
            num_before = len(values) - 1
            claimed = await turn.claim(asked)
            possible = tuple(values[num_before:])
            self.served.append(Served(asked, answer, claimed.outcome, claimed.result, possible))
            if claimed.outcome != "miss":
                return
        run = functools.partial(toolbox._bound[asked.name][0], **asked.arguments)
        if policy is not None and not policy.writes:
            await run()
            return
        with self._fenced(turn.context, None if policy is None else policy.writes):
            await run()

    @contextmanager
    def _fenced(self, context: RunContext, writes: frozenset[str] | None) -> Iterator[None]:
        write = self.speculation.begin_write(context, writes)
        try:
            yield
        finally:
            write.end()


def resource(query: str, owner: str) -> str:
    """What `query` names: "mail own 1" is another thing for each owner, "mail all 1" is one for all."""
    return query.replace("own", f"of {owner}:")


def asking(name: str, query: str) -> ToolCall:
    return ToolCall(name, {"query": query})


def class_of(query: str) -> str:
    return query.split()[0]


def meets(write: ToolCall, read: ToolCall) -> bool:
    """Whether, by what the two tools declare, the write may change what the read reads."""
    writes, reads = WRITES[write.name], READS[read.name]
    return writes is None or reads is None or not set(writes).isdisjoint(reads)


# Programs

QUERIES = [f"{class_} {whose} 1" for class_ in CLASSES for whose in ("all", "own")]


def named(tools: Mapping[str, list[str] | None], query: str) -> st.SearchStrategy[ToolCall]:
    """A call about `query` by any of the tools that may be about it."""
    names = [name for name, tags in tools.items() if tags is None or class_of(query) in tags]
    return st.sampled_from([asking(name, query) for name in names])


def reads_of(query: str) -> st.SearchStrategy[ToolCall]:
    return named(READS, query)


def writes_of(query: str, *, by_tenant: bool) -> st.SearchStrategy[ToolCall]:
    """An undeclared write changes only what is its own scope's; where the user chose scopes, whatever it likes."""
    declared = {name: tags for name, tags in WRITES.items() if tags is not None}
    return named(WRITES if by_tenant or "own" in query else declared, query)


@st.composite
def guesses(draw: st.DrawFn, coming: Sequence[tuple[ToolCall, ...]]) -> tuple[tuple[float, ToolCall], ...]:
    """What a speculator says of the first of the `coming` answers, or of a later one, or of none."""
    said: list[ToolCall] = []
    for distance, calls in enumerate(coming[:3]):
        likely = st.sampled_from([True, True, True, False] if distance == 0 else [False, True])
        said += [call for call in calls if call.name in READS and draw(likely)]
    said += draw(st.lists(st.sampled_from(QUERIES).flatmap(reads_of), max_size=1))
    return tuple((draw(st.sampled_from(GUESS_S)), call) for call in said)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    by_tenant = draw(st.booleans())
    queries = st.sampled_from(draw(st.lists(st.sampled_from(QUERIES), min_size=1, max_size=2, unique=True)))
    writes = queries.flatmap(functools.partial(writes_of, by_tenant=by_tenant))
    answers = st.lists(st.one_of(queries.flatmap(reads_of), writes), min_size=1, max_size=2).map(tuple)
    runs = []
    for _ in range(draw(st.sampled_from([1, 2, 3, 3]))):
        asked = draw(st.lists(answers, min_size=1, max_size=4))
        steps = [
            Step(calls, draw(st.sampled_from(GENERATION_S)), draw(guesses(asked[turn:])))
            for turn, calls in enumerate(asked)
        ]
        tenant, thread = draw(st.sampled_from("ab")), draw(st.sampled_from("xy"))
        runs.append(AgentRun(tuple(steps), thread, tenant, draw(st.sampled_from(START_S))))
    return Program(
        runs=tuple(runs),
        reuse={name: draw(st.sampled_from(["turn", "ttl"])) for name in READS},
        latencies={
            name: (draw(st.sampled_from(seconds)), draw(st.sampled_from(seconds)))
            for names, seconds in ((READS, READ_S), (WRITES, WRITE_S))
            for name in names
        },
        by_tenant=by_tenant,
        limits={"max_concurrency": draw(st.sampled_from([32, 32, 2, 1]))},
    )


def played(program: Program) -> Playing:
    playing = Playing(program)
    virtual(playing.play)()
    return playing


def outcomes_of(program: Program) -> list[tuple[str, str]]:
    """The tool and the outcome of each call that could have been served, all of them fresh."""
    playing = played(program)
    assert playing.stale == []
    return [(each.call.name, each.outcome) for each in playing.served if each.call.name in READS]


# A write of another thread takes effect at 2.0 and returns at 4.0; the read began at 1.3, and is asked for at 2.2.
READ_WHILE_A_WRITE_IS_UNDER_WAY = Program(
    runs=(
        AgentRun((Step((asking("write_docs", "docs all 1"),)),), "writing"),
        AgentRun(
            (Step((asking("read_docs", "docs all 1"),), guesses=((0.1, asking("read_docs", "docs all 1")),)),),
            "reading",
            start_s=1.2,
        ),
    ),
    latencies={"write_docs": (1.0, 2.0)},
)


@given(programs())
@example(READ_WHILE_A_WRITE_IS_UNDER_WAY)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_served_is_what_the_tool_could_have_returned(program: Program) -> None:
    playing = played(program)
    assert playing.stale == []
    served = [each for each in playing.served if each.outcome != "miss"]
    # A write in the same answer makes a read that meets it a miss.
    assert not any(meets(call, each.call) for each in served for call in each.answer if call.name in WRITES)
    event(f"hits or joins: {min(len(served), 4)}")
    event(f"of things that had been written: {min(sum(each.was_written for each in served), 2)}")


@given(
    asked=st.lists(st.lists(st.sampled_from(["mail own 1", "mail own 2"]), max_size=2), min_size=1, max_size=4),
    where=st.lists(st.booleans(), min_size=4, max_size=4),
    guessed=st.lists(st.sampled_from(GUESS_S), min_size=8, max_size=8),
    seconds=st.tuples(st.sampled_from(READ_S), st.sampled_from(WRITE_S)),
)
@settings(max_examples=60, deadline=None)
def test_writes_of_another_class_cost_no_hit(
    asked: list[list[str]], where: list[bool], guessed: list[float], seconds: tuple[float, float]
) -> None:
    """A program with such writes in it, before, beside and after its reads, is served as it is without them."""
    delays = iter(guessed)
    plain: list[Step] = []
    mixed: list[Step] = []
    for queries, beside in zip(asked, where, strict=False):
        calls = tuple(asking("read_mail", query) for query in queries)
        said = tuple((next(delays), call) for call in calls)
        plain.append(Step(calls, 1.0037, said))
        mixed.append(Step((*calls, asking("write_docs", "docs own 1")) if beside else calls, 1.0037, said))
    latencies = {"read_mail": (0.0, seconds[0]), "write_docs": seconds}
    without = outcomes_of(Program((AgentRun(tuple(plain)),), latencies=latencies))
    assert outcomes_of(Program((AgentRun(tuple(mixed)),), latencies=latencies)) == without
    event(f"hits or joins: {min(3, sum(outcome != 'miss' for _, outcome in without))}")


# One case at a time


def test_a_read_that_began_during_a_write_is_not_served_before_the_write_has_ended() -> None:
    """Whether it saw the write nobody knows, and the tool itself would see it now."""
    assert outcomes_of(READ_WHILE_A_WRITE_IS_UNDER_WAY) == [("read_docs", "miss")]


@pytest.mark.parametrize(
    ("write", "read", "outcome"),
    [
        ("write_docs", "read_mail", "hit"),
        ("write_mail", "read_mail", "miss"),
        ("write_both", "read_mail", "miss"),
        ("write_docs", "read_both", "miss"),
        ("write_docs", "fetch", "miss"),
        ("put", "read_mail", "miss"),
        ("put", "fetch", "miss"),
    ],
)
@pytest.mark.parametrize("changes_it", [True, False])
def test_a_read_that_ran_one_step_early_is_served_across_a_write_of_another_class_only(
    write: str, read: str, outcome: str, changes_it: bool
) -> None:
    """It is what the tools declare that counts, whether or not the write then changes what is read."""
    changed = MINE if changes_it and write != "write_docs" else "docs own 1"
    steps = (Step((asking(write, changed),), guesses=((0.25, asking(read, MINE)),)), Step((asking(read, MINE),)))
    playing = played(Program((AgentRun(steps),), dict.fromkeys(READS, "ttl"), dict.fromkeys(READS, (0.0, 0.25))))
    assert playing.stale == []
    assert [each.outcome for each in playing.served if each.call.name == read] == [outcome]
    assert playing.num_reads == (1 if outcome == "hit" else 2)


@pytest.mark.parametrize(
    ("write_s", "outcome"),
    [
        (0.5, "miss"),  # before the read is asked for, while it runs
        (1.5, "join"),  # while the main model's call waits for it: the tool itself would be running now
    ],
)
@pytest.mark.parametrize("reads_after_s", [0.0, 2.0])
def test_a_write_of_another_thread_while_a_read_runs(write_s: float, outcome: str, reads_after_s: float) -> None:
    """The tool may have read already, or be about to."""
    writing = AgentRun((Step((asking("write_mail", OURS),), generation_s=write_s),), "writing")
    reading = AgentRun((Step((asking("read_mail", OURS),), guesses=((0.25, asking("read_mail", OURS)),)),), "reading")
    program = Program((writing, reading), latencies={"read_mail": (reads_after_s, 2.0)})
    assert outcomes_of(program) == [("read_mail", outcome)]


def test_a_result_that_is_kept_serves_its_own_tenant_only() -> None:
    read = asking("read_mail", MINE)
    first = Step((read,), guesses=((0.25, read),))
    runs = [
        AgentRun((first,), tenant="a"),
        AgentRun((Step((read,)),), tenant="a", start_s=2.0),
        AgentRun((Step((read,)),), tenant="b", start_s=3.0),
    ]
    playing = played(Program(tuple(runs), {"read_mail": "ttl"}, by_tenant=True))
    assert playing.stale == []
    assert [each.outcome for each in playing.served] == ["hit", "hit", "miss"]
    assert playing.num_reads == 2


@pytest.mark.parametrize("write", ["put", "write_mail"])
def test_a_write_of_one_tenant_is_seen_by_another(write: str) -> None:
    """What the tenants share is theirs to change: a write that declares nothing may have changed just that."""
    read = asking("read_mail", OURS)
    runs = [
        AgentRun((Step((read,), guesses=((0.25, read),)), Step((read,), generation_s=2.0)), tenant="a"),
        AgentRun((Step((asking(write, OURS),)),), tenant="b", start_s=1.0),
    ]
    playing = played(Program(tuple(runs), {"read_mail": "ttl"}, by_tenant=True))
    assert playing.stale == []
    assert [each.outcome for each in playing.served if each.call.name == "read_mail"] == ["hit", "miss"]


async def test_a_write_on_another_event_loop_makes_a_result_stale() -> None:
    """Each event loop has a cache of its own; the fences are one for all."""
    read = asking("read_mail", OURS)
    playing = Playing(Program((), {"read_mail": "ttl"}))
    toolbox, context = playing.toolbox("reader"), RunContext("reader")
    prompt = Prompt([], native=Step((), guesses=((0.0, read),)))
    turn = playing.speculation.start_turn(prompt, [], toolbox, context, loop=asyncio.get_running_loop())
    while playing.speculation.statistics().total.num_runs_succeeded == 0:
        await asyncio.sleep(0)
    turn.answer([read, read])
    assert (await turn.claim(read)).outcome == "hit"

    async def write() -> None:
        other = playing.speculation.start_turn(
            Prompt([], native=Step(())),
            [],
            playing.toolbox("writer"),
            RunContext("writer"),
            loop=asyncio.get_running_loop(),
        )
        other.answer([asking("write_mail", OURS)])
        await playing.serve(other, playing.toolbox("writer"), "writer", (), asking("write_mail", OURS))

    await asyncio.to_thread(asyncio.run, write())
    assert (await turn.claim(read)).outcome == "miss"

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from spectool_core.events import (
    CallPredicted,
    CallResolved,
    EngineUnavailable,
    Event,
    LaunchSkipped,
    OutputsPosted,
    RunFinished,
    SpeculatorFinished,
    SpeculatorSkipped,
    StreamAborted,
    TurnAnswered,
    TurnAttached,
    TurnInjected,
    TurnSettled,
    TurnStarted,
    announce,
)
from spectool_core.statistics import Counters, EngineStatistics, SourceStatistics, SpeculationStatistics, ToolStatistics
from spectool_core.trace import EventTrace, read_trace
from tests.core.fakes import observed


def counted(*events: Event) -> SpeculationStatistics:
    counters = Counters()
    for event in events:
        counters(event)
    return counters.snapshot()


def test_nothing_happened() -> None:
    nothing = counted()
    assert nothing == SpeculationStatistics()
    assert nothing.total == ToolStatistics()
    assert nothing.total.acceptance_rate is None


def test_every_event_is_counted_where_it_belongs() -> None:
    statistics = counted(
        TurnStarted(1, 0.0, ("s", "t")),
        TurnStarted(2, 0.0, ("s", "t")),
        SpeculatorSkipped(2, "t", "no_gain"),
        CallPredicted(1, "a", "s", 0.5, None),
        CallPredicted(1, "a", "t", 0.6, 0.9),
        SpeculatorFinished(1, "s", 0.0, 1.0, 3, "finished"),
        SpeculatorFinished(1, "t", 0.0, 1.0, 1, "cancelled"),
        SpeculatorFinished(2, "s", 0.0, 1.0, 0, "failed"),
        LaunchSkipped(1, "a", "s", "duplicate"),
        RunFinished(1, "a", "s", 0.0, 1.0, "succeeded"),
        RunFinished(1, "a", "s", 0.0, 1.0, "failed"),
        RunFinished(1, "a", "s", 0.0, 1.0, "timed_out"),
        RunFinished(1, "a", "s", 0.0, 1.0, "not_replayable"),
        RunFinished(1, "b", "s", None, 1.0, "cancelled"),
        TurnAnswered(1, 2.0, 2.0, 2, (("s", "a"), ("t", "a"))),
        CallResolved(1, "a", "hit", "", 2.0, 1.0, 0.0, ("s", "t"), "s"),
        CallResolved(1, "a", "join", "", 2.0, 0.5, 0.5, ("s",), "s"),
        CallResolved(1, "b", "miss", "queued", 2.0, 0.0, 0.0),
        observed("b", succeeded=True),
        observed("c", marked=False, succeeded=False),
        TurnSettled(1, 4.0, 5, 3),
    )
    assert statistics == SpeculationStatistics(
        num_turns=2,
        num_answered_turns=1,
        num_settled_turns=1,
        num_launched=5,
        num_wasted=3,
        num_predictions=4,
        num_speculators_cancelled=1,
        num_speculators_failed=1,
        tools={
            "a": ToolStatistics(
                num_hits=1,
                num_joins=1,
                num_predicted=2,
                num_skipped=1,
                num_runs_succeeded=1,
                num_runs_failed=1,
                num_runs_timed_out=1,
                num_runs_not_replayable=1,
                saved_s=1.5,
            ),
            "b": ToolStatistics(num_misses=1, num_runs_cancelled=1, num_real_runs=1),
            "c": ToolStatistics(num_real_runs=1),
        },
        speculators={
            "s": SourceStatistics(num_turns=2, num_predictions=1, num_right=1, num_hits=2, saved_s=1.5),
            "t": SourceStatistics(num_turns=1, num_skipped_turns=1, num_predictions=1, num_right=1),
        },
        resting={"a": "not_replayable"},
    )
    assert statistics.tools["a"].num_speculative_runs == 4
    assert statistics.tools["a"].acceptance_rate == 1.0
    assert statistics.total.num_speculative_runs == 5
    assert statistics.total.acceptance_rate == pytest.approx(2 / 3)
    assert statistics.total.num_real_runs == 2
    assert statistics.total.saved_s == 1.5


def test_what_engine_mode_did_is_counted_and_recorded(tmp_path: Path) -> None:
    counters, trace = Counters(), EventTrace(tmp_path / "trace.jsonl")
    events: list[Event] = [
        OutputsPosted(1, 0.5, num_outputs=0),
        OutputsPosted(1, 0.75, num_outputs=2),
        TurnInjected(2, 1.0, num_calls=2),
        TurnAttached(2, 1.0, waited_s=0.25),
        StreamAborted(3, 2.0, "different_request"),
        EngineUnavailable(3, 2.0, "cut"),
    ]
    for event in events:
        counters(event)
        trace(event)
    trace.close()
    expected = EngineStatistics(
        num_posts=2, num_outputs_posted=2, num_injected=1, num_attached=1, num_aborted=1, num_unavailable=1
    )
    assert counters.snapshot().engine == expected
    assert list(read_trace(tmp_path / "trace.jsonl")) == events


def test_a_snapshot_is_frozen_and_does_not_follow_later_events() -> None:
    counters = Counters()
    counters(LaunchSkipped(1, "a", "s", "duplicate"))
    before = counters.snapshot()
    counters(LaunchSkipped(1, "a", "s", "duplicate"))
    counters(TurnStarted(1, 0.0, ("s",)))
    assert before.tools["a"].num_skipped == 1
    assert before.num_turns == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.num_turns = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.tools["a"].num_hits = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        before.tools["b"] = ToolStatistics()  # type: ignore[index]


def test_no_event_of_another_thread_is_lost() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(500):
            counters(TurnStarted(1, 0.0, ("s",)))
            counters(CallResolved(1, "a", "hit", "", 0.0, 1.0, 0.0, ("s",), "s"))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot().num_turns == 2000
    assert counters.snapshot().tools["a"].num_hits == 2000
    assert counters.snapshot().tools["a"].saved_s == 2000.0


def test_invented_tool_names_are_bounded_and_none_is_lost() -> None:
    statistics = counted(*(LaunchSkipped(1, f"tool-{number}", "s", "unmarked") for number in range(10_000)))
    assert len(statistics.tools) <= 1025
    assert statistics.total.num_skipped == 10_000
    assert statistics.tools["tool-0"].num_skipped == 1


def test_a_hook_that_raises_stops_neither_the_others_nor_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("broken hook")

    announce([broken, heard.append, broken], TurnStarted(1, 0.0, ("s",)))
    assert heard == [TurnStarted(1, 0.0, ("s",))]
    assert [record.getMessage() for record in caplog.records] == ["a hook failed on TurnStarted"] * 2

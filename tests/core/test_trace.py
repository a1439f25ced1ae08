"""The record of events, and what is said of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from spectool_core.cli import main
from spectool_core.errors import ConfigurationError
from spectool_core.events import Event, TurnSettled
from spectool_core.explain import explain, replayed
from spectool_core.speculation import Speculation
from spectool_core.testing import run_virtual
from spectool_core.trace import EventTrace, read_trace
from tests.core.fakes import Predicts, call, search, start, take_turn, toolbox_of


def record(path: Path, *, num_turns: int = 12) -> tuple[Speculation, list[Event]]:
    """Turns in which one speculator is right and the other one wrong; the last is cut short."""
    heard: list[Event] = []
    trace = EventTrace(path)
    speculators = [Predicts(call(), name="good"), Predicts(call(query="other"), name="bad")]
    speculation = Speculation(speculators, hooks=[trace, heard.append])

    async def run() -> None:
        toolbox = toolbox_of(search(0.5))
        tools = [{"type": "function", "function": {"name": "search"}}]
        for _ in range(num_turns):
            await take_turn(speculation, toolbox, call(), tools=tools)
        start(speculation, toolbox, tools=tools).settle()

    run_virtual(run)
    trace.close()
    return speculation, heard


def test_what_is_read_is_what_happened(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    _, heard = record(path)
    assert list(read_trace(path)) == heard
    assert Counter(type(event) for event in heard)[TurnSettled] == 13


def test_the_record_holds_no_arguments_and_no_results(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path)
    text = path.read_text()
    assert "search" in text
    assert "query" not in text
    assert "x#" not in text


def test_what_is_held_follows_from_the_events_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    speculation, _ = record(path, num_turns=40)
    assert replayed(read_trace(path)) == speculation.statistics()


def test_the_command_says_why_each_is_on_or_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    speculation, _ = record(path, num_turns=40)
    assert main(["explain", str(path)]) == 0
    said = capsys.readouterr().out
    assert said == explain(speculation.statistics()) + "\n" == speculation.explain() + "\n"
    assert "tool search: may run early" in said
    good, bad = said.index("speculator good"), said.index("speculator bad")
    assert "on for the tools search: a turn is expected to be 0.4" in said[good:]
    assert "off for the tools search" in said[bad:good]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    _, heard = record(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert list(read_trace(path)) == heard[:-1]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("not json\n", "trace.jsonl"),
        ('{"spectool_trace":2}\n', "trace.jsonl"),
        ("[]\n", "trace.jsonl"),
        ('{"spectool_trace":1}\n{"event":"Unheard"}\n', "line 2"),
        ('{"spectool_trace":1}\n{"event":"TurnSettled","turn":1}\n', "line 2"),
        ('{"spectool_trace":1}\n\n', "line 2"),
    ],
)
def test_a_file_that_is_no_trace_is_named(
    tmp_path: Path, text: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=named):
        list(read_trace(path))
    assert main(["explain", str(path)]) == 1
    assert named in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err


def test_fields_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    event = {"event": "TurnSettled", "turn": 1, "time_s": 2.0, "num_launched": 3, "num_wasted": 1, "more": "of it"}
    path.write_text('{"spectool_trace":1}\n' + json.dumps(event) + "\n")
    assert list(read_trace(path)) == [TurnSettled(1, 2.0, 3, 1)]


def test_events_after_the_end_are_dropped(tmp_path: Path) -> None:
    trace = EventTrace(tmp_path / "trace.jsonl")
    trace.close()
    trace(TurnSettled(1, 2.0, 3, 1))
    assert list(read_trace(tmp_path / "trace.jsonl")) == []

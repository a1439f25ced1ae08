"""On recorded conversations of an airline's agent, about tasks that the speculator has not seen."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks.episodes import AIRLINE, Airline, Scores, splits
from benchmarks.history import answers_predicted, learned

pytestmark = pytest.mark.skipif(not AIRLINE.is_dir(), reason=f"no recorded episodes at {AIRLINE}")


@pytest.mark.timeout(240)  # some ten seconds of CPU
async def test_it_predicts_reads_of_tasks_that_are_new_to_it(tmp_path: Path) -> None:
    airline = Airline.load()
    scores = []
    for number, (known, unknown) in enumerate(splits(airline, 2)):
        path = tmp_path / f"{number}.jsonl"
        learned(airline, path, known)
        scores.append(Scores(await answers_predicted(airline, path, unknown), airline.read_only))
    assert statistics.mean(each.top(1) for each in scores) >= 0.61
    assert statistics.mean(each.top(3) for each in scores) >= 0.67
    assert statistics.mean(each.precision(0.5) for each in scores) >= 0.65

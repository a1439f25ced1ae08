"""How often the history speculator is right on recorded conversations that are new to it, and what it costs."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.episodes import AIRLINE, Airline, Answered, Episode, Scores, splits
from spectool_core.calls import Message, Prompt
from spectool_core.speculators import HistorySpeculator, Prediction

__all__ = ["answers_predicted", "learned", "main"]

_THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7)
_NUM_BINS = 10
_NUM_MESSAGES = 60


def learned(airline: Airline, path: Path, episodes: Sequence[Episode]) -> None:
    """Write a file of what there is to learn from `episodes`."""
    speculator = HistorySpeculator(path=path, tools=airline.read_only)
    for episode in episodes:
        speculator.learn(episode.messages)
    speculator.save()


async def answers_predicted(airline: Airline, path: Path, episodes: Sequence[Episode]) -> list[Answered]:
    """What was predicted of each answer; every episode begins with what is in the file, and adds only its own past."""
    answered = []
    for episode in episodes:
        speculator = HistorySpeculator(path=path, tools=airline.read_only, min_probability=0.0)
        for messages, call in episode.prompts():
            guesses = [guess async for guess in speculator.predict(Prompt(messages), airline.tools)]
            answered.append(Answered([guess for guess in guesses if isinstance(guess, Prediction)], call))
    return answered


def _print_scores(scores: Sequence[Scores]) -> None:
    for num in (1, 3):
        shares = [each.top(num) for each in scores]
        print(
            f"top-{num}: {statistics.mean(shares):.3f} of the read-only calls ({min(shares):.2f} to {max(shares):.2f})"
        )
    print("\nat least   right   of the read-only calls")
    for threshold in _THRESHOLDS:
        precision = statistics.mean(each.precision(threshold) for each in scores)
        coverage = statistics.mean(each.coverage(threshold) for each in scores)
        print(f"{threshold:8.1f} {precision:7.3f} {coverage:8.3f}")
    print("\nprobability   predictions   mean   came true")
    for number in range(_NUM_BINS):
        least = number / _NUM_BINS
        held = [pair for each in scores for pair in each.likely(least, least + 1 / _NUM_BINS)]
        if held:
            mean, true = statistics.mean(p for p, _ in held), statistics.mean(right for _, right in held)
            print(f"from {least:.1f} {len(held):14d} {mean:8.2f} {true:8.2f}")


async def _seconds(airline: Airline, path: Path, episodes: Sequence[Episode]) -> tuple[list[float], list[float]]:
    """CPU seconds of a turn after `_NUM_MESSAGES` messages: of a conversation that was followed, and of a new one."""
    followed, unknown = [], []
    for episode in episodes:
        messages = episode.messages[:_NUM_MESSAGES]
        if len(messages) == _NUM_MESSAGES:
            speculator = HistorySpeculator(path=path, tools=airline.read_only)
            unknown.append(await _asked_s(speculator, airline, messages))
            for length in range(_NUM_MESSAGES - 2, _NUM_MESSAGES + 1):
                seconds = await _asked_s(speculator, airline, messages[:length])
            followed.append(seconds)
    return followed, unknown


async def _asked_s(speculator: HistorySpeculator, airline: Airline, messages: Sequence[Message]) -> float:
    started_s = time.process_time()
    async for _ in speculator.predict(Prompt(messages), airline.tools):
        pass
    return time.process_time() - started_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2, help="ways to halve the tasks; each half is learned from once")
    given, _ = parser.parse_known_args(arguments)
    if not AIRLINE.is_dir():
        print(f"no recorded episodes at {AIRLINE}")
        return
    airline = Airline.load()
    scores = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.jsonl"
        for known, unknown in splits(airline, given.seeds):
            path.unlink(missing_ok=True)
            learned(airline, path, known)
            scores.append(Scores(asyncio.run(answers_predicted(airline, path, unknown)), airline.read_only))
        _print_scores(scores)
        followed, unseen = asyncio.run(_seconds(airline, path, [*known, *unknown]))
        if followed:
            print(f"\nCPU of a turn after {_NUM_MESSAGES} messages, median of {len(followed)} conversations:")
            print(f"{1000 * statistics.median(followed):.2f} ms where the turns before were seen,")
            print(f"{1000 * statistics.median(unseen):.2f} ms where the conversation is new")


if __name__ == "__main__":
    main()

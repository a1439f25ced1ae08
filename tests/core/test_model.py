from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectool_core.errors import ConfigurationError
from spectool_core.model import (
    EngineCosts,
    EngineTurn,
    cached_engine_time,
    max_speedup,
    max_speedup_bound,
    pays,
    run_standard_time,
    run_time,
    speculative_engine_time,
    speculative_time,
    speedup,
    standard_time,
    vanilla_engine_time,
)

# Whole milliseconds: what is compared then differs by more than rounding does.
seconds = st.integers(0, 10_000).map(lambda ms: ms / 1000)
shares = st.integers(0, 1000).map(lambda share: share / 1000)
times = st.fixed_dictionaries({"generation_s": seconds, "speculator_s": seconds, "tool_s": seconds})


def test_standard_time_by_hand() -> None:
    assert standard_time(3, generation_s=2.0, tool_s=0.5) == 7.5


@pytest.mark.parametrize(
    ("alpha", "speculator_s", "tool_s", "expected"),
    [
        (0.0, 0.4, 1.0, 30.0),
        (1.0, 0.4, 1.0, 20.0),  # the tool is hidden: max(2, 1.4)
        (1.0, 0.4, 3.0, 34.0),  # the generation is hidden: max(2, 3.4)
        (0.5, 0.4, 1.0, 25.0),
        (1.0, 2.0, 1.0, 30.0),  # a speculator as slow as the main model
        (1.0, 9.0, 1.0, 30.0),  # a late one is not waited for
        (1.0, 0.4, 0.0, 20.0),
    ],
)
def test_speculative_time_by_hand(alpha: float, speculator_s: float, tool_s: float, expected: float) -> None:
    measured = speculative_time(10, alpha, generation_s=2.0, speculator_s=speculator_s, tool_s=tool_s)
    assert measured == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.25, 1.25), (0.5, 1.5), (0.75, 1.75), (1.0, 2 / 1.1), (2.0, 3 / 2.1)]
)
def test_the_corners_of_figure_3(ratio: float, expected: float) -> None:
    # alpha = 1, g/G = 0.1
    assert speedup(1.0, generation_s=1.0, speculator_s=0.1, tool_s=ratio) == pytest.approx(expected)
    assert speedup(0.0, generation_s=1.0, speculator_s=0.1, tool_s=ratio) == 1
    assert speedup(1.0, generation_s=1.0, speculator_s=1.0, tool_s=ratio) == 1


@pytest.mark.parametrize(("tool_s", "saved"), [(0.5, 0.08), (1.0, 2 / 15), (1.5, 6 / 35), (2.0, 0.16), (3.0, 0.128)])
def test_time_saved_peaks_where_tool_and_generation_are_alike(tool_s: float, saved: float) -> None:
    # alpha = 0.4, about what the paper's smallest speculator reaches; figure 6 saves 6 % at 0.5 s and 21 % at 2 s.
    measured = speedup(0.4, generation_s=2.0, speculator_s=0.4, tool_s=tool_s)
    assert 1 - 1 / measured == pytest.approx(saved)


@given(shares, shares, times)
def test_speedup_rises_strictly_with_alpha_where_it_pays(low: float, high: float, times: dict[str, float]) -> None:
    low, high = sorted((low, high))
    slow, fast = speedup(low, **times), speedup(high, **times)
    if low < high and pays(1.0, **times):
        assert slow < fast
    else:
        assert slow == pytest.approx(fast)


@given(shares, times)
def test_equation_3_agrees_with_equation_2(alpha: float, times: dict[str, float]) -> None:
    measured = speedup(alpha, **times)
    assert measured >= 1 - 1e-12
    assert pays(alpha, **times) == (measured > 1 + 1e-12)


@given(shares, times)
def test_lemma_1_bounds_every_speedup(alpha: float, times: dict[str, float]) -> None:
    bound = max_speedup_bound(**times)
    assert speedup(alpha, **times) <= max_speedup(**times) + 1e-9
    assert max_speedup(**times) <= bound + 1e-9
    assert bound <= 2
    assert (bound < 2) == (min(times["speculator_s"], times["generation_s"]) > 0)


def test_lemma_1_is_tight_where_both_phases_are_equally_long() -> None:
    times = {"generation_s": 2.0, "speculator_s": 0.5, "tool_s": 1.5}
    assert max_speedup(**times) == max_speedup_bound(**times) == 1.75


@given(st.floats(0, 100), times)
def test_a_late_speculator_changes_nothing(late_s: float, times: dict[str, float]) -> None:
    times["speculator_s"] = times["generation_s"] + late_s
    assert speedup(1.0, **times) == pytest.approx(1)


def test_nothing_takes_no_time() -> None:
    assert speedup(0.5, generation_s=0.0, speculator_s=0.0, tool_s=0.0) == 1
    assert max_speedup_bound(generation_s=0.0, speculator_s=0.0, tool_s=0.0) == 2


def test_a_run_by_hand() -> None:
    times = {"generation_s": 2.0, "speculator_s": 0.4, "tool_s": 1.0}
    assert run_standard_time(4, generation_s=2.0, tool_s=1.0) == 14.0
    assert run_time(4, 3, **times) == pytest.approx(3 * 2.0 + 3.0 + 2.0)
    assert run_time(0, 0, **times) == 2.0


@given(st.integers(0, 20), st.integers(0, 20), times)
def test_a_run_is_equation_1_and_a_final_turn(num_turns: int, num_hits: int, times: dict[str, float]) -> None:
    num_hits = min(num_hits, num_turns)
    alpha = num_hits / num_turns if num_turns else 0.0
    expected = speculative_time(num_turns, alpha, **times) + times["generation_s"]
    assert run_time(num_turns, num_hits, **times) == pytest.approx(expected)
    standard_s = run_standard_time(num_turns, generation_s=times["generation_s"], tool_s=times["tool_s"])
    assert run_time(num_turns, 0, **times) == pytest.approx(standard_s)


COSTS = EngineCosts(prefill_s=0.001, decode_s=0.01, overhead_s=0.1)
TURNS = [EngineTurn(50, 20, 30, tool_s=0.5), EngineTurn(40, 10, 60, tool_s=0.25)]


def test_engine_times_by_hand() -> None:
    # Prefilled: (4) 100, then 100 + 20 + 30; (5), (6) 100 + 50 + 70. Decoded: 50 + 20 + 40 + 10.
    assert vanilla_engine_time(100, TURNS, COSTS) == pytest.approx(0.4 + 0.25 + 1.2 + 0.75)
    assert cached_engine_time(100, TURNS, COSTS) == pytest.approx(0.4 + 0.22 + 1.2 + 0.75)
    assert speculative_engine_time(100, TURNS, COSTS, alpha=0.5) == pytest.approx(0.2 + 0.22 + 1.06 + 0.375)
    assert speculative_engine_time(100, TURNS, COSTS, alpha=1.0) == pytest.approx(0.22 + 0.92)


def test_no_turns_leave_the_prefill_of_the_prompt() -> None:
    assert vanilla_engine_time(100, [], COSTS) == 0
    assert cached_engine_time(100, [], COSTS) == pytest.approx(0.1)


counts = st.integers(0, 1000)
turns = st.lists(st.builds(EngineTurn, counts, st.integers(1, 1000), counts, tool_s=seconds), max_size=6)


@given(counts, turns, shares, shares)
def test_engine_time_falls_with_alpha(num_prompt: int, turns: list[EngineTurn], low: float, high: float) -> None:
    low, high = sorted((low, high))
    slow = speculative_engine_time(num_prompt, turns, COSTS, alpha=low)
    assert speculative_engine_time(num_prompt, turns, COSTS, alpha=high) <= slow + 1e-9
    assert slow <= cached_engine_time(num_prompt, turns, COSTS) + 1e-9


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: standard_time(-1, generation_s=1.0, tool_s=1.0), "num_turns"),
        (lambda: standard_time(1, generation_s=-1.0, tool_s=1.0), "generation_s"),
        (lambda: standard_time(1, generation_s=1.0, tool_s=math.inf), "tool_s"),
        (lambda: speculative_time(1, 1.5, generation_s=1.0, speculator_s=1.0, tool_s=1.0), "alpha"),
        (lambda: speculative_time(1, math.nan, generation_s=1.0, speculator_s=1.0, tool_s=1.0), "alpha"),
        (lambda: speedup("1", generation_s=1.0, speculator_s=1.0, tool_s=1.0), "alpha"),  # type: ignore[arg-type]
        (lambda: speedup(0.5, generation_s=1.0, speculator_s=math.nan, tool_s=1.0), "speculator_s"),
        (lambda: pays(-0.1, generation_s=1.0, speculator_s=1.0, tool_s=1.0), "alpha"),
        (lambda: max_speedup_bound(generation_s="1", speculator_s=1.0, tool_s=1.0), "generation_s"),  # type: ignore[arg-type]
        (lambda: run_time(2, 3, generation_s=1.0, speculator_s=1.0, tool_s=1.0), "num_hits"),
        (lambda: run_time(-1, 0, generation_s=1.0, speculator_s=1.0, tool_s=1.0), "num_tool_turns"),
        (lambda: EngineTurn(-1, 1, 1, tool_s=1.0), "num_reasoning_tokens"),
        (lambda: EngineCosts(0.1, 0.1, -0.1), "overhead_s"),
        (lambda: vanilla_engine_time(-1, [], COSTS), "num_prompt_tokens"),
        (lambda: speculative_engine_time(1, [], COSTS, alpha=2.0), "alpha"),
    ],
)
def test_what_cannot_be_is_refused_by_name(call: Callable[[], Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert caught.value.field == field

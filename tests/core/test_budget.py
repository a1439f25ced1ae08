"""Limits on runs of a turn and of all, and on what a minute may cost."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from spectool_core.budget import Budget, TurnBudget
from spectool_core.config import validated_config


def test_each_limit_is_named_when_it_is_used_up() -> None:
    budget = Budget(validated_config(max_runs_per_turn=3, max_runs_per_tool=2, max_runs=4))
    first = TurnBudget()
    assert budget.run_limit(first, "a", 0.0) is None
    assert budget.spend_run(first, "a", 0.0, 0.0)
    assert budget.spend_run(first, "a", 0.0, 0.0)
    assert budget.run_limit(first, "a", 0.0) == "max_runs_per_tool"
    assert budget.run_limit(first, "b", 0.0) is None
    assert budget.spend_run(first, "b", 0.0, 0.0)
    assert budget.run_limit(first, "c", 0.0) == "max_runs_per_turn"

    second = TurnBudget()
    assert budget.run_limit(second, "a", 0.0) is None
    assert budget.spend_run(second, "a", 0.0, 0.0)
    assert budget.run_limit(second, "b", 0.0) == "max_runs"
    assert budget.run_limit(TurnBudget(), "z", 0.0) == "max_runs"


def test_no_runs_at_all() -> None:
    budget = Budget(validated_config(max_runs=0))
    assert budget.run_limit(TurnBudget(), "a", 0.0) == "max_runs"
    assert not budget.spend_run(TurnBudget(), "a", 0.0, 0.0)


def test_threads_together_never_spend_more_than_max_runs() -> None:
    budget = Budget(validated_config(max_runs=50))
    num_threads = 8
    barrier = threading.Barrier(num_threads)

    def spend() -> int:
        turn = TurnBudget()
        barrier.wait()
        # Every thread saw room before any has spent, which is what a race does.
        assert budget.run_limit(turn, "a", 0.0) is None
        barrier.wait()
        granted = sum(budget.spend_run(turn, "a", 0.0, 0.0) for _ in range(50))
        assert turn.num_runs == turn.num_runs_of_tool.get("a", 0) == granted
        return granted

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            granted = [future.result() for future in [pool.submit(spend) for _ in range(num_threads)]]
    finally:
        sys.setswitchinterval(interval)
    assert sum(granted) == 50


def test_runs_of_a_minute() -> None:
    budget = Budget(validated_config(max_runs_per_minute=2))
    for now_s in (0.0, 30.0):
        assert budget.run_limit(TurnBudget(), "a", now_s) is None
        assert budget.spend_run(TurnBudget(), "a", 0.0, now_s)
    assert budget.run_limit(TurnBudget(), "a", 59.9) == "max_runs_per_minute"
    assert budget.prediction_limit(59.9) is None
    assert budget.run_limit(TurnBudget(), "a", 60.0) is None
    assert budget.spend_run(TurnBudget(), "a", 0.0, 60.0)
    assert budget.run_limit(TurnBudget(), "a", 89.9) == "max_runs_per_minute"


def test_tokens_of_a_minute_stop_speculators_and_not_runs() -> None:
    budget = Budget(validated_config(max_tokens_per_minute=100))
    budget.spend_prediction(99, 0.0, 0.0)
    assert budget.prediction_limit(1.0) is None
    budget.spend_prediction(1, 0.0, 1.0)
    assert budget.prediction_limit(1.0) == "max_tokens_per_minute"
    assert budget.run_limit(TurnBudget(), "a", 1.0) is None
    assert budget.prediction_limit(60.0) is None


def test_money_of_a_minute_stops_both_whoever_spent_it() -> None:
    budget = Budget(validated_config(max_cost_per_minute=1.0))
    assert budget.spend_run(TurnBudget(), "a", 0.75, 0.0)
    assert budget.prediction_limit(0.0) is None
    budget.spend_prediction(10, 0.25, 1.0)
    assert budget.prediction_limit(1.0) == budget.run_limit(TurnBudget(), "a", 1.0) == "max_cost_per_minute"
    assert budget.prediction_limit(60.0) is None


def test_a_limit_of_nothing_allows_nothing_to_be_spent() -> None:
    budget = Budget(validated_config(max_cost_per_minute=0.0))
    assert budget.prediction_limit(0.0) is None
    budget.spend_prediction(1, 0.01, 0.0)
    assert budget.prediction_limit(0.0) == "max_cost_per_minute"

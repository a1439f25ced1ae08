from __future__ import annotations

import itertools

import pytest

from spectool_core.decision import Hit, Join, Launch, Miss, Skip, decide_claim, decide_launch

FREE = {"shadow": False, "answered": False, "present": False, "resting": False, "denied": False, "objection": None}


def test_a_call_that_nothing_forbids_is_launched() -> None:
    assert decide_launch(**FREE) == Launch()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("answered", True, "answered"),
        ("present", True, "duplicate"),
        ("resting", True, "resting"),
        ("denied", True, "denied"),
        ("objection", "max_runs_per_turn", "max_runs_per_turn"),
        ("shadow", True, "shadow"),
    ],
)
def test_each_reason_alone_forbids_a_launch(field: str, value: object, reason: str) -> None:
    assert decide_launch(**{**FREE, field: value}) == Skip(reason)


def test_nothing_is_ever_launched_while_a_reason_is_left() -> None:
    options = [[False, True]] * 5 + [[None, "max_runs"]]
    for shadow, answered, present, resting, denied, objection in itertools.product(*options):
        decision = decide_launch(
            shadow=shadow, answered=answered, present=present, resting=resting, denied=denied, objection=objection
        )
        forbidden = shadow or answered or present or resting or denied or objection
        assert isinstance(decision, Skip if forbidden else Launch)


@pytest.mark.parametrize(
    ("state", "decision"),
    [
        (None, Miss("not_predicted")),
        ("queued", Miss("queued")),
        ("running", Join()),
        ("succeeded", Hit()),
        ("failed", Miss("failed")),
    ],
)
def test_a_due_call_is_served_by_a_run_that_began_and_did_not_fail(state: str | None, decision: object) -> None:
    assert decide_claim(state, due=True, predicted=False) == decision
    assert decide_claim(state, due=False, predicted=False) == Miss("already_served")


def test_a_call_that_was_named_and_not_run_is_told_from_one_that_nobody_named() -> None:
    assert decide_claim(None, due=True, predicted=True) == Miss("not_run")

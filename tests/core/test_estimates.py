from __future__ import annotations

import pytest

from spectool_core.estimates import Differences, RunningMean, Share


def test_a_young_mean_is_plain_and_an_old_one_follows() -> None:
    mean = RunningMean(weight=0.25)
    assert mean.value is None
    for value in (1.0, 1.2, 1.4):
        mean.add(value)
    assert mean.value == pytest.approx(1.2)
    for _ in range(40):
        mean.add(1.3)
    assert mean.value == pytest.approx(1.3, abs=1e-4)


def test_a_jump_is_followed_at_its_second_value_and_an_outlier_is_not() -> None:
    mean = RunningMean()
    for _ in range(50):
        mean.add(1.0)
    mean.add(6.0)
    assert mean.value == pytest.approx(2.0)
    mean.add(1.0)
    mean.add(1.0)
    assert mean.value == pytest.approx(1.0)
    mean.add(0.1)
    mean.add(0.1)
    assert mean.value == pytest.approx(0.1)
    mean.add(7.0)
    mean.add(0.1)
    mean.add(7.0)
    assert mean.value is not None
    assert mean.value < 4


def test_zero_is_a_value_like_others() -> None:
    mean = RunningMean()
    for _ in range(5):
        mean.add(0.0)
    assert mean.value == 0.0
    mean.add(1.0)
    mean.add(1.0)
    assert mean.value == 1.0


def test_a_share_forgets() -> None:
    share = Share()
    assert share.mean == 0.5
    for _ in range(100):
        share.add(success=True)
    assert share.mean > 0.98
    for _ in range(40):
        share.add(success=False)
    assert share.mean < 0.15
    for _ in range(5):
        share.add(success=True)
    assert share.mean > 0.6


def test_a_share_bears_with_a_run_of_bad_luck() -> None:
    share = Share()
    for trial in range(100):
        share.add(success=trial % 2 == 0)
    for _ in range(6):
        share.add(success=False)
    assert share.mean > 0.3


def test_a_difference_needs_two_measurements_that_agree() -> None:
    differences = Differences(num_kept=4)
    assert differences.at_least == 0.0
    differences.add(0.3)
    assert differences.at_least == 0.0
    differences.add(0.3)
    assert differences.at_least == pytest.approx(0.3)
    differences.add(-0.9)
    assert differences.at_least == 0.0
    for _ in range(4):
        differences.add(0.1)
    assert len(differences) == 4
    assert differences.at_least == pytest.approx(0.1)

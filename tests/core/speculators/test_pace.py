from __future__ import annotations

from collections.abc import Sequence

import pytest

from spectool_core.speculators._pace import StreamingPace


def pace_after(*replies: tuple[float, Sequence[float]]) -> StreamingPace:
    pace = StreamingPace()
    for duration_s, leads_s in replies:
        pace.observe(duration_s, leads_s)
    return pace


def test_the_first_requests_are_streamed() -> None:
    assert pace_after(*[(1.0, [0.0])] * 3).streams_next()


@pytest.mark.parametrize(
    ("leads_s", "streams"), [([0.05], False), ([0.1], True), ([0.5, 0.0], True), ([0.1, 0.0], False)]
)
def test_it_streams_where_the_mean_lead_is_a_tenth_of_the_time(leads_s: list[float], streams: bool) -> None:
    assert pace_after(*[(1.0, leads_s)] * 4).streams_next() is streams


def test_replies_without_calls_say_nothing() -> None:
    assert pace_after(*[(1.0, [])] * 50).streams_next()
    assert pace_after(*[(0.0, [0.0])] * 50).streams_next()


def test_one_in_32_is_streamed_to_notice_change() -> None:
    pace = pace_after(*[(1.0, [0.0])] * 4)
    assert [pace.streams_next() for _ in range(64)] == ([False] * 31 + [True]) * 2


def test_it_comes_back_when_leads_grow() -> None:
    pace = pace_after(*[(1.0, [0.0])] * 40)
    for _ in range(2):
        assert not pace.streams_next()
        pace.observe(1.0, [0.6])
    assert pace.streams_next()


def test_failures_end_it() -> None:
    pace = StreamingPace()
    for _ in range(4):
        assert pace.streams_next()
        pace.observe_failure()
    assert not pace.streams_next()

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectool_core.speculators._refusals import refused_option, retry_after_s


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "3"}, 3.0),
        ({"Retry-After": "0"}, 0.0),
        ({"Retry-After": "1.5"}, 1.5),
        ({"Retry-After": "3", "retry-after-ms": "250"}, 0.25),
        ({"Retry-After": "3", "retry-after-ms": "soon"}, 3.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:30 GMT", "Date": "Wed, 21 Oct 2015 07:28:00 GMT"}, 30.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT", "Date": "Wed, 21 Oct 2015 07:28:30 GMT"}, 0.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, None),
        ({"Retry-After": "-1"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": "later"}, None),
        ({}, None),
    ],
)
def test_a_pause_is_read_from_the_headers(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


@given(st.text(), st.text(), st.text())
def test_no_header_raises(ms: str, after: str, date: str) -> None:
    seconds = retry_after_s({"retry-after-ms": ms, "Retry-After": after, "Date": date})
    assert seconds is None or seconds >= 0


BOTH = frozenset({"n", "stream_options"})


@pytest.mark.parametrize(
    ("body", "options", "option"),
    [
        ({"error": {"message": "no", "param": "n"}}, BOTH, "n"),
        ({"error": {"message": "no", "param": "stream_options"}}, BOTH, "stream_options"),
        ({"detail": [{"loc": ["body", "stream_options"]}]}, BOTH, "stream_options"),
        ({"error": {"message": "Unsupported value: 'n' does not support 3", "param": None}}, BOTH, "n"),
        ({"error": {"message": "one choice only"}}, BOTH, "n"),
        ({"message": "one choice only"}, BOTH, "n"),
        ("not JSON's object", BOTH, "n"),
        ({"error": {"message": "too long", "param": "messages"}}, BOTH, None),
        ({"error": {"message": "something"}}, frozenset({"stream_options"}), None),
        ({"error": {"message": "no", "param": "n"}}, frozenset(), None),
    ],
)
def test_the_option_to_blame(body: Any, options: frozenset[str], option: str | None) -> None:
    assert refused_option(json.dumps(body).encode(), options) == option


@given(st.binary())
def test_no_body_raises(body: bytes) -> None:
    assert refused_option(body, BOTH) in {"n", "stream_options"}

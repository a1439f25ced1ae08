from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectool_core.speculators._arguments import ClosingScanner, parse_arguments
from tests.core.speculators.strategies import json_objects, pieces_of


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        (" \n", {}),
        ("{}", {}),
        (' {"x": 1} ', {"x": 1}),
        ('{"x": 9223372036854775807, "y": 10000000000000001}', {"x": 9223372036854775807, "y": 10000000000000001}),
        ('{"x": 1, "x": 2}', {"x": 2}),
        ('{"x": "two\nlines"}', {"x": "two\nlines"}),
    ],
)
def test_what_python_reads_as_an_object_is_arguments(text: str, arguments: dict[str, Any]) -> None:
    assert parse_arguments(text) == arguments


@pytest.mark.parametrize(
    "text",
    [
        'query = """select 1"""',
        '{"x": NaN}',
        '{"x": Infinity}',
        '{"x": -Infinity}',
        '{"x": 1',
        '{"x": 1}}',
        '{"x": 1}{"x": 1}',
        "{}{}",
        "[1]",
        "null",
        '"{}"',
        "5",
        "{'x': 1}",
        '{"x": ' * 50_000,
        '{"x": ' + "1" * 5_000 + "}",
    ],
)
def test_anything_else_is_no_arguments(text: str) -> None:
    assert parse_arguments(text) is None


@settings(max_examples=60)
@given(json_objects(), st.data())
def test_an_object_closes_at_its_last_bracket_and_not_before(arguments: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(arguments, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1])))
    scanner = ClosingScanner()
    for piece in data.draw(pieces_of(text[:-1])):
        scanner.feed(piece)
        assert not scanner.is_closed
    scanner.feed(text[-1])
    assert scanner.is_closed
    assert not scanner.is_too_deep


def test_absurd_nesting_closes_at_once() -> None:
    scanner = ClosingScanner()
    scanner.feed("[" * 1_000_000)
    assert scanner.is_closed
    assert scanner.is_too_deep

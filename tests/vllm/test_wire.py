"""The HTTP interface as values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectool_core.vllm.access import ApiKeys
from spectool_core.vllm.wire import WireError, call_key, output_text, read_tool_outputs, server_sent_event

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
).filter(lambda value: "\\ud" not in json.dumps(value))


def read(entries: Any) -> Any:
    return read_tool_outputs(json.dumps(entries).encode())


def refused(body: bytes) -> WireError:
    with pytest.raises(WireError) as caught:
        read_tool_outputs(body)
    return caught.value


@given(st.dictionaries(st.text(), JSON, max_size=4).filter(lambda value: "\\ud" not in json.dumps(value)))
def test_a_key_does_not_depend_on_the_order_of_keys_nor_on_a_trip_over_json(params: dict[str, Any]) -> None:
    key = call_key("f", params)

    assert call_key("f", dict(reversed(params.items()))) == key
    assert call_key("f", json.loads(json.dumps(params))) == key


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (1, True), (1, "1"), (None, "null"), ([], {}), (2**63, 2**63 + 1)]
)
def test_what_differs_in_type_or_value_has_another_key(one: Any, other: Any) -> None:
    assert call_key("f", {"x": one}) != call_key("f", {"x": other})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", {1: 2}, {1, 2}, b"", object()])
def test_what_json_does_not_have_has_no_key(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        call_key("f", {"x": value})


def test_names_and_arguments_cannot_be_taken_for_each_other() -> None:
    assert call_key("f", {}) == "f\0{}"


def test_text_is_injected_as_it_is_and_all_else_as_compact_json() -> None:
    assert output_text('{"a": 1}') == '{"a": 1}'
    assert output_text({"a": [1, None], "é": True}) == '{"a":[1,null],"é":true}'
    assert output_text(None) == "null"


def test_an_entry_is_an_output_or_pending_or_withdrawn() -> None:
    done, pending, withdrawn, nothing = read(
        [
            {"name": "f", "params": {"x": 1}, "output": "y", "keep_alive": 3, "turn": 2},
            {"name": "f", "pending": True},
            {"name": "f", "pending": False},
            {"name": "f", "output": None},
        ]
    )

    assert (done.name, done.params, done.output, done.keep_alive, done.turn) == ("f", {"x": 1}, "y", 3, 2)
    assert (pending.pending, pending.is_withdrawn) == (True, False)
    assert withdrawn.is_withdrawn
    assert not nothing.is_withdrawn
    assert output_text(nothing.output) == "null"


@pytest.mark.parametrize(
    ("entry", "param"),
    [
        ({"output": "y"}, "0.name"),
        ({"name": "", "output": "y"}, "0.name"),
        ({"name": 3, "output": "y"}, "0.name"),
        ({"name": "f"}, "0.output"),
        ({"name": "f", "pending": True, "output": "y"}, "0.output"),
        ({"name": "f", "params": [], "output": "y"}, "0.params"),
        ({"name": "f", "params": "{}", "output": "y"}, "0.params"),
        ({"name": "f", "output": "y", "keep_alive": 0}, "0.keep_alive"),
        ({"name": "f", "output": "y", "keep_alive": "3"}, "0.keep_alive"),
        ({"name": "f", "output": "y", "turn": 0}, "0.turn"),
        ({"name": "f", "output": "y", "result": 1}, "0.result"),
        ("f", "0"),
    ],
)
def test_a_bad_entry_is_refused_with_its_field(entry: Any, param: str) -> None:
    error = refused(json.dumps([entry]).encode())

    assert (error.status, error.code, error.param) == (422, "invalid_field", param)
    assert error.body()["error"]["param"] == param


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'[{"name": "f", "output": NaN}]', b"[" * 100_000])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    error = refused(body)

    assert (error.status, error.code) == (422, "malformed_json")


@pytest.mark.parametrize("body", [b"{}", b"null", b'"f"'])
def test_what_is_no_list_is_refused(body: bytes) -> None:
    assert refused(body).status == 422


def test_a_lone_surrogate_is_refused() -> None:
    assert refused(rb'[{"name": "f", "output": "\ud800"}]').status == 422
    assert refused(rb'[{"name": "f", "params": {"x": "\ud800"}, "output": ""}]').status == 422


def test_an_event_is_one_line_of_data() -> None:
    event = server_sent_event({"turn": 1, "text": "a\nb"}, "spectool.turn")

    assert event == 'event: spectool.turn\ndata: {"turn":1,"text":"a\\nb"}\n\n'
    assert server_sent_event({}) == "data: {}\n\n"


@pytest.mark.parametrize(
    "authorization", [None, "", "secret", "Basic secret", "Bearer", "Bearer other", "Bearer secret "]
)
def test_a_wrong_api_key_is_refused(authorization: str | None) -> None:
    with pytest.raises(WireError) as caught:
        ApiKeys(["other-one", "secret"]).check(authorization)

    assert caught.value.status == 401
    assert caught.value.message == "Authorization: no valid API key; expected 'Bearer <key>'"
    assert caught.value.body()["error"]["type"] == "authentication_error"


def test_each_api_key_is_good_and_without_keys_everybody_may() -> None:
    ApiKeys(["one", "two"]).check("Bearer two")
    ApiKeys(["one", "two"]).check("bearer one")
    ApiKeys([None, ""]).check(None)

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectool_core.calls import ToolCall
from spectool_core.speculators._assembly import CallAssembler, CallPiece
from tests.core.speculators.strategies import json_objects, pieces_of


def assembled(pieces: list[CallPiece], *, only_first: bool = False) -> list[ToolCall]:
    assembler = CallAssembler(only_first=only_first)
    early = [call for piece in pieces if (call := assembler.feed(piece)) is not None]
    return early + assembler.finish()


def texts(*arguments: str, **first: Any) -> list[CallPiece]:
    """A call's head, then its arguments in these pieces, all under the head's index."""
    index = first.get("index")
    return [CallPiece(**first), *(CallPiece(index=index, arguments=text) for text in arguments)]


def test_pieces_without_an_index_are_one_call() -> None:
    calls = assembled(texts('{"x":', "1}", name="a", id="1"))
    assert calls == [ToolCall("a", {"x": 1}, "1")]


def test_two_calls_under_one_index_with_different_ids_are_two_calls() -> None:
    one, two = texts('{"x":1}', index=0, id="1", name="a"), texts('{"x":2}', index=0, id="2", name="a")
    assert assembled(one + two) == [ToolCall("a", {"x": 1}, "1"), ToolCall("a", {"x": 2}, "2")]


def test_equal_pieces_are_all_kept() -> None:
    insert = "INSERT INTO t VALUES (1);"
    (call,) = assembled(texts('{"sql":"' + insert, insert, insert, '"}', index=0, name="run"))
    assert call.arguments == {"sql": insert * 3}


@pytest.mark.parametrize("text", ['{"sql":"INS', '{"x":1', '{"x":{"y":1}', '{"x":"}', '{"x":"\\"}', "{", ""])
def test_a_partial_parse_is_no_call(text: str) -> None:
    assembler = CallAssembler()
    assert [assembler.feed(piece) for piece in texts(text, index=0, name="a")] == [None, None]
    assembler.cut()
    assert assembler.finish() == []


def test_an_empty_last_piece_changes_nothing() -> None:
    text = '{"wd":23,"sd":0.8,"injection":"ZSJB39"}'
    (call,) = assembled(texts(text, "", index=0, name="inject"))
    assert call.arguments == {"wd": 23, "sd": 0.8, "injection": "ZSJB39"}


def test_a_call_is_complete_at_its_last_bracket() -> None:
    assembler = CallAssembler()
    fed = [assembler.feed(piece) for piece in texts('{"x":', '{"y":1}', "}", " \n", index=0, name="a")]
    assert fed == [None, None, None, ToolCall("a", {"x": {"y": 1}}), None]
    assert assembler.finish() == []
    assert assembler.num_malformed == 0


def test_an_empty_object_waits_for_the_end() -> None:
    assembler = CallAssembler()
    assert [assembler.feed(piece) for piece in texts("{", "}", index=0, name="a")] == [None] * 3
    assert assembler.finish() == [ToolCall("a", {})]


def test_a_placeholder_before_the_arguments_starts_nothing() -> None:
    assembler = CallAssembler()
    assert [assembler.feed(piece) for piece in texts("{}", '{"x":1}', index=0, name="a")] == [None] * 3
    assert assembler.finish() == []
    assert assembler.num_malformed == 1


def test_no_arguments_at_all_is_an_empty_object_once_the_choice_has_ended() -> None:
    assert assembled(texts(index=0, name="a")) == [ToolCall("a", {})]


@pytest.mark.parametrize("text", ['query = """select 1"""', "[1]", "null", '{"x":NaN}', "{x:1}", '{"x":1]'])
def test_what_is_no_object_is_malformed(text: str) -> None:
    assembler = CallAssembler()
    assert [assembler.feed(piece) for piece in texts(text, index=0, name="a")] == [None, None]
    assert assembler.finish() == []
    assert assembler.num_malformed == 1


def test_a_call_without_a_name_is_malformed() -> None:
    assembler = CallAssembler()
    assert assembler.feed(CallPiece(index=0, id="1", arguments='{"x":1}')) is None
    assert assembler.finish() == []
    assert assembler.num_malformed == 1


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([CallPiece(0, "", "a"), CallPiece(0, "1", "", '{"x":1}')], id="late id"),
        pytest.param([CallPiece(0, "1", "", '{"x":1}'), CallPiece(0, "", "a")], id="late name"),
        pytest.param([CallPiece(0, "1", "a", '{"x"'), CallPiece(0, "1", "a", ":1}")], id="head in each piece"),
        pytest.param([CallPiece(0, "1", "a", '{"x"'), CallPiece(0, "2", "", ":1}")], id="new id in each piece"),
        pytest.param([CallPiece(0, "1", "a", '{"x":1}'), CallPiece(0, "", "a")], id="name again at the end"),
        pytest.param([CallPiece(0, "1", "a", '{"x":1}'), CallPiece(0, "9", "")], id="another id at the end"),
        pytest.param([CallPiece(0, "1", "a"), CallPiece(None, "", "", '{"x":1}')], id="index only at first"),
        pytest.param([CallPiece(None, "1", "a"), CallPiece(0, "", "", '{"x":1}')], id="index only later"),
        pytest.param([CallPiece(None, "1", "a"), CallPiece(None, "1", "", '{"x":1}')], id="id in each piece"),
    ],
)
def test_dialects_of_one_call(pieces: list[CallPiece]) -> None:
    (call,) = assembled(pieces)
    assert (call.name, call.arguments) == ("a", {"x": 1})


def test_a_name_in_pieces_is_joined() -> None:
    pieces = [CallPiece(0, "1", "sea"), CallPiece(0, "", "rch"), CallPiece(0, "", "", '{"x":1}')]
    assert assembled(pieces) == [ToolCall("search", {"x": 1}, "1")]


@pytest.mark.parametrize("index", [0, None])
def test_calls_of_one_name_without_ids_under_one_index_are_told_apart_by_the_name(index: int | None) -> None:
    pieces = [*texts('{"x":', "1}", index=index, name="a"), *texts('{"x":', "2}", index=index, name="a")]
    assert assembled(pieces) == [ToolCall("a", {"x": 1}), ToolCall("a", {"x": 2})]


def test_a_name_repeated_after_its_call_does_not_run_into_the_next_name() -> None:
    pieces = [CallPiece(None, "", "a", '{"x":1}'), CallPiece(None, "", "a"), CallPiece(None, "", "b", '{"y":2}')]
    assert assembled(pieces) == [ToolCall("a", {"x": 1}), ToolCall("b", {"y": 2})]


def test_interleaved_calls_keep_their_own_pieces() -> None:
    pieces = [
        CallPiece(0, "1", "a"),
        CallPiece(1, "2", "b"),
        CallPiece(0, "", "", '{"x":'),
        CallPiece(1, "", "", '{"y":'),
        CallPiece(1, "", "", "2}"),
        CallPiece(0, "", "", "1}"),
    ]
    assert assembled(pieces) == [ToolCall("b", {"y": 2}, "2"), ToolCall("a", {"x": 1}, "1")]


def test_one_id_for_all_calls_does_not_merge_them() -> None:
    pieces = [CallPiece(0, "call_0", "a", '{"x":1}'), CallPiece(1, "call_0", "b", '{"x":2}')]
    assert [call.name for call in assembled(pieces)] == ["a", "b"]


def test_calls_beyond_all_bounds_are_dropped() -> None:
    pieces = [CallPiece(i, str(i), "a", '{"x":1}') for i in range(1000)]
    assert len(assembled(pieces)) == 128


heads = st.sampled_from(["separate", "merged", "repeated"])
calls_made = st.lists(st.tuples(st.sampled_from(["a", "b"]), json_objects(min_size=1)), min_size=1, max_size=4)


@settings(max_examples=60)
@given(calls_made, heads, st.sampled_from(["given", "missing", "shared"]), st.booleans(), st.data())
def test_any_split_in_any_dialect_gives_the_calls_in_order(
    made: list[tuple[str, dict[str, Any]]], head: str, indices: str, has_ids: bool, data: st.DataObject
) -> None:
    pieces = []
    for position, (name, arguments) in enumerate(made):
        index = {"given": position, "missing": None, "shared": 0}[indices]
        id_ = f"call_{position}" if has_ids else ""
        parts = data.draw(pieces_of(json.dumps(arguments)))
        if head == "separate":
            parts.insert(0, "")
        for number, text in enumerate(parts):
            has_head = number == 0 or head == "repeated"
            pieces.append(CallPiece(index, id_ if has_head else "", name if has_head else "", text))
    calls = assembled(pieces)
    assert [(call.name, call.arguments) for call in calls] == made
    assert [call.id for call in calls] == [f"call_{i}" if has_ids else None for i in range(len(made))]


@settings(max_examples=60)
@given(json_objects(min_size=1), st.data())
def test_no_strict_prefix_gives_a_call(arguments: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(arguments)
    prefix = text[: data.draw(st.integers(0, len(text) - 1))]
    assembler = CallAssembler()
    assert not any(assembler.feed(piece) for piece in texts(*data.draw(pieces_of(prefix)), index=0, name="a"))


@given(
    st.lists(
        st.builds(
            CallPiece, st.none() | st.integers(0, 2), *[st.sampled_from(["", "a", "b", "{}", '{"x":1}', "{", "}"])] * 3
        )
    )
)
def test_no_pieces_raise_and_each_call_is_given_once(pieces: list[CallPiece]) -> None:
    assembler = CallAssembler()
    early = [call for piece in pieces if (call := assembler.feed(piece)) is not None]
    late = assembler.finish()
    assert len(early) + len(late) + assembler.num_malformed <= len(pieces)
    assert assembler.finish() == []


def test_only_the_first_call_counts_whichever_closes_first() -> None:
    one, two = texts("{}", index=0, id="1", name="a"), texts('{"x":2}', index=1, id="2", name="b")
    assert assembled(one + two) == [ToolCall("b", {"x": 2}, "2"), ToolCall("a", {}, "1")]
    assert assembled(one + two, only_first=True) == [ToolCall("a", {}, "1")]


def test_pieces_of_later_calls_do_not_go_to_the_only_one() -> None:
    one, two = texts("{}", id="1", name="a"), texts('{"x":2}', id="2", name="b")
    assert assembled(one + two, only_first=True) == [ToolCall("a", {}, "1")]


@pytest.mark.parametrize("arguments", ["{", "[1]"])
def test_a_malformed_first_call_is_not_replaced(arguments: str) -> None:
    one, two = texts(arguments, index=0, name="a"), texts('{"x":2}', index=1, name="b")
    assert assembled(one + two, only_first=True) == []

"""Where a turn ends in the tokens of a sequence, and what its message is."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from spectool_core.vllm.answers import AnswerMessage, calls_of, event_data
from spectool_core.vllm.splitting import Piece, split

ENDS = frozenset({0, 1})


@given(st.lists(st.integers(0, 5)))
def test_pieces_are_the_whole_delta_and_end_exactly_at_end_tokens(token_ids: list[int]) -> None:
    pieces = list(split(token_ids, ENDS))

    assert [token for piece in pieces for token in token_ids[piece.start : piece.stop]] == token_ids
    assert [piece.ends_turn for piece in pieces if piece.ends_turn] == [True for token in token_ids if token in ENDS]
    for piece in pieces:
        inside = token_ids[piece.start : piece.stop]
        assert not set(inside[:-1]) & ENDS
        assert piece.ends_turn == bool(inside and inside[-1] in ENDS)


def test_an_empty_delta_is_one_empty_piece() -> None:
    assert list(split([], ENDS)) == [Piece(0, 0, ends_turn=False)]


def chunk(delta: dict[str, object], finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def test_a_message_is_put_together_from_chunks() -> None:
    answer = AnswerMessage()
    start = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather"}}
    for piece in (
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "I "}),
        chunk({"content": "look."}),
        chunk({"tool_calls": [start]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]}),
        chunk({"tool_calls": [{"index": 1, "id": "call_2", "function": {"name": "time", "arguments": ""}}]}),
        chunk({}, "tool_calls"),
        {"choices": [], "usage": {}},
    ):
        answer.add(piece)

    message = answer.as_dict()

    assert answer.finish_reason == "tool_calls"
    assert message["content"] == "I look."
    assert [call["id"] for call in message["tool_calls"]] == ["call_1", "call_2"]
    assert calls_of(message) == [("weather", {"city": "Rome"}), ("time", {})]


def test_a_whole_completion_gives_the_same_message() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}

    answer = AnswerMessage.of({"choices": [{"message": message, "finish_reason": "tool_calls"}]})

    assert (answer.as_dict(), answer.finish_reason) == (message, "tool_calls")


def test_calls_without_whole_arguments_are_none() -> None:
    for arguments in ("{", "[]", '"x"', '{"x": NaN}'):
        assert calls_of({"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}) is None
    assert calls_of({"role": "assistant", "content": "Sunny."}) is None


def test_an_answer_without_calls_is_its_text() -> None:
    answer = AnswerMessage()
    answer.add(chunk({"content": "Sunny."}, "stop"))

    assert answer.as_dict() == {"role": "assistant", "content": "Sunny."}
    assert not answer.has_calls


def test_data_is_read_from_events() -> None:
    assert event_data('data: {"id": 1}\n\n') == {"id": 1}
    assert event_data("data: [DONE]\n\n") is None
    assert event_data(": keep-alive\n\n") is None
    assert event_data(f"data: {json.dumps([1])}\n\n") is None

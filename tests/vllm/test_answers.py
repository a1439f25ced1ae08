from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spectool_core.vllm.answers import AnswerMessage, calls_of, single_pieces


def piece(index: int, name: str | None, arguments: str | None) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"index": index, "function": function, **({"id": f"call_{index}", "type": "function"} if name else {})}


def chunk(*pieces: dict[str, Any], finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    made = {**delta, **({"tool_calls": list(pieces)} if pieces else {})}
    return {"id": "r", "choices": [{"index": 0, "delta": made, "finish_reason": finish_reason}], "model": "m"}


def test_a_chunk_of_one_piece_or_none_is_left_as_it_is() -> None:
    for whole in (chunk(content="text"), chunk(piece(0, "f", "{}")), {"choices": [], "usage": {"total_tokens": 1}}):
        assert single_pieces(whole) == [whole]


def test_name_and_arguments_in_one_delta_become_two_chunks() -> None:
    name, arguments = piece(0, "f", None), piece(0, None, '{"x": 1}')
    assert single_pieces(chunk(name, arguments, role="assistant", finish_reason="tool_calls")) == [
        chunk(name, role="assistant"),
        chunk(arguments, finish_reason="tool_calls"),
    ]


def test_tokens_and_end_are_told_once() -> None:
    whole = chunk(piece(0, "f", None), piece(0, None, "{}"), finish_reason="tool_calls")
    whole["choices"][0] |= {"token_ids": [1, 2], "logprobs": {"content": ["one", "two"]}, "stop_reason": 7}

    first, last = (part["choices"][0] for part in single_pieces(whole))

    assert (first["token_ids"], first["logprobs"]["content"]) == ([1, 2], ["one", "two"])
    assert (first["finish_reason"], "stop_reason" in first) == (None, False)
    assert (last["token_ids"], last["logprobs"]) == ([], None)
    assert (last["finish_reason"], last["stop_reason"]) == ("tool_calls", 7)


PIECES = st.builds(piece, st.integers(0, 2), st.sampled_from(["f", None]), st.sampled_from(["{", "}", None]))


@given(pieces=st.lists(PIECES, max_size=6), end=st.sampled_from([None, "tool_calls"]))
def test_the_message_is_the_same(pieces: list[dict[str, Any]], end: str | None) -> None:
    whole = chunk(*pieces, finish_reason=end, content="so: ")
    before = copy.deepcopy(whole)
    parts = single_pieces(whole)
    assert whole == before
    assert all(len(part["choices"][0]["delta"].get("tool_calls", ())) <= 1 for part in parts)
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [end]
    one, several = AnswerMessage(), AnswerMessage()
    one.add(whole)
    for part in parts:
        several.add(part)
    assert (one.as_dict(), one.finish_reason) == (several.as_dict(), several.finish_reason)


def test_calls_without_a_key_are_none() -> None:
    def message(arguments: str) -> dict[str, Any]:
        return {"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    assert calls_of(message('{"x": "\\ud83d\\ude00"}')) == [("f", {"x": "\U0001f600"})]
    assert calls_of(message('{"x": "\\ud83d"}')) is None
    assert calls_of(message("[]")) is None
    assert calls_of({}) is None

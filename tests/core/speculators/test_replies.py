from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectool_core.calls import ToolCall
from spectool_core.speculators._choices import CallReader, ChoiceReader, TextReader
from spectool_core.speculators._events import EventLines
from spectool_core.speculators._replies import BodyReply, Reply, StreamReply, Usage
from tests.core.speculators.canned import call, chunk, completion, sse
from tests.core.speculators.strategies import json_values, pieces_of

NewReader = Callable[[], ChoiceReader]


def whole(body: Any, new_reader: NewReader = CallReader) -> tuple[BodyReply, list[ToolCall]]:
    reply = BodyReply(new_reader)
    return reply, reply.feed(json.dumps(body).encode()) + reply.end()


def streamed(data: bytes, new_reader: NewReader = CallReader) -> tuple[StreamReply, list[ToolCall]]:
    reply = StreamReply(new_reader)
    return reply, reply.feed(data) + reply.end()


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def test_a_completion_gives_the_calls_of_all_choices() -> None:
    reply, calls = whole(completion([call("a", '{"x":1}', id="1"), call("b")], [call("c")], usage=USAGE))
    assert calls == [ToolCall("a", {"x": 1}, "1"), ToolCall("b", {}), ToolCall("c", {})]
    assert reply.is_complete
    assert (reply.num_choices, reply.num_malformed_calls, reply.usage) == (2, 0, Usage(7, 3))


def test_a_malformed_call_takes_no_other_with_it() -> None:
    reply, calls = whole(completion([call("a", "{"), call("", '{"x":1}'), None, call("b", '{"x":2}')]))
    assert calls == [ToolCall("b", {"x": 2})]
    assert reply.num_malformed_calls == 3


def test_arguments_sent_as_the_object_itself_are_read() -> None:
    _, calls = whole(completion([{"function": {"name": "a", "arguments": {"x": [1, 2**70]}}}]))
    assert calls == [ToolCall("a", {"x": [1, 2**70]})]


def test_a_completion_cut_short_keeps_what_had_closed() -> None:
    body = completion([call("a", '{"x":1}'), call("b", "")])
    body["choices"][0]["finish_reason"] = "length"
    reply, calls = whole(body)
    assert calls == [ToolCall("a", {"x": 1})]
    assert reply.num_malformed_calls == 1


@pytest.mark.parametrize("body", [None, [], "x", {}, {"choices": None}, {"choices": []}, {"error": {"message": "no"}}])
def test_what_is_no_completion_is_not_complete(body: Any) -> None:
    reply, calls = whole(body)
    assert calls == []
    assert not reply.is_complete


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe\x00", b"<html>", b"[" * 100_000, b'{"x":' * 100_000])
@pytest.mark.parametrize("kind", [BodyReply, StreamReply])
def test_what_is_no_json_is_not_complete(kind: type[BodyReply | StreamReply], body: bytes) -> None:
    reply: Reply = kind()
    assert reply.feed(b"data: " + body + b"\n\n" if kind is StreamReply else body) + reply.end() == []
    assert not reply.is_complete


def test_a_streamed_call_comes_before_its_message_ends() -> None:
    reply = StreamReply()
    assert reply.feed(sse(chunk(call("a", '{"x":', index=0, id="1")), done=False)) == []
    assert reply.feed(sse(chunk({"index": 0, "function": {"arguments": "1}"}}), done=False)) == [
        ToolCall("a", {"x": 1}, "1")
    ]
    assert not reply.is_complete
    assert reply.feed(sse(chunk(finish="tool_calls"), {"choices": [], "usage": USAGE})) == []
    assert reply.is_complete
    assert reply.usage == Usage(7, 3)


def test_choices_are_put_together_apart() -> None:
    reply, calls = streamed(
        sse(
            chunk(call("a", '{"x":', index=0), index=0),
            chunk(call("b", '{"y":', index=0), index=1),
            chunk({"index": 0, "function": {"arguments": "1}"}}, index=1),
            chunk({"index": 0, "function": {"arguments": "2}"}}, index=0),
        )
    )
    assert calls == [ToolCall("b", {"y": 1}), ToolCall("a", {"x": 2})]
    assert reply.num_choices == 2


@pytest.mark.parametrize("end", [sse(chunk(finish="tool_calls"), done=False), sse(), sse(chunk(finish="whatever"))])
def test_a_finish_reason_or_done_completes_a_call_without_arguments(end: bytes) -> None:
    reply, calls = streamed(sse(chunk(call("a", "", index=0)), done=False) + end)
    assert calls == [ToolCall("a", {})]
    assert reply.is_complete


def test_a_stream_that_was_cut_completes_nothing() -> None:
    reply, calls = streamed(sse(chunk(call("a", "{}", index=0)), done=False))
    assert calls == []
    assert not reply.is_complete


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_a_choice_that_was_cut_short_completes_nothing(reason: str) -> None:
    reply, calls = streamed(sse(chunk(call("a", "", index=0)), chunk(finish=reason)))
    assert calls == []
    assert reply.num_malformed_calls == 1


@pytest.mark.parametrize("finish", ["", None, False])
def test_an_empty_finish_reason_is_none(finish: Any) -> None:
    _, calls = streamed(sse(chunk(call("a", "", index=0), finish=finish), done=False))
    assert calls == []


@pytest.mark.parametrize(
    "event",
    [
        b"{",
        b"[]",
        b"null",
        b'{"error": {"message": "out of memory"}}',
        b'{"choices": 1}',
        b'{"choices": [1]}',
        b'{"choices": [{"delta": {"tool_calls": {}}}]}',
        b'{"choices": [{"delta": {"tool_calls": [1]}}]}',
        b'{"choices": [{"delta": {"tool_calls": [{"index": 0, "function": 1}]}}]}',
    ],
)
def test_after_an_event_that_is_no_chunk_nothing_is_completed(event: bytes) -> None:
    """Else `{"x":1`, a lost `2`, `}` would run a call that nobody made."""
    parts = [
        sse(chunk(call("a", '{"x":1', index=0)), done=False),
        b"data: " + event + b"\n\n",
        sse(chunk({"index": 0, "function": {"arguments": "}"}}, finish="tool_calls")),
    ]
    reply, calls = streamed(b"".join(parts))
    assert calls == []
    assert not reply.is_complete

    in_parts = StreamReply()
    assert [call for part in parts for call in in_parts.feed(part)] + in_parts.end() == []
    assert not in_parts.is_complete


def test_too_many_choices_break_the_stream() -> None:
    reply, _ = streamed(sse(*(chunk(index=i) for i in range(1000))))
    assert not reply.is_complete


def test_events_end_with_an_empty_line_whatever_the_line_ends_and_comments() -> None:
    lines = EventLines()
    assert lines.feed(b": hello\r\n\r\nevent: x\r\ndata: 1\r\n\r\ndata:2\ndata: 3\n\nid: 5\n\ndata: 4") == [
        b"1",
        b"2\n3",
    ]
    assert lines.feed(b"\n") == []
    assert lines.feed(b"\r\n") == [b"4"]


@given(st.lists(json_values(), max_size=3), st.data())
def test_any_split_of_the_bytes_gives_the_same_events(values: list[Any], data: st.DataObject) -> None:
    stream = sse(*values)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    lines = EventLines()
    events = [e for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) for e in lines.feed(stream[a:b])]
    assert [json.loads(event) for event in events[:-1]] == values


words = st.sampled_from(
    ["choices", "delta", "message", "content", "text", "type", "tool_calls", "function", "name", "arguments", "index",
     "id", "usage", "prompt_tokens", "completion_tokens", "finish_reason", "error"]
)  # fmt: skip
near_misses = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just('{"x":1}'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=5),
    max_leaves=24,
)


def read_text(text: str) -> list[ToolCall]:
    return [ToolCall(text, {})]


readers = pytest.mark.parametrize("new_reader", [CallReader, partial(TextReader, read_text)], ids=["calls", "text"])


@readers
@given(near_misses)
def test_no_json_makes_a_completion_raise(new_reader: NewReader, body: Any) -> None:
    whole(body, new_reader)


@readers
@given(st.lists(near_misses, max_size=4))
def test_no_json_makes_a_stream_raise(new_reader: NewReader, events: list[Any]) -> None:
    streamed(sse(*events), new_reader)


@readers
@given(near_misses, near_misses, near_misses)
def test_no_json_in_the_right_places_raises(new_reader: NewReader, entry: Any, finish: Any, index: Any) -> None:
    for content in (entry, [entry], [{"type": "text", "text": entry}]):
        message = {"tool_calls": [entry], "content": content}
        choice = {"delta": message, "message": message, "finish_reason": finish, "index": index}
        whole({"choices": [choice], "usage": entry}, new_reader)
        streamed(sse({"choices": [choice], "usage": entry}), new_reader)


@given(st.text(min_size=1), st.data())
def test_any_split_of_a_text_is_read_as_the_whole(text: str, data: st.DataObject) -> None:
    new_reader = partial(TextReader, read_text)
    deltas = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in data.draw(pieces_of(text))]
    _, calls = streamed(sse(*deltas, chunk(finish="stop")), new_reader)
    assert calls == ([ToolCall(text, {})] if text.strip() else [])
    _, calls = whole({"choices": [{"message": {"content": text}}]}, new_reader)
    assert calls == ([ToolCall(text, {})] if text.strip() else [])


@given(st.binary())
def test_no_bytes_make_a_reply_raise(data: bytes) -> None:
    for reply in (BodyReply(), StreamReply()):
        reply.feed(data)
        reply.feed(b"\n\n")
        reply.end()


def test_nesting_at_the_parsers_limit_does_not_raise() -> None:
    for depth in range(150, 1200, 50):
        nested = b'{"x":' * depth + b"1" + b"}" * depth
        body = b'{"choices":[{"message":{"tool_calls":[{"function":{"name":"a","arguments":' + nested + b"}}]}}]}"
        reply = BodyReply()
        reply.feed(body)
        assert reply.end() == []

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectool_core.engine.server_events import EventSplitter, MalformedStreamError, ServerEvent

NAMES = st.sampled_from(["", "spectool.turn", "spectool.injected"])
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
ENDS = st.sampled_from(["\n", "\r\n"])


@given(st.lists(st.tuples(NAMES, DATA, ENDS), max_size=6), st.lists(st.integers(1, 40), max_size=30))
def test_events_are_whole_however_the_bytes_come(events: list[tuple[str, object, str]], cuts: list[int]) -> None:
    pieces = []
    for name, data, end in events:
        head = f"event: {name}{end}" if name else ""
        pieces.append(f"{head}data: {json.dumps(data, ensure_ascii=False)}{end}{end}".encode())
    stream = b"".join(pieces)
    splitter, got, at = EventSplitter(), [], 0
    for size in [*cuts, len(stream)]:
        got += splitter.feed(stream[at : at + size])
        at += size
    assert [(event.name, json.loads(event.data)) for event in got] == [(name, data) for name, data, _ in events]
    assert b"".join(event.raw for event in got) + splitter.rest == stream


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\x85"])
def test_what_is_a_line_end_to_python_alone_is_text(text: str) -> None:
    """JSON need not escape it, and vLLM does not."""
    (event,) = EventSplitter().feed(f'data: {{"content": "a{text}b"}}\n\n'.encode())
    assert event.parsed() == {"content": f"a{text}b"}


def test_what_has_not_ended_is_kept() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b": ping\n\ndata: [DO") == [ServerEvent("", "", b": ping\n\n")]
    assert splitter.rest == b"data: [DO"
    assert [event.is_done for event in splitter.feed(b"NE]\n\n")] == [True]


@pytest.mark.parametrize("data", ["", "nothing", "[1]", '"text"', "[" * 100_000])
def test_data_that_is_no_object_is_malformed(data: str) -> None:
    with pytest.raises(MalformedStreamError):
        ServerEvent("spectool.turn", data, b"").parsed()

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectool_core.vllm.injection import (
    Continuation,
    Finish,
    Inject,
    Park,
    Plan,
    TurnEnd,
    computed_frontier,
    draft,
    find,
    turn_end,
)

PLAN = Plan(keys=("a",), call_ids=(1, 2, 3, 9), suffix_ids=(7, 8))
ROOM: dict[str, Any] = {"num_tokens": 10, "num_left": 5, "max_model_len": 100, "may_park": True}

tokens = st.lists(st.integers(0, 3), max_size=30)


@pytest.mark.parametrize(
    ("keys", "plans", "expected", "room", "end"),
    [
        (["a"], [PLAN], [], {}, Inject(Continuation((7, 8), 5))),
        (["a"], [Plan(("a",), (), (7,), max_tokens=50)], [], {}, Inject(Continuation((7,), 50))),
        (["a"], [PLAN], ["a"], {"num_left": 0}, Finish("max_tokens")),
        (["a"], [PLAN], [], {"max_model_len": 13}, Inject(Continuation((7, 8), 5))),
        (["a"], [PLAN], [], {"max_model_len": 12}, Finish("max_model_len")),
        (["b"], [PLAN], ["a"], {}, Finish("not_cached")),
        (["a", "a"], [PLAN], [], {}, Finish("not_cached")),
        (["a", "b"], [PLAN, Plan(("b", "a"), (), ())], ["a", "b"], {}, Park()),
        (["a", "b"], [Plan(("a", "b"), (), (4,))], [], {}, Inject(Continuation((4,), 5))),
        (["b"], [], ["b"], {"may_park": False}, Finish("too_many_parked")),
    ],
)
def test_how_a_turn_ends(
    keys: list[str], plans: list[Plan], expected: list[str], room: dict[str, Any], end: TurnEnd
) -> None:
    assert turn_end(keys, plans, expected, **{**ROOM, **room}) == end


@given(sequence=tokens, marker=tokens, start=st.integers(-2, 35))
def test_a_marker_is_found_where_a_search_by_hand_finds_it(sequence: list[int], marker: list[int], start: int) -> None:
    places = [
        index
        for index in range(max(start, 0), len(sequence))
        if marker and sequence[index : index + len(marker)] == marker
    ]
    assert find(sequence, marker, start) == (places[0] if places else -1)


def test_drafts_go_on_from_what_is_written() -> None:
    latest = Plan(("b",), (1, 2, 4, 9), ())
    assert draft([1, 2], [latest, PLAN], limit=8) == [4, 9]
    assert draft([1, 2, 3], [latest, PLAN], limit=8) == [9]
    assert draft([1], [latest, PLAN], limit=2) == [2, 4]
    assert draft([1, 5], [latest, PLAN], limit=8) == []
    assert draft([1, 2, 3, 9], [PLAN], limit=8) == [], "the call is whole"


@pytest.mark.parametrize(
    ("num_computed", "num_placeholders", "num_tokens", "frontier"),
    [
        (9, 0, 10, 9),  # an ordinary stop: the end token's KV is not computed
        (10, 0, 10, 9),  # accepted as a draft
        (14, 0, 10, 9),  # drafts beyond the end token
        (11, 2, 10, 9),  # a step in flight
        (4, 0, 10, 4),
    ],
)
def test_what_is_computed_of_a_stopped_sequence(
    num_computed: int, num_placeholders: int, num_tokens: int, frontier: int
) -> None:
    assert computed_frontier(num_computed, num_placeholders, num_tokens) == frontier

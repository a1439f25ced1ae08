from __future__ import annotations

import uuid
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectool_core.engine.routing import replica_of

names = st.lists(st.text(min_size=1), min_size=1, max_size=8, unique=True)


@given(replicas=names, request_id=st.text(), data=st.data())
def test_a_post_goes_where_its_chat_request_went(replicas: list[str], request_id: str, data: st.DataObject) -> None:
    other_order = data.draw(st.permutations(replicas))
    assert replica_of(request_id, replicas) == replica_of(f"chatcmpl-{request_id}", other_order)


@given(replicas=names, request_id=st.text(), gone=st.integers(0, 7))
def test_a_replica_that_goes_moves_only_its_own_responses(replicas: list[str], request_id: str, gone: int) -> None:
    holder = replica_of(request_id, replicas)
    left = [name for name in replicas if name != replicas[gone % len(replicas)]]
    if left and holder in left:
        assert replica_of(request_id, left) == holder


def test_responses_are_spread_evenly() -> None:
    replicas = ["one", "two", "three", "four"]
    counts = Counter(replica_of(uuid.uuid5(uuid.NAMESPACE_URL, str(number)).hex, replicas) for number in range(4000))
    assert all(850 < counts[replica] < 1150 for replica in replicas)


def test_without_replicas_there_is_none() -> None:
    with pytest.raises(ValueError, match="empty"):
        replica_of("1", [])

"""One engine sequence is several turns: where one ends in a list of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Piece", "split"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of one turn, as a range of a delta.

    Args:
        start: the first index.
        stop: one past the last.
        ends_turn: whether the last of them ends the turn.
    """

    start: int
    stop: int
    ends_turn: bool


def split(token_ids: Sequence[int], end_ids: Collection[int]) -> Iterator[Piece]:
    """Cut a delta behind each end token; vLLM merges deltas that are not fetched in time, also over turns.

    An empty delta is one empty piece.
    """
    start = 0
    for index, token_id in enumerate(token_ids):
        if token_id in end_ids:
            yield Piece(start, index + 1, ends_turn=True)
            start = index + 1
    if start < len(token_ids) or not token_ids:
        yield Piece(start, len(token_ids), ends_turn=False)

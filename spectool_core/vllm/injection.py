"""What is done at the end of a turn, and which tokens are drafted in it: pure functions over token lists."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from spectool_core.vllm.wire import RefusalReason

__all__ = [
    "Continuation",
    "Finish",
    "Inject",
    "Park",
    "Plan",
    "TurnEnd",
    "computed_frontier",
    "continuation_or_finish",
    "draft",
    "find",
    "turn_end",
]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a turn that makes exactly the calls `keys`, in this order, goes on.

    Args:
        keys: call keys, see `wire.call_key`.
        call_ids: the tokens of those calls as the chat template writes them, from the start marker through the token
            that ends the turn; draft tokens for it.
        suffix_ids: the tokens between the turn's end and the next turn's first: the tool output and the next header.
        turn: the one turn in which the plan holds; None for any.
        max_tokens: the next turn's budget; None where one budget spans all turns.
    """

    keys: tuple[str, ...]
    call_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    turn: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens by which a sequence goes on, and how many the model may then write."""

    suffix_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Inject:
    """The sequence goes on at once."""

    continuation: Continuation


@dataclass(frozen=True, slots=True)
class Park:
    """Each call is cached or pending: the sequence waits, and keeps its KV blocks."""


@dataclass(frozen=True, slots=True)
class Finish:
    """An ordinary finish; the calls go to the client."""

    reason: RefusalReason


TurnEnd: TypeAlias = Inject | Park | Finish


def turn_end(
    keys: Sequence[str],
    plans: Iterable[Plan],
    expected: Collection[str],
    *,
    num_tokens: int,
    num_left: int,
    max_model_len: int,
    may_park: bool,
) -> TurnEnd:
    """Decide how a turn that made the calls `keys` ends.

    Args:
        keys: the turn's call keys in order; at least one.
        plans: those that hold in this turn.
        expected: the call keys that are cached or pending in it.
        num_tokens: the sequence's length, its end token included.
        num_left: tokens left of a budget that spans all turns.
        max_model_len: the longest sequence that the engine holds.
        may_park: whether one more sequence may be parked.
    """
    for plan in plans:
        if plan.keys == tuple(keys):
            max_tokens = num_left if plan.max_tokens is None else plan.max_tokens
            return continuation_or_finish(
                plan.suffix_ids, max_tokens, num_tokens=num_tokens, max_model_len=max_model_len
            )
    if not all(key in expected for key in keys):
        return Finish("not_cached")
    return Park() if may_park else Finish("too_many_parked")


def continuation_or_finish(
    suffix_ids: Sequence[int], max_tokens: int, *, num_tokens: int, max_model_len: int
) -> Inject | Finish:
    """Go on by `suffix_ids` if the sequence then still has room for a token of the model's."""
    if max_tokens < 1:
        return Finish("max_tokens")
    if num_tokens + len(suffix_ids) + 1 > max_model_len:
        return Finish("max_model_len")
    return Inject(Continuation(tuple(suffix_ids), max_tokens))


def find(sequence: Sequence[int], marker: Sequence[int], start: int = 0) -> int:
    """The first index from `start` at which `marker` stands in `sequence`; -1 if it does not."""
    size = len(marker)
    if size == 0:
        return -1
    for index in range(max(start, 0), len(sequence) - size + 1):
        if sequence[index] == marker[0] and tuple(sequence[index : index + size]) == tuple(marker):
            return index
    return -1


def draft(written: Sequence[int], plans: Iterable[Plan], *, limit: int) -> list[int]:
    """The tokens by which a plan goes on from what the turn has written, from its start marker on.

    Args:
        written: the turn's tokens from the start marker of its call.
        plans: the latest first; the first that agrees with `written` is taken.
        limit: the most tokens to return.
    """
    begun = tuple(written)
    for plan in plans:
        if len(plan.call_ids) > len(begun) and plan.call_ids[: len(begun)] == begun:
            return list(plan.call_ids[len(begun) : len(begun) + limit])
    return []


def computed_frontier(num_computed: int, num_placeholders: int, num_tokens: int) -> int:
    """How many of a stopped sequence's tokens have KV that can be kept.

    vLLM up to 0.32 leaves `num_computed_tokens` beyond the trimmed end where draft tokens after the end token were
    accepted; the last token is always computed again, since its logits are not wanted, but its KV is.
    """
    return min(num_computed - num_placeholders, num_tokens - 1)

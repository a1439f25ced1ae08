"""What the engine core knows of each response: its turns, and what has been posted for them. No vLLM, no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from cachetools import LRUCache

from spectool_core.vllm.injection import Plan, draft, find
from spectool_core.vllm.wire import RefusalReason, call_key

__all__ = [
    "CallReader",
    "EndedTurn",
    "Response",
    "ResponseState",
    "Responses",
    "TurnRecord",
    "keys_of",
    "response_ids_of",
]

ResponseState = Literal["early", "running", "parked", "finished"]
TurnOutcome: TypeAlias = Literal["injected", "parked", "resumed", "released", "finished"]

# vLLM names a request after the response, "-" and as many random characters.
_SUFFIX_LENGTH = 8


class CallReader(Protocol):
    """Reads calls out of a turn's tokens, as a format of `formats` does; `tokenizer` is the model's."""

    def start_ids(self, tokenizer: Any) -> Sequence[int]:
        """The tokens with which every call begins; empty where there are none such."""
        ...

    def read_calls(self, token_ids: Sequence[int], tokenizer: Any) -> Sequence[tuple[str, Any]] | None:
        """The (name, arguments) of each call in order, or None where that is not certain."""
        ...


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """How one turn ended.

    Args:
        turn: its number, from 1.
        outcome: what was done.
        keys: the call keys of the turn.
        reason: why it was finished; empty otherwise.
        num_tokens: the turn's own tokens.
    """

    turn: int
    outcome: TurnOutcome
    keys: tuple[str, ...]
    reason: RefusalReason | Literal[""]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """How the engine ended a turn, as its sequence tells it to the API server.

    Args:
        outcome: "injected" has gone on; "parked" waits for `resume` or `release`; "finished" is over.
        keys: the turn's call keys; None where only the API server reads calls.
        reason: why it was finished; None where the engine does not know.
    """

    outcome: Literal["injected", "parked", "finished"]
    keys: tuple[str, ...] | None = None
    reason: RefusalReason | None = None


@dataclass(slots=True)
class Response:
    """One announced response.

    Args:
        end_ids: the tokens that may end a turn which holds calls.

    Attributes:
        plans: those of the current turn and later ones, by turn and call keys.
        expected: the call keys that are cached or pending, by the one turn in which they are.
        has_posts: whether anything has been posted for it so far, withdrawn or not.
    """

    end_ids: frozenset[int]
    state: ResponseState = "early"
    request_id: str | None = None
    turn: int = 1
    plans: dict[tuple[int | None, tuple[str, ...]], Plan] = field(default_factory=dict)
    expected: dict[int | None, frozenset[str]] = field(default_factory=dict)
    records: list[TurnRecord] = field(default_factory=list)
    has_posts: bool = False
    _scanned: int = 0
    _start: int = -1

    def add(self, plan: Plan) -> None:
        """Take a plan; a later one for the same calls replaces an earlier one."""
        self.has_posts = True
        key = (plan.turn, plan.keys)
        self.plans.pop(key, None)
        if self._is_to_come(plan.turn):
            self.plans[key] = plan

    def expect(self, keys: frozenset[str], turn: int | None) -> None:
        """These call keys are cached or pending in `turn` from now on, None for any; plans of others are dropped."""
        self.has_posts = True
        gone = self.expected.pop(turn, frozenset()) - keys
        if keys and self._is_to_come(turn):
            self.expected[turn] = keys
        if gone:
            self.plans = {place: plan for place, plan in self.plans.items() if gone.isdisjoint(plan.keys)}

    def _is_to_come(self, turn: int | None) -> bool:
        return turn is None or turn >= self.turn

    def current_plans(self) -> Iterator[Plan]:
        """The plans that hold in this turn, the latest first."""
        return (plan for plan in reversed(self.plans.values()) if plan.turn in (None, self.turn))

    def currently_expected(self) -> frozenset[str]:
        """The call keys that are cached or pending in this turn."""
        return self.expected.get(None, frozenset()) | self.expected.get(self.turn, frozenset())

    def draft(self, output: Sequence[int], start_ids: Sequence[int], limit: int) -> list[int]:
        """The draft tokens that go on from the turn's `output` so far; none before its call's start marker."""
        if self._start < 0:
            self._start = find(output, start_ids, self._scanned)
            self._scanned = max(0, len(output) - len(start_ids) + 1)
        if self._start < 0:
            return []
        return draft(output[self._start :], self.current_plans(), limit=limit)

    def record(
        self, outcome: TurnOutcome, keys: Sequence[str], num_tokens: int, reason: RefusalReason | Literal[""] = ""
    ) -> None:
        """Note how the current turn ended; the end of a parked turn replaces its record."""
        if self.records and self.records[-1].turn == self.turn:
            parked = self.records.pop()
            keys, num_tokens = parked.keys, parked.num_tokens
        self.records.append(TurnRecord(self.turn, outcome, tuple(keys), reason, num_tokens))

    def next_turn(self) -> None:
        """The sequence goes on."""
        self.state = "running"
        self.turn += 1
        self.plans = {place: plan for place, plan in self.plans.items() if self._is_to_come(plan.turn)}
        self.expected = {turn: keys for turn, keys in self.expected.items() if self._is_to_come(turn)}
        self._scanned, self._start = 0, -1


class Responses:
    """The announced responses of one engine core, by response id and by vLLM's request id.

    Args:
        max_responses: how many are kept that do not run yet, or no more; the longest unused go first.
    """

    def __init__(self, max_responses: int) -> None:
        self._early: LRUCache[str, Response] = LRUCache(max_responses)
        self._finished: LRUCache[str, Response] = LRUCache(max_responses)
        self._running: dict[str, Response] = {}
        self._ids: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._early) + len(self._finished) + len(self._running)

    def announce(self, response_id: str, end_ids: Collection[int]) -> Response:
        """A chat request with this id is about to come, or has come; announced twice it is the same response."""
        known = self.get(response_id)
        if known is None or known.state == "finished":
            self._finished.pop(response_id, None)
            known = self._early[response_id] = Response(frozenset(end_ids))
        return known

    def get(self, response_id: str) -> Response | None:
        """The response with this id, if it was announced and is not forgotten."""
        return self._running.get(response_id) or self._early.get(response_id) or self._finished.get(response_id) or None

    def of_request(self, request_id: str) -> Response | None:
        """The running response whose sequence vLLM calls `request_id`."""
        response_id = self._ids.get(request_id)
        return None if response_id is None else self._running[response_id]

    def running(self) -> Iterator[Response]:
        """All responses that have a sequence."""
        return iter(self._running.values())

    def begin(self, request_id: str) -> Response | None:
        """The engine takes a request; returns its response, if it was announced."""
        if request_id in self._ids:
            return self._running[self._ids[request_id]]
        for response_id in response_ids_of(request_id):
            response = self._early.pop(response_id, None)
            if response is not None:
                response.state, response.request_id = "running", request_id
                self._running[response_id] = response
                self._ids[request_id] = response_id
                return response
        return None

    def end(self, request_id: str) -> None:
        """The engine has freed the request; what was posted for it is dropped, what became of it kept."""
        response_id = self._ids.pop(request_id, None)
        if response_id is None:
            return
        response = self._running.pop(response_id)
        if response.state == "parked" and response.records[-1].outcome == "parked":
            response.record("finished", (), 0, "aborted")
        response.state = "finished"
        response.plans.clear()
        response.expected.clear()
        self._finished[response_id] = response


def response_ids_of(request_id: str) -> tuple[str, str]:
    """What the response may be called whose sequence vLLM calls `request_id`."""
    return request_id, request_id[: -_SUFFIX_LENGTH - 1]


def keys_of(calls: Sequence[tuple[str, Any]], key: Callable[[str, Any], str] = call_key) -> tuple[str, ...] | None:
    """The call keys of `calls`; None where one of them has none (NaN, an object that is no JSON)."""
    try:
        return tuple(key(name, arguments) for name, arguments in calls)
    except (TypeError, ValueError):
        return None

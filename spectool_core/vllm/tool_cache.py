"""What has been posted for each running response, on the API server's side: bounded, secret, and without any IO."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from cachetools import TTLCache

from spectool_core.vllm.wire import (
    MAX_ENTRIES,
    MAX_OUTPUT_BYTES,
    SECRET_HEADER,
    RefusalReason,
    ToolOutput,
    WireError,
    call_key,
    output_text,
)

__all__ = ["CachedResponse", "Entry", "Injected", "Limits", "ToolCache"]

DEFAULT_KEEP_ALIVE_S = 60.0
_MAX_DETAIL = 1000

_Place: TypeAlias = tuple[int | None, str]
"""The turn in which an entry counts, if it is one, and its call key."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds.

    Args:
        max_responses: responses that run at once and may be posted to; as many finished ones are remembered.
        max_entries: entries of one response.
        max_output_bytes: bytes of one output, as it is injected.
        max_bytes: bytes of all entries of all responses.
    """

    max_responses: int = 1024
    max_entries: int = MAX_ENTRIES
    max_output_bytes: int = MAX_OUTPUT_BYTES
    max_bytes: int = 1 << 28

    @property
    def max_body_bytes(self) -> int:
        """Bytes of one post."""
        return 2 * self.max_output_bytes + (1 << 16)


@dataclass(frozen=True, slots=True)
class Entry:
    """A call, and its output once that has come.

    Args:
        key: see `wire.call_key`.
        text: the output as it is injected; None while it is pending.
        turn: the one turn in which it counts; None for any.
        expires_s: when it stops counting, on the cache's clock.
    """

    name: str
    params: dict[str, Any]
    key: str
    text: str | None
    turn: int | None
    expires_s: float

    @property
    def state(self) -> Literal["cached", "pending"]:
        """Whether the output is there."""
        return "pending" if self.text is None else "cached"

    @property
    def num_bytes(self) -> int:
        """What the entry is counted as."""
        return len(self.key.encode()) * 2 + len((self.text or "").encode())


@dataclass(frozen=True, slots=True)
class Injected:
    """A call whose output the engine went on from."""

    name: str
    params: dict[str, Any]
    output: str
    tool_call_id: str

    def as_dict(self) -> dict[str, Any]:
        """As it is sent."""
        return {"name": self.name, "params": self.params, "output": self.output, "tool_call_id": self.tool_call_id}


@dataclass(slots=True, eq=False)
class CachedResponse:
    """One response that may be posted to.

    Args:
        id: the response id.
        digest: of its secret.
        on_change: called when an entry comes, completes or goes.
    """

    id: str
    digest: bytes
    state: Literal["running", "parked", "finished"] = "running"
    turn: int = 1
    entries: dict[_Place, Entry] = field(default_factory=dict)
    injected: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=256))
    refused: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=256))
    on_change: Callable[[], None] | None = None
    num_bytes: int = 0

    def refuse(self, turn: int, reason: RefusalReason, detail: str = "") -> None:
        """Note why a turn was not gone on from, or an output not used; `detail` says more than the reason."""
        # Templates may raise what they were given, which is as large as an output.
        noted = {"turn": turn, "reason": reason, **({"detail": detail[:_MAX_DETAIL]} if detail else {})}
        if noted not in self.refused:
            self.refused.append(noted)

    def status(self, now_s: float) -> dict[str, Any]:
        """What `GET` says."""
        entries = [
            {"name": entry.name, "params": entry.params, "state": entry.state, "turn": entry.turn}
            for entry in self.entries.values()
            if entry.expires_s > now_s
        ]
        return {
            "response_id": self.id,
            "state": self.state,
            "turn": self.turn,
            "entries": entries,
            "injected": list(self.injected),
            "refused": list(self.refused),
        }


class ToolCache:
    """The responses of one API server.

    Args:
        limits: upper bounds.
        clock: seconds, monotonic.
    """

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.clock = clock
        self._running: dict[str, CachedResponse] = {}
        self._finished: TTLCache[str, CachedResponse] = TTLCache(limits.max_responses, ttl=60.0, timer=clock)
        self._num_bytes = 0
        self._nobody = secrets.token_bytes(32)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return self._num_bytes

    @property
    def is_full(self) -> bool:
        """Whether no further response can be posted to."""
        return len(self._running) >= self.limits.max_responses

    def check_new(self, response_id: str) -> None:
        """Check that no response with this id runs.

        Raises:
            WireError: 409.
        """
        if response_id in self._running:
            raise WireError(409, "a response with this id is running", "duplicate_id")

    def begin(self, response_id: str, secret: str) -> CachedResponse:
        """A chat request that may be posted to has come.

        Raises:
            WireError: 409 if its id runs already, 422 for a secret that is too short or too long, 503 if too many run.
        """
        if not 16 <= len(secret) <= 256:
            told = f"{SECRET_HEADER}: {len(secret)} characters; allowed: 16 to 256"
            raise WireError(422, told, "invalid_secret", SECRET_HEADER)
        self.check_new(response_id)
        if self.is_full:
            allowed = self.limits.max_responses
            raise WireError(503, f"{len(self)} responses with a tool cache are running; allowed: {allowed}", "full")
        self._finished.pop(response_id, None)
        response = self._running[response_id] = CachedResponse(response_id, _digest(secret))
        return response

    def end(self, response: CachedResponse) -> None:
        """The response has ended: its entries go, what became of it is remembered for a minute."""
        if self._running.get(response.id) is not response:
            return
        del self._running[response.id]
        self._num_bytes -= response.num_bytes
        response.entries.clear()
        response.num_bytes = 0
        response.state, response.on_change = "finished", None
        self._finished[response.id] = response

    def find(self, response_id: str, secret: str | None, *, may_be_finished: bool = False) -> CachedResponse:
        """The response with this id, for whoever knows its secret.

        Raises:
            WireError: 404 for an unknown id and for a wrong secret, in the same words and time; 409 if it has finished.
        """
        response = self._running.get(response_id) or self._finished.get(response_id)
        expected = self._nobody if response is None else response.digest
        if not secrets.compare_digest(_digest(secret or ""), expected) or response is None:
            raise WireError(404, "no response with this id and secret", "unknown_response")
        if not may_be_finished:
            _check_unfinished(response)
        return response

    def post(self, response: CachedResponse, outputs: Iterable[ToolOutput]) -> int:
        """Take entries, all or none; returns how many were taken, of which there are none for earlier turns.

        An output that is there stays what it is until it expires: the engine may have gone on from it. An output that
        is refused withdraws what was announced as pending, which nobody should wait for.

        Raises:
            WireError: 409 if it has finished, 413 for an output that is too large, 503 if there is no room.
        """
        _check_unfinished(response)
        outputs = list(outputs)
        try:
            return self._take(response, outputs)
        except WireError:
            refused = [(output.turn, call_key(output.name, output.params)) for output in outputs if not output.pending]
            self._withdraw(response, [place for place in refused if place in response.entries])
            raise

    def begin_turn(self, response: CachedResponse, turn: int) -> None:
        """A turn begins: entries of earlier ones count no longer."""
        response.turn = turn
        self.drop_stale(response)

    def drop_stale(self, response: CachedResponse) -> None:
        """Drop the entries that count no longer: the expired ones, and those of earlier turns."""
        kept = self._counting(response)
        if len(kept) < len(response.entries):
            self._replace(response, kept)

    def entries_in(self, response: CachedResponse, turn: int) -> dict[str, Entry]:
        """What counts in a turn, by call key; an entry for this very turn goes before one for any."""
        counting = self._counting(response).values()
        anyway = {entry.key: entry for entry in counting if entry.turn is None}
        return anyway | {entry.key: entry for entry in counting if entry.turn == turn}

    def _counting(self, response: CachedResponse) -> dict[_Place, Entry]:
        now_s = self.clock()
        return {
            place: entry
            for place, entry in response.entries.items()
            if entry.expires_s > now_s and (entry.turn is None or entry.turn >= response.turn)
        }

    def _withdraw(self, response: CachedResponse, places: Iterable[_Place]) -> None:
        pending = {place for place in places if response.entries[place].text is None}
        if pending:
            self._replace(response, {place: kept for place, kept in response.entries.items() if place not in pending})

    def _take(self, response: CachedResponse, outputs: Sequence[ToolOutput]) -> int:
        for index, output in enumerate(outputs):
            size = len(output_text(output.output).encode())
            if size > self.limits.max_output_bytes:
                told = f"{index}.output: {size} bytes; allowed: {self.limits.max_output_bytes}"
                raise WireError(413, told, "too_large", f"{index}.output")
        entries = self._counting(response)
        usable = [output for output in outputs if output.turn is None or output.turn >= response.turn]
        num_taken = sum(_apply(entries, output, self.clock()) for output in usable)
        num_bytes = self._num_bytes - response.num_bytes + _num_bytes(entries)
        if len(entries) > self.limits.max_entries:
            allowed = self.limits.max_entries
            raise WireError(503, f"{len(entries)} entries of one response; allowed: {allowed}", "full")
        if num_bytes > self.limits.max_bytes:
            allowed = self.limits.max_bytes
            raise WireError(503, f"{num_bytes} bytes of all responses' entries; allowed: {allowed}", "full")
        self._replace(response, entries)
        return num_taken

    def _replace(self, response: CachedResponse, entries: dict[_Place, Entry]) -> None:
        num_bytes = _num_bytes(entries)
        self._num_bytes += num_bytes - response.num_bytes
        response.entries, response.num_bytes = entries, num_bytes
        if response.on_change is not None:
            response.on_change()


def _apply(entries: dict[_Place, Entry], output: ToolOutput, now_s: float) -> bool:
    key = call_key(output.name, output.params)
    place = (output.turn, key)
    known = entries.get(place)
    if known is not None and known.text is not None:
        return False
    if output.is_withdrawn:
        return entries.pop(place, None) is not None
    text = None if output.pending else output_text(output.output)
    keep_s = DEFAULT_KEEP_ALIVE_S if output.keep_alive is None else output.keep_alive
    entries[place] = Entry(output.name, output.params, key, text, output.turn, now_s + keep_s)
    return True


def _num_bytes(entries: Mapping[_Place, Entry]) -> int:
    return sum(entry.num_bytes for entry in entries.values())


def _check_unfinished(response: CachedResponse) -> None:
    if response.state == "finished":
        raise WireError(409, "the response has finished", "finished")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()

"""What the engine is told of one turn's early runs: which are under way, and what those that succeeded put out.

Posts are batched, bounded and waited for by nobody. What cannot be told is left out: the call is then served by the
client alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Coroutine, Hashable
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from spectool_core.cache import Run
from spectool_core.canonical import CallKey
from spectool_core.engine.endpoint import Address, EngineEndpoint
from spectool_core.engine.idle_streams import IdleStreams, Place
from spectool_core.engine.resident_stream import ResidentStream
from spectool_core.events import (
    EngineUnavailable,
    Event,
    OutputsPosted,
    RunOutcome,
    StreamAborted,
    StreamAbortReason,
    TurnAttached,
    TurnInjected,
    UnavailableReason,
)
from spectool_core.loops import run_on
from spectool_core.vllm.wire import MAX_ENTRIES, MAX_OUTPUT_BYTES

__all__ = ["Engine", "EngineTurn"]

_logger = logging.getLogger("spectool")

_MAX_BATCH_BYTES = MAX_OUTPUT_BYTES
"""Of one post, unless a single entry has more."""

_MAX_ENTRY_BYTES = 2 * MAX_OUTPUT_BYTES
"""As JSON; an engine with default settings takes a body of this and a little more."""

Entry = dict[str, Any]


class Engine(Protocol):
    """What the turns of one `Speculation` share."""

    endpoint: EngineEndpoint
    idle_streams: IdleStreams
    has_answered: bool | None  # see `EngineClient`

    def announce(self, event: Event) -> None:
        """Tell the hooks."""
        ...

    def warn(self, reason: UnavailableReason, status: int | None = None) -> None:
        """Tell the user, once; `status` is that of a post which was refused."""
        ...

    def post(self, turn: EngineTurn, address: Address, body: bytes, num_outputs: int) -> None:
        """Post `body`, which holds `num_outputs`, in the background, and tell the turn the status as `posted`."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop, run: Hashable) -> None:
        """Do `work` in the background of `loop`, on whose thread this is called, and at most as long as `run` lasts."""
        ...

    def end(self, address: Address, loop: asyncio.AbstractEventLoop) -> None:
        """Tell the engine, in the background, that its sequence is not wanted any more."""
        ...


class EngineTurn:
    """One turn of an agent run, as the engine is told of it.

    What its turn tells comes on the run's event loop; what the HTTP transport tells, on any thread.

    Args:
        number: the turn's number, for events.
        place: where model calls of this kind follow each other.
        loop: the agent run's event loop.
        engine: what is shared.
    """

    def __init__(self, number: int, place: Place, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        self.number = number
        self.place = place
        self.loop = loop
        self.engine = engine
        self._address: Address | None = None
        self._engine_turn = 1
        self._is_open = False
        self._has_begun = False
        self._entries: dict[CallKey, Entry] = {}
        self._unposted: dict[CallKey, None] = {}
        self._has_answer = False
        self._is_posting = False
        self._is_early = False
        self._was_seen = False
        self._is_over = False
        self._is_settled = False

    # The turn's side

    def begun(self, run: Run) -> None:
        """An early run has left the queue."""
        if run.prepared.content is not None and run.outcome is None:
            self._tell(run, {"pending": True})

    def found(self, run: Run) -> None:
        """A call was predicted whose result is there already."""
        if run.state == "succeeded" and run.prepared.key not in self._entries:  # else it is told already
            self.ended(run, "succeeded")

    def ended(self, run: Run, outcome: RunOutcome) -> None:
        """An early run has ended."""
        key, content = run.prepared.key, _content_of(run) if outcome == "succeeded" else None
        if content is not None and self._tell(run, {"output": content}):
            return
        if key in self._unposted:  # the engine has not heard of it
            del self._unposted[key], self._entries[key]
        elif key in self._entries:
            self._tell(run, {"pending": False})

    def answered(self, asked: Collection[CallKey]) -> None:
        """The main model has asked for these; no other call matters any more."""
        if not self._was_seen:
            self.unavailable("request_not_seen")
        self._has_answer = True
        self._entries = {key: entry for key, entry in self._entries.items() if key in asked}
        self._unposted = {key: None for key in self._unposted if key in asked}

    def settled(self) -> None:
        """The calls have been served, or will not come. What the engine waits for is still posted."""
        self._is_over = not self._has_answer  # the run has ended, though not all that it does may know
        self._has_answer = self._is_settled = True
        self._forget()

    def _forget(self) -> None:
        """Drop what the engine needs no more word of."""
        self._entries = {
            key: entry
            for key, entry in self._entries.items()
            if key in self._unposted or (entry.get("pending") and not self._is_over)
        }

    def _tell(self, run: Run, told: Entry) -> bool:
        """Have the engine told; False where it cannot be."""
        key, call = run.prepared.key, run.prepared.call
        if key not in self._entries and (self._has_answer or len(self._entries) >= MAX_ENTRIES):
            return False  # begun by the answer itself, it would come too late
        entry = {"name": call.name, "params": dict(call.arguments), **told}
        if not _can_be_posted(entry):
            return False
        self._entries[key] = entry
        self._unposted[key] = None
        self._post_soon()
        return True

    @property
    def has_answer(self) -> bool:
        """Whether the main model has answered, so that no further request is this turn's."""
        return self._has_answer

    # The transport's side

    def seen(self) -> None:
        """The main model's request has come by."""
        self._was_seen = True

    def opened(self, address: Address, *, is_streamed: bool) -> None:
        """A request has been sent, and posts may overtake it.

        An engine that is not known is told when its reply has begun; a reply that is not streamed begins as it ends.
        """
        if self.engine.has_answered or (self.engine.has_answered is None and not is_streamed):
            run_on(self.loop, partial(self._accept, address, 1, has_begun=False))

    def accepted(self, address: Address, engine_turn: int = 1) -> None:
        """The engine generates this turn as the `engine_turn`-th of the response at `address`."""
        self.engine.has_answered = True
        run_on(self.loop, partial(self._accept, address, engine_turn, has_begun=True))

    def keep(self, resident: ResidentStream) -> None:
        """This turn has been read from `resident`, and the next one may come there."""
        if self._is_over:
            resident.abandon()
            self.abort_stream(resident, "run_ended")
            return
        self.engine.idle_streams.keep(
            resident,
            self.place,
            self.loop,
            partial(self.abort_stream, resident),
            partial(run_on, self.loop, self._asked_on),
        )

    def injected(self, num_calls: int) -> None:
        """The engine went on from an earlier turn of this place by itself."""
        self.engine.announce(TurnInjected(self.number, self.loop.time(), num_calls))

    def attached(self, waited_s: float) -> None:
        """This turn is read from a stream that was there already."""
        self.engine.announce(TurnAttached(self.number, self.loop.time(), waited_s))

    def abort_stream(self, resident: ResidentStream, reason: StreamAbortReason) -> None:
        """End the engine's sequence, whose stream is closed early; the engine itself ends one that was cut."""
        self.engine.announce(StreamAborted(self.number, self.loop.time(), reason))
        if reason != "cut":
            self.engine.end(resident.address, self.loop)

    def closed(self, reason: UnavailableReason | None = None) -> None:
        """There is no response to post for; with a `reason`, the engine is to blame."""
        run_on(self.loop, self._close)
        if reason is not None:
            self.unavailable(reason)

    def unavailable(self, reason: UnavailableReason, status: int | None = None) -> None:
        """This turn is in client mode."""
        if reason == "plugin_absent":
            self.engine.has_answered = False
        self.engine.announce(EngineUnavailable(self.number, self.loop.time(), reason, status))
        self.engine.warn(reason, status)

    def _accept(self, address: Address, engine_turn: int, *, has_begun: bool) -> None:
        self._has_begun = has_begun
        if self._is_open and self._address == address:
            return
        self._address, self._engine_turn, self._is_open = address, engine_turn, True
        self._unposted = dict.fromkeys(self._entries)
        self._post_soon()

    def _close(self) -> None:
        self._is_open = False

    def _asked_on(self) -> None:
        """The next model call has come, and must not wait for a tool that still runs: its results did without."""
        for key, entry in self._entries.items():
            if entry.get("pending"):
                self._entries[key] = {**entry, "pending": False}
                self._unposted[key] = None
        self._post_soon()

    # Posting

    def _post_soon(self) -> None:
        if self._is_open and self._unposted and not self._is_posting:
            self._is_posting = True
            self.loop.call_soon(self._post)

    def _post(self) -> None:
        batch: list[bytes] = []
        size = num_outputs = 0
        for key in list(self._unposted):
            entry = {**self._entries[key], "turn": self._engine_turn}
            written = _written(entry)
            size += len(written)
            if batch and size > _MAX_BATCH_BYTES:
                break  # the rest goes with the next post
            del self._unposted[key]
            batch.append(written)
            num_outputs += "output" in entry
        if self._is_settled:
            self._forget()
        if self._is_open and batch and self._address is not None:
            self._is_early = not self._has_begun
            self.engine.post(self, self._address, b"[" + b",".join(batch) + b"]", num_outputs)
        else:
            self._is_posting = False

    def posted(self, address: Address, status: int | None, num_outputs: int) -> None:
        """A post to `address` has been answered with this HTTP status; None where there was no answer."""
        self._is_posting = False
        if address != self._address:  # of a request that has been sent again since
            self._post_soon()
        elif status == HTTPStatus.OK:
            self.engine.announce(OutputsPosted(self.number, self.loop.time(), num_outputs))
            self._post_soon()
        elif status == HTTPStatus.CONFLICT or not self._is_open:
            self._is_open = False  # the response has finished: the outputs came too late, as they may
        elif status == HTTPStatus.NOT_FOUND and self._is_early:
            self._is_open = False  # the engine has not got the request yet; the reply will say
            if self._has_begun:
                self._accept(address, self._engine_turn, has_begun=True)
        elif not self.engine.has_answered:
            self._is_open = False  # as it seems, the plugin is absent; the reply will say
        elif not self._has_answer:
            self._is_open = False
            self.unavailable("post_failed" if status is None else "post_refused", status)
            self.engine.end(address, self.loop)  # of what it took before, it must not wait for the rest


def _written(entry: Entry) -> bytes:
    return json.dumps(entry, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _can_be_posted(entry: Entry) -> bool:
    """Whether the server would take it: JSON, in UTF-8, which has no lone surrogates, and not too long."""
    try:
        return len(_written(entry)) <= _MAX_ENTRY_BYTES
    except (TypeError, ValueError, RecursionError):
        return False


def _content_of(run: Run) -> str | None:
    render = run.prepared.content
    if render is None:
        return None
    try:
        content = render(run.result)
    except Exception:
        _logger.debug("the output of %s cannot be shown to the engine", run.prepared.call.name, exc_info=True)
        return None
    if not isinstance(content, str) or len(content.encode("utf-8", "replace")) > MAX_OUTPUT_BYTES:
        return None
    return content

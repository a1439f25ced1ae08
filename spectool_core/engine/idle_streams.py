"""The resident streams that nobody reads just now: each for the next model call of its place, or for a while."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from spectool_core.engine.resident_stream import ResidentStream
from spectool_core.events import StreamAbortReason
from spectool_core.loops import run_on

__all__ = ["Place", "IdleStreams"]

_MAX_IDLE_S = 60.0
_MAX_STREAMS = 1024


class Place(NamedTuple):
    """Where model calls follow each other: within the agent run `run`, those of `conversation`."""

    run: Hashable
    conversation: Hashable


@dataclass(slots=True, eq=False)
class _Kept:
    resident: ResidentStream
    place: Place
    loop: asyncio.AbstractEventLoop
    on_abort: Callable[[StreamAbortReason], None]
    on_take: Callable[[], None]
    is_kept: bool = True
    timer: asyncio.TimerHandle | None = field(default=None)


class IdleStreams:
    """Keeps resident streams between two model calls.

    Args:
        max_idle_s: seconds that one is kept; its next model call should come at once.
        max_streams: as many are kept, and on one transport half of its connections; the oldest is aborted for one
            more.
    """

    def __init__(self, *, max_idle_s: float = _MAX_IDLE_S, max_streams: int = _MAX_STREAMS) -> None:
        self._max_idle_s = max_idle_s
        self._max_streams = max_streams
        self._lock = threading.Lock()
        self._kept: dict[ResidentStream, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(
        self,
        resident: ResidentStream,
        place: Place,
        loop: asyncio.AbstractEventLoop,
        on_abort: Callable[[StreamAbortReason], None],
        on_take: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep one whose turn has ended.

        Args:
            resident: the stream.
            place: whose next model call may take it.
            loop: the agent run's event loop.
            on_abort: is told why nobody took it: "expired", "too_many" or "run_ended".
            on_take: is told that a model call took it.
        """
        kept = _Kept(resident, place, loop, on_abort, on_take)
        with self._lock:
            self._kept[resident] = kept
            over = list(self._kept)[: -self._max_streams]
            connections = resident.reply.connections
            of_these = [each for each in self._kept if each.reply.connections is connections]
            over += of_these[: connections.num_too_many(len(of_these))]
        run_on(loop, self._start_timer, kept)
        self._abort(over, "too_many")

    def take(self, place: Place) -> list[ResidentStream]:
        """Those of `place`, oldest first, which are the caller's from now on."""
        with self._lock:
            there = [kept.resident for kept in self._kept.values() if kept.place == place]
        taken = [kept for resident in there if (kept := self._remove(resident)) is not None]
        for kept in taken:
            kept.on_take()
        return [kept.resident for kept in taken]

    def end_run(self, run: Hashable) -> None:
        """The agent run has ended: abort its streams."""
        with self._lock:
            left = [kept.resident for kept in self._kept.values() if kept.place.run == run]
        self._abort(left, "run_ended")

    def _abort(self, residents: Iterable[ResidentStream], reason: StreamAbortReason) -> None:
        for resident in residents:
            kept = self._remove(resident)
            if kept is not None:
                resident.abandon()
                kept.on_abort(reason)

    def _remove(self, resident: ResidentStream) -> _Kept | None:
        """What was kept until now; whoever removes it owns it."""
        with self._lock:
            kept = self._kept.pop(resident, None)
            if kept is None:
                return None
            kept.is_kept = False
        if kept.timer is not None:
            run_on(kept.loop, kept.timer.cancel)
        return kept

    def _start_timer(self, kept: _Kept) -> None:
        with self._lock:
            if kept.is_kept:
                kept.timer = kept.loop.call_later(self._max_idle_s, self._abort, [kept.resident], "expired")

"""How long a resident stream that nobody reads is kept, and by whom it is taken."""

from __future__ import annotations

import asyncio
from typing import Any

from spectool_core.engine.chat_body import ChatBody
from spectool_core.engine.endpoint import Address
from spectool_core.engine.idle_streams import IdleStreams, Place
from spectool_core.engine.resident_stream import Connections, ResidentStream
from tests.core.fakes import virtual

HERE = Place("run", "agent")


class Reply:
    """A response that is never read; notes how it was closed."""

    response = None

    def __init__(self, connections: Connections | None = None) -> None:
        self.connections = connections or Connections(1000)
        self.num_abandoned = 0

    def read(self) -> Any:
        raise AssertionError

    close = read

    def abandon(self) -> None:
        self.num_abandoned += 1


def resident(connections: Connections | None = None) -> ResidentStream:
    body = ChatBody({}, messages=(), roles=(), is_streamed=True, can_go_on=True)
    return ResidentStream(Reply(connections), body, Address("", ()), lambda _: None)


class Kept:
    """Streams of one place after another, and why they were aborted."""

    def __init__(self, **limits: Any) -> None:
        self.idle_streams = IdleStreams(**limits)
        self.reasons: list[tuple[int, str]] = []
        self.made: list[ResidentStream] = []

    def keep(self, place: Place = HERE, connections: Connections | None = None) -> ResidentStream:
        made, number = resident(connections), len(self.made)
        self.made.append(made)
        loop = asyncio.get_running_loop()
        self.idle_streams.keep(made, place, loop, lambda reason: self.reasons.append((number, reason)))
        return made


@virtual
async def test_a_stream_is_taken_once_by_its_own_place() -> None:
    kept = Kept()
    first, second, _ = kept.keep(), kept.keep(), kept.keep(Place("run", "other"))
    assert kept.idle_streams.take(Place("other run", "agent")) == []
    assert kept.idle_streams.take(HERE) == [first, second]
    assert kept.idle_streams.take(HERE) == []
    assert len(kept.idle_streams) == 1
    kept.idle_streams.end_run("run")


@virtual
async def test_a_stream_that_nobody_takes_expires() -> None:
    kept = Kept(max_idle_s=60.0)
    made = kept.keep()
    await asyncio.sleep(59.0)
    assert kept.reasons == []
    await asyncio.sleep(2.0)
    assert kept.reasons == [(0, "expired")]
    assert made.reply.num_abandoned == 1  # type: ignore[attr-defined]
    assert len(kept.idle_streams) == 0


@virtual
async def test_a_stream_that_was_taken_does_not_expire() -> None:
    kept = Kept(max_idle_s=60.0)
    kept.keep()
    kept.idle_streams.take(HERE)
    await asyncio.sleep(100.0)
    assert kept.reasons == []


@virtual
async def test_the_oldest_goes_where_there_are_too_many() -> None:
    kept = Kept(max_streams=2)
    for _ in range(4):
        kept.keep()
    assert kept.reasons == [(0, "too_many"), (1, "too_many")]
    assert len(kept.idle_streams) == 2
    kept.idle_streams.end_run("run")


@virtual
async def test_half_of_a_transports_connections_are_left_to_others() -> None:
    kept, few = Kept(), Connections(5)
    kept.keep()
    for _ in range(4):
        kept.keep(connections=few)
    assert kept.reasons == [(1, "too_many"), (2, "too_many")]
    assert len(kept.idle_streams) == 3
    kept.idle_streams.end_run("run")


@virtual
async def test_streams_end_with_their_run_and_no_other() -> None:
    kept = Kept()
    kept.keep()
    kept.keep(Place("other run", "agent"))
    kept.idle_streams.end_run("run")
    assert kept.reasons == [(0, "run_ended")]
    kept.idle_streams.end_run("other run")
    assert kept.reasons == [(0, "run_ended"), (1, "run_ended")]
    kept.idle_streams.end_run("run")
    assert len(kept.reasons) == 2

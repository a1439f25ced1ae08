"""How long a resident stream that nobody reads is kept, and by whom it is taken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from spectool_core.engine.chat_body import ChatBody
from spectool_core.engine.endpoint import Address
from spectool_core.engine.resident import Connections, Resident
from spectool_core.engine.residents import Place, Residents
from spectool_core.engine.steps import run_steps
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


def resident(connections: Connections | None = None) -> Resident:
    body = ChatBody({}, messages=(), roles=(), is_streamed=True, can_go_on=True)
    return Resident(Reply(connections), body, Address("", ()), lambda _: None)


class Kept:
    """Streams of one place after another, and why they were aborted."""

    def __init__(self, **limits: Any) -> None:
        self.residents = Residents(**limits)
        self.reasons: list[tuple[int, str]] = []
        self.made: list[Resident] = []

    def keep(self, place: Place = HERE, connections: Connections | None = None) -> Resident:
        made, number = resident(connections), len(self.made)
        self.made.append(made)
        loop = asyncio.get_running_loop()
        self.residents.keep(made, place, loop, lambda reason: self.reasons.append((number, reason)))
        return made


class Cut(Reply):
    """A response that breaks behind what has come."""

    def __init__(self, received: bytes) -> None:
        super().__init__()
        self.received: list[bytes] = [received]

    def read(self) -> bytes:
        if not self.received:
            raise ConnectionError("cut")
        return self.received.pop()

    def close(self) -> None:
        self.num_abandoned += 1


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_turn_that_is_whole_is_not_lost_with_its_connection(*, is_streamed: bool) -> None:
    reply = Cut(b'data: {"choices": []}\n\nevent: spectool.turn\ndata: {"turn": 1, "finish_reason": "stop"}\n\n')
    body = ChatBody({}, messages=(), roles=(), is_streamed=is_streamed, can_go_on=True)
    cut = Resident(reply, body, Address("", ()), lambda _: None)
    if is_streamed:
        assert run_steps(cut.piece()) == b'data: {"choices": []}\n\n'
        assert run_steps(cut.piece()) == b"data: [DONE]\n\n"
        assert run_steps(cut.piece()) is None
    else:
        assert run_steps(cut.whole()) == b'{"choices": []}'
    assert reply.num_abandoned == 1


@virtual
async def test_a_stream_is_taken_once_by_its_own_place() -> None:
    kept = Kept()
    first, second, _ = kept.keep(), kept.keep(), kept.keep(Place("run", "other"))
    assert kept.residents.take(Place("other run", "agent")) == []
    assert kept.residents.take(HERE) == [first, second]
    assert kept.residents.take(HERE) == []
    assert len(kept.residents) == 1
    kept.residents.end_run("run")


@virtual
async def test_a_stream_that_nobody_takes_expires() -> None:
    kept = Kept(max_idle_s=60.0)
    made = kept.keep()
    await asyncio.sleep(59.0)
    assert kept.reasons == []
    await asyncio.sleep(2.0)
    assert kept.reasons == [(0, "expired")]
    assert made.reply.num_abandoned == 1  # type: ignore[attr-defined]
    assert len(kept.residents) == 0


@virtual
async def test_a_stream_that_was_taken_does_not_expire() -> None:
    kept = Kept(max_idle_s=60.0)
    kept.keep()
    kept.residents.take(HERE)
    await asyncio.sleep(100.0)
    assert kept.reasons == []


@virtual
async def test_the_oldest_goes_where_there_are_too_many() -> None:
    kept = Kept(max_residents=2)
    for _ in range(4):
        kept.keep()
    assert kept.reasons == [(0, "too_many"), (1, "too_many")]
    assert len(kept.residents) == 2
    kept.residents.end_run("run")


@virtual
async def test_half_of_a_transports_connections_are_left_to_others() -> None:
    kept, few = Kept(), Connections(5)
    kept.keep()
    for _ in range(4):
        kept.keep(connections=few)
    assert kept.reasons == [(1, "too_many"), (2, "too_many")]
    assert len(kept.residents) == 3
    kept.residents.end_run("run")


@virtual
async def test_streams_end_with_their_run_and_no_other() -> None:
    kept = Kept()
    kept.keep()
    kept.keep(Place("other run", "agent"))
    kept.residents.end_run("run")
    assert kept.reasons == [(0, "run_ended")]
    kept.residents.end_run("other run")
    assert kept.reasons == [(0, "run_ended"), (1, "run_ended")]
    kept.residents.end_run("run")
    assert len(kept.reasons) == 2

"""What the user is told of an engine that cannot help."""

from __future__ import annotations

import asyncio
import logging
from typing import get_args

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from spectool_core.engine.client import EngineClient
from spectool_core.engine.endpoint import Address, EngineEndpoint
from spectool_core.engine.idle_streams import Place
from spectool_core.engine.turn import EngineTurn
from spectool_core.events import EngineUnavailable, Event, UnavailableReason
from tests.core.engine.test_posted_entries import run_of


def client() -> EngineClient:
    return EngineClient(EngineEndpoint("http://engine/v1"), lambda event: None)


@pytest.mark.parametrize("reason", get_args(UnavailableReason))
def test_each_reason_is_told_in_words(reason: UnavailableReason, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "spectool"):
        client().warn(reason)

    (record,) = caplog.records
    assert f" ({reason}). " in record.getMessage()
    assert len(record.getMessage()) > 120


def test_the_status_of_a_refused_post_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "spectool"):
        client().warn("post_refused", 413)

    assert " (post_refused: 413). " in caplog.records[0].getMessage()


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    told = client()
    with caplog.at_level(logging.WARNING, "spectool"):
        told.warn("unreachable")
        told.warn("plugin_absent")

    assert len(caplog.records) == 1


async def test_what_is_posted_goes_nowhere_else() -> None:
    """Neither the secret nor an output is for whoever a redirect names."""
    app, asked, events = web.Application(), list[str](), list[Event]()

    async def redirected(request: web.Request) -> web.Response:
        asked.append(f"{request.method} {request.path}")
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    app.router.add_route("*", "/{path}", redirected)
    async with TestServer(app) as server:
        engine = EngineClient(EngineEndpoint(f"{server.make_url('/v1')}"), events.append)
        turn = EngineTurn(1, Place("run", None), asyncio.get_running_loop(), engine)
        turn.accepted(Address(f"{server.make_url('/outputs')}", ()))
        turn.begun(run_of({}, "name"))
        await asyncio.sleep(0)
        while engine.num_background_tasks:
            await asyncio.sleep(0.001)
    assert asked == ["POST /outputs", "DELETE /outputs"]
    assert [(event.reason, event.status) for event in events if isinstance(event, EngineUnavailable)] == [
        ("post_refused", 307)
    ]

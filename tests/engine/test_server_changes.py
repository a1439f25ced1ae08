"""A server takes another's place, or dies: clients are told, none waits, and agents go on as stock's would."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from spectool_core.events import EngineUnavailable
from tests.engine.agents import Interrupted, LangGraphAgent, LlamaIndexAgent
from tests.engine.formats import model_of
from tests.engine.front import Front
from tests.engine.serving import Response, Server, request, serving
from tests.engine.test_server_turns import ONE_LEVEL, STREAMED, goes_on, later, weather

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def other(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of another model, which writes calls in another format."""
    folder = tmp_path_factory.mktemp("other")
    model = model_of("xlam", model_folder, folder / "model")
    flags = ("--api-key", "the-key")
    with serving(model, folder / "server.log", "o3", *flags, tool_format="xlam", hold_s=5.0) as running:
        yield running


@ONE_LEVEL
async def test_a_server_that_is_replaced_by_another_models(
    server: Server, other: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes down while a tool runs and the sequence waits in it: the run goes on as stock's would."""
    with caplog.at_level(logging.WARNING, "spectool"):
        for kind in (LangGraphAgent, LlamaIndexAgent):
            async with Front(server.url).serving() as front:
                run = Interrupted(kind, front.url)
                asking = asyncio.create_task(run.ask())
                await run.has_answered.wait()
                front.replace(other.url)
                run.may_return.set()
                seen = await asking

                assert seen[-1].content == await run.stock.answer(seen[:-1])
            assert seen[-2].content == '{"city": "Lima", "weather": "rain"}'
            assert (run.engine.num_injected, run.engine.num_attached) == (0, 0)
            assert [event.reason for event in run.events if isinstance(event, EngineUnavailable)] == ["cut"]
    assert [record.levelname for record in caplog.records if record.name == "spectool"] == ["WARNING"] * 2


async def test_xlams_format_over_http(other: Server) -> None:
    async with other.client(headers={"Authorization": "Bearer the-key"}) as client:
        await goes_on(client, STREAMED)
        await goes_on(client, {})


def engine_core_of(server_pid: int) -> int:
    children = subprocess.run(["pgrep", "-P", str(server_pid)], capture_output=True, text=True, check=True).stdout
    return next(
        int(pid) for pid in children.split() if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::Engine")
    )


async def test_a_dead_engine_ends_streams_and_posts(other: Server) -> None:
    """The last test of this server."""
    async with other.client(headers={"Authorization": "Bearer the-key"}) as client:
        decoding = Response(client, request("London", **STREAMED))
        parked = Response(client, request("Lima", **STREAMED))
        reading = asyncio.create_task(parked.read())
        assert (await later(0.3, parked.post(weather("Lima", pending=True)))).status_code == 200
        await parked.status_when(lambda status: status["state"] == "parked")
        loop = asyncio.get_running_loop()
        killed_s = 0.0
        posting = None
        async for _ in decoding.events():
            if posting is None and len(decoding.turns[0].chunks) == 8:
                assert (await parked.status())["state"] == "parked"
                os.kill(engine_core_of(other.process.pid), signal.SIGKILL)
                killed_s = loop.time()
                posting = asyncio.create_task(decoding.post(weather("London")))

        assert posting is not None
        posted, parked_turns = await asyncio.gather(posting, reading, return_exceptions=True)

    assert loop.time() - killed_s < 10
    assert isinstance(posted, httpx.HTTPError) or posted.status_code >= 500
    assert "error" in decoding.turns[-1].chunks[-1]
    assert decoding.turns[-1].over is None
    assert isinstance(parked_turns, httpx.HTTPError) or len(parked_turns) == 1
    assert other.process.wait(60) is not None

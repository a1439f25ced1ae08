"""The engine dies under its clients: each is told, and none waits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.engine.serving import Response, request, serving
from tests.engine.test_server_turns import STREAMED, later, weather

pytestmark = pytest.mark.timeout(400)


def engine_core_of(server_pid: int) -> int:
    children = subprocess.run(["pgrep", "-P", str(server_pid)], capture_output=True, text=True, check=True).stdout
    return next(
        int(pid) for pid in children.split() if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::Engine")
    )


async def test_a_dead_engine_ends_streams_and_posts(model_folder: Path, tmp_path: Path) -> None:
    with serving(model_folder, tmp_path / "server.log", "o3", hold_s=5.0) as server:
        async with server.client() as client:
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
                    os.kill(engine_core_of(server.process.pid), signal.SIGKILL)
                    killed_s = loop.time()
                    posting = asyncio.create_task(decoding.post(weather("London")))

            assert posting is not None
            posted, parked_turns = await asyncio.gather(posting, reading, return_exceptions=True)

        assert loop.time() - killed_s < 10
        assert isinstance(posted, httpx.HTTPError) or posted.status_code >= 500
        assert "error" in decoding.turns[-1].chunks[-1]
        assert decoding.turns[-1].over is None
        assert isinstance(parked_turns, httpx.HTTPError) or len(parked_turns) == 1
        assert server.process.wait(60) is not None

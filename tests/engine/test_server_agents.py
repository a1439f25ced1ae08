"""Agents of both frameworks on a real server: the run is stock's, in half the requests."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.engine.agents import Agent, LangGraphAgent, LlamaIndexAgent, engine_of
from tests.engine.serving import Server
from tests.engine.test_server_turns import ONE_LEVEL

pytestmark = pytest.mark.timeout(400)


def named(seen: list[Any]) -> str:
    """Without the ids that servers draw, but with which is which."""
    names: dict[str, str] = {}
    return re.sub(
        r"chatcmpl-(tool-)?[0-9a-f]+(-t\d+)?", lambda found: names.setdefault(found[0], f"id {len(names)}"), repr(seen)
    )


@dataclass
class Weather:
    """The tool, and what it was asked."""

    runs: list[str] = field(default_factory=list)

    async def get_weather(self, city: str) -> str:
        """Get weather"""
        self.runs.append(city)
        return json.dumps({"city": city, "weather": f"{len(city) * 3} C, cloudy"})


async def num_generated(server: Server) -> int:
    """Chat completions that the engine has begun; a response is one, however many its turns."""
    async with server.client() as client:
        text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


@ONE_LEVEL
@pytest.mark.parametrize(("kind", "streaming"), [(LangGraphAgent, False), (LlamaIndexAgent, True)])
async def test_a_run_is_stocks_in_half_the_requests(kind: type[Agent], server: Server, streaming: bool) -> None:
    stock_weather, our_weather = Weather(), Weather()
    stock = kind(server.url, stock_weather.get_weather, None, streaming=streaming)
    with contextlib.closing(engine_of(server.url)) as speculation:
        ours = kind(server.url, our_weather.get_weather, speculation, streaming=streaming)
        await ours.ask("Paris")  # of a server that is not known, one that is not streamed is told too late
        before = speculation.statistics().engine
        expected = await stock.ask("Lima")
        num_before = await num_generated(server)
        assert named(await ours.ask("Lima")) == named(expected)
        assert await num_generated(server) - num_before == 1
        engine = speculation.statistics().engine

    assert our_weather.runs[1:] == stock_weather.runs == ["Lima"]
    assert engine.num_injected - before.num_injected == engine.num_attached - before.num_attached == 1
    assert engine.num_aborted == engine.num_unavailable == 0

"""A real vLLM server with the plugin, and what a client of engine mode reads from it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from examples.engine import server
from examples.engine.smollm2 import TOOLS, messages
from spectool_core.vllm.settings import EngineSettings


@dataclass(frozen=True)
class Server:
    """A running server.

    Args:
        url: where it is.
        model: its model's name.
        level: of the plugin.
        process: its process.
        log: where it writes.
    """

    url: str
    model: str
    level: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=120, **options)


@contextlib.contextmanager
def serving(
    folder: Path, log: Path, level: str, *flags: str, port: int | None = None, **settings: Any
) -> Iterator[Server]:
    """A server of the model in `folder`; `settings` are the plugin's."""
    plugin = EngineSettings.model_validate({"level": level, **settings})
    with server.serving(folder, plugin, flags, port=port, log=log) as running:
        yield Server(running.url, server.MODEL, level, running.process, running.log)


@dataclass
class Turn:
    """What was read of one turn."""

    number: int
    chunks: list[dict[str, Any]] = field(default_factory=list)
    over: dict[str, Any] | None = None
    went_on: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        if self.chunks and self.chunks[0]["object"] == "chat.completion":
            return self.chunks[0]["choices"][0]["message"]["content"] or ""
        return "".join(delta.get("content") or "" for delta in self._deltas())

    @property
    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        if self.chunks and self.chunks[0]["object"] == "chat.completion":
            made = self.chunks[0]["choices"][0]["message"].get("tool_calls") or []
            return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in made]
        names: dict[int, str] = {}
        texts: dict[int, str] = {}
        for delta in self._deltas():
            for piece in delta.get("tool_calls") or ():
                names[piece["index"]] = names.get(piece["index"], "") + (piece["function"].get("name") or "")
                texts[piece["index"]] = texts.get(piece["index"], "") + (piece["function"].get("arguments") or "")
        return [(names[index], json.loads(texts[index])) for index in sorted(names)]

    @property
    def token_ids(self) -> list[int]:
        if self.chunks and self.chunks[0]["object"] == "chat.completion":
            return list(self.chunks[0]["choices"][0]["token_ids"])
        return [
            token
            for chunk in self.chunks
            for choice in chunk.get("choices", ())
            for token in choice.get("token_ids") or ()
        ]

    @property
    def usage(self) -> dict[str, int] | None:
        return next((chunk["usage"] for chunk in reversed(self.chunks) if chunk.get("usage")), None)

    @property
    def finish_reason(self) -> str | None:
        reasons = [choice.get("finish_reason") for chunk in self.chunks for choice in chunk.get("choices", ())]
        return next((reason for reason in reversed(reasons) if reason), None)

    def _deltas(self) -> Iterator[dict[str, Any]]:
        for chunk in self.chunks:
            for choice in chunk.get("choices", ()):
                yield choice["delta"]


def request(city: str, **fields: Any) -> dict[str, Any]:
    """A greedy request that this model answers with a call of `get_weather`."""
    asked = {"model": "smollm2", "messages": messages(city), "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    return {**asked, "return_token_ids": True, **fields}


@dataclass
class Response:
    """One chat request of a client that asks for turns."""

    client: httpx.AsyncClient
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    wants_turns: bool = True
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    secret: str = field(default_factory=lambda: uuid.uuid4().hex)
    turns: list[Turn] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"/cache-tool-output/chatcmpl-{self.request_id}"

    @property
    def all_headers(self) -> dict[str, str]:
        asked = {"X-Request-Id": self.request_id, "X-Spectool-Secret": self.secret, **self.headers}
        return {**asked, "X-Spectool-Turns": "1"} if self.wants_turns else asked

    async def post(self, *entries: Mapping[str, Any], secret: str | None = None) -> httpx.Response:
        headers = {**self.headers, "X-Spectool-Secret": secret or self.secret}
        return await self.client.post(self.path, json=list(entries), headers=headers)

    async def status(self) -> dict[str, Any]:
        reply = await self.client.get(self.path, headers={**self.headers, "X-Spectool-Secret": self.secret})
        reply.raise_for_status()
        return dict(reply.json())

    async def status_when(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The status, once it is as it is to become; the server notes an end a moment after the stream's."""
        for _ in range(100):
            status = await self.status()
            if holds(status):
                return status
            await asyncio.sleep(0.05)
        raise AssertionError(status)

    async def events(self) -> AsyncIterator[tuple[str | None, Any]]:
        """Each event's name and data, until `[DONE]`; `turns` grows as they come."""
        turn = Turn(1)
        self.turns = [turn]
        async for name, data in stream(self.client, self.body, self.all_headers):
            if name == "spectool.turn":
                turn.over = data
            elif name == "spectool.injected":
                turn.went_on = data
                turn = Turn(turn.number + 1)
                self.turns.append(turn)
            elif data != "[DONE]":
                turn.chunks.append(data)
                deltas = [choice.get("delta") or {} for choice in data.get("choices") or ()]
                assert all(len(delta.get("tool_calls") or ()) <= 1 for delta in deltas)
            yield name, data

    async def read(self) -> list[Turn]:
        """All turns."""
        async for _ in self.events():
            pass
        return self.turns


async def stream(
    client: httpx.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str]
) -> AsyncIterator[tuple[str | None, Any]]:
    """The events of a stream, `[DONE]` too."""
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
        if reply.status_code != 200:
            raise AssertionError((reply.status_code, await reply.aread()))
        name = None
        async for line in reply.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield name, data if data == "[DONE]" else json.loads(data)
                name = None


async def client_path(client: httpx.AsyncClient, body: Mapping[str, Any], went_on: list[dict[str, Any]]) -> Turn:
    """The next turn as a plain request, after the messages that the engine went on from."""
    turn = Turn(2)
    asked = {**body, "messages": [*body["messages"], *went_on]}
    if not body.get("stream"):
        reply = await client.post("/v1/chat/completions", json=asked)
        turn.chunks.append(reply.raise_for_status().json())
        return turn
    async for _, data in stream(client, asked, {}):
        if data != "[DONE]":
            turn.chunks.append(data)
    return turn

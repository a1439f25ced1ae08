"""A loopback server that answers with prepared bytes, for what no well-made server says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Self

Answers = Callable[[dict[str, Any]], bytes]


class CannedServer:
    """Answers each request with `answers(body)`, byte for byte; keeps its connections until the client leaves."""

    def __init__(self, answers: Answers, *, hangs_up: bool = False) -> None:
        self._answers = answers
        self._hangs_up = hangs_up
        self._connections: set[asyncio.Task[None]] = set()
        self.bodies: list[dict[str, Any]] = []
        self.num_connections = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.num_connections += 1
        try:
            while (body := await _request(reader)) is not None:
                self.bodies.append(body)
                writer.write(self._answers(body))
                await writer.drain()
                if self._hangs_up:
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()


async def _request(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return json.loads(await reader.readexactly(int(lengths[0].split(b":")[1])))


def http(body: bytes | Any, *, status: int = 200, kind: str = "application/json", headers: str = "") -> bytes:
    """A whole HTTP response; a body that is no bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    return head.encode() + data


def sse(*chunks: Any, done: bool = True) -> bytes:
    """Chunks as server-sent events."""
    events = [json.dumps(chunk) for chunk in chunks] + (["[DONE]"] if done else [])
    return b"".join(f"data: {event}\n\n".encode() for event in events)


def completion(*choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A chat completion whose choices make these tool calls."""
    return {
        "choices": [
            {"index": i, "message": {"role": "assistant", "tool_calls": calls}, "finish_reason": "tool_calls"}
            for i, calls in enumerate(choices)
        ],
        **fields,
    }


def call(name: str, arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    """One entry of `tool_calls`."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def chunk(*pieces: dict[str, Any], finish: Any = None, index: int = 0) -> dict[str, Any]:
    """A chunk whose one choice brings these pieces of tool calls."""
    return {"choices": [{"index": index, "delta": {"tool_calls": list(pieces)}, "finish_reason": finish}]}

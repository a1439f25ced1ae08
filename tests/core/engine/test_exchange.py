"""What a model call gets where a server, a proxy or a cancellation comes between it and its turn."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from spectool_core import Speculation
from spectool_core.engine.chat_body import ChatBody, sent_with
from spectool_core.engine.exchange import answer
from spectool_core.engine.resident_stream import Connections, ResidentStream
from spectool_core.events import EngineUnavailable, StreamAborted
from spectool_core.runs import RunContext
from spectool_core.testing import Answer, EngineBehaviour, EngineServer, Latch, LeakCheck
from spectool_core.vllm.wire import DONE_EVENT, INJECTED_EVENT, REPLY_HEADER, TURN_EVENT, server_sent_event
from tests.core.engine.test_http import TOOLS, Agent
from tests.core.engine.test_idle_streams import Reply
from tests.core.engine.test_turn import ADDRESS, Engine
from tests.core.fakes import virtual
from tests.pacing import FINAL, Pace, asks, quiet, speculation_of

URL = "http://engine/v1"
QUESTION: dict[str, Any] = {"model": "m", "tools": TOOLS, "messages": [{"role": "user", "content": "go"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
ANSWERED = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "found"}]
END = server_sent_event({"turn": 1, "finish_reason": "stop"}, TURN_EVENT)
WHOLE = {
    "id": "r",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
}


def chunk(text: str) -> str:
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
    return server_sent_event({**WHOLE, "object": "chat.completion.chunk", "choices": [choice]})


class Served(httpx.AsyncBaseTransport):
    """A server: `turns` is what it says to requests of ours, `WHOLE` to others; `encode` is of a proxy before it."""

    def __init__(self, turns: str, *headers: tuple[str, str], encode: Callable[[bytes], bytes] = bytes) -> None:
        self.turns, self.headers, self.encode = turns, headers, encode
        self.headers_of_requests: list[httpx.Headers] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.headers_of_requests.append(request.headers.copy())
        if "x-spectool-turns" in request.headers:
            kind, content = "text/event-stream", self.turns
        else:
            kind, content = "application/json", json.dumps(WHOLE)
        headers = [("content-type", kind), (REPLY_HEADER, "1"), *self.headers]
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(self.encode(content.encode())))


class Asked:
    """One model call of an agent."""

    def __init__(self, server: Served, **body: Any) -> None:
        self.pace = Pace([FINAL], [], is_held=False)
        self.http_client = httpx.AsyncClient(transport=server)
        self.client = openai.AsyncOpenAI(base_url=URL, api_key="key", max_retries=0, http_client=self.http_client)
        self.speculation = Speculation(engine="vllm", engine_url=URL, hooks=[self.pace])
        self.agent = Agent(self.client, self.speculation, **body)

    async def answered(self) -> Any:
        await self.agent.run()
        return self.agent.messages[-1]["content"]

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.pace.of(EngineUnavailable)]


@pytest.mark.parametrize("name", [INJECTED_EVENT, "spectool.other"])
async def test_an_event_of_ours_within_a_turn_is_as_a_broken_connection(name: str) -> None:
    asked = Asked(Served(chunk("h") + server_sent_event({"messages": []}, name) + chunk("i") + END), stream=True)
    with pytest.raises(httpx.RemoteProtocolError):
        await asked.answered()
    assert asked.reasons == ["malformed"]


@pytest.mark.parametrize("told", ["[" * 100_000, "no json", "[]", '{"finish_reason": {}}', '{"finish_reason": null}'])
async def test_a_turns_end_that_says_nothing_is_one(told: str) -> None:
    asked = Asked(Served(f"{chunk('hi')}event: {TURN_EVENT}\ndata: {told}\n\n{DONE_EVENT}"), stream=True)
    assert await asked.answered() == "hi"


async def test_a_reply_that_is_compressed_all_the_same_is_asked_for_by_the_users_own_request() -> None:
    server = Served(chunk("hi") + END, ("content-encoding", "gzip"), encode=gzip.compress)
    asked = Asked(server)
    assert await asked.answered() == "hi"
    ours, own = server.headers_of_requests
    assert (ours["accept-encoding"], ours["x-spectool-turns"]) == ("identity", "1")
    assert "gzip" in own["accept-encoding"]
    assert "x-spectool-turns" not in own
    assert asked.reasons == ["malformed"]


async def test_cookies_stay_apart() -> None:
    turns = server_sent_event(WHOLE) + END + DONE_EVENT
    asked = Asked(Served(turns, ("set-cookie", "a=1; Path=/"), ("set-cookie", "b=2; Path=/")))
    assert await asked.answered() == "hi"
    assert dict(asked.http_client.cookies) == {"a": "1", "b": "2"}


async def test_an_answer_is_whole_though_its_posts_are_refused() -> None:
    """The response is ended for the engine: the turn that is being written is the last."""
    latch = Latch()
    answers = [Answer(text="first", tool_calls=asks("a").tool_calls, latch=latch), FINAL]
    behaviour, pace = EngineBehaviour(post_status=413), Pace([FINAL], [], is_held=False)
    async with LeakCheck(), EngineServer({"m": answers}, behaviour) as server, httpx.AsyncClient() as http_client:
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="key", max_retries=0, http_client=http_client)
        speculation = speculation_of(server, [["a"]], pace)
        agent = Agent(client, speculation, stream=True)
        running = asyncio.create_task(agent.run())
        await server.until_engine(lambda counts: counts.num_deleted == 1)
        latch.open()
        await running
        await quiet(speculation)
        assert [message["content"] for message in agent.messages[1:]] == ["first", "found a", FINAL.text]
        assert [(event.reason, event.status) for event in pace.of(EngineUnavailable)] == [("post_refused", 413)]
        assert pace.of(StreamAborted) == []
        assert (server.statistics().num_requests, server.engine_statistics().num_injected) == (2, 0)


class Waiting:
    """A model call that two streams may answer, driven by hand."""

    connections = Connections(100)

    def __init__(self, **headers: str) -> None:
        self.engine = Engine()
        self.turn = self.engine.turn(2, RunContext(run="run"), None, asyncio.get_running_loop())
        body = ChatBody.parse(self.request([]).content, sent_with(self.request([])))
        assert body is not None
        self.streams = [ResidentStream(Reply(), body, ADDRESS, self.turn.keep) for _ in range(2)]
        for stream in self.streams:
            self.turn.keep(stream)
        self.steps = answer(self.request(ANSWERED, **headers), self.turn, self)  # type: ignore[arg-type]

    def request(self, added: list[Any], **headers: str) -> httpx.Request:
        body = {**QUESTION, "messages": [*QUESTION["messages"], *added]}
        return httpx.Request("POST", URL, json=body, headers={"authorization": "Bearer a", **headers})

    def can_read(self, resident: ResidentStream) -> bool:
        return True

    @property
    def aborted(self) -> list[str]:
        return [event.reason for event in self.engine.events if isinstance(event, StreamAborted)]


@virtual
async def test_a_call_that_is_cancelled_while_it_waits_for_one_stream_leaves_the_others() -> None:
    call = Waiting()
    first, second = call.streams
    assert next(call.steps) == first.reply.read
    assert call.steps.throw(asyncio.CancelledError()) == first.reply.close
    with pytest.raises(asyncio.CancelledError):
        call.steps.send(None)
    assert call.aborted == ["cancelled"]
    assert call.engine.idle_streams.take(call.turn.place) == [second]


@virtual
async def test_with_other_credentials_no_stream_is_read() -> None:
    call = Waiting(authorization="Bearer b")
    assert [next(call.steps), call.steps.send(None)] == [stream.reply.close for stream in call.streams]
    assert call.aborted == ["different_request"] * 2
    call.steps.close()

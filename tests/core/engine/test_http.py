"""Turns over real HTTP with clients of the openai package, whatever HTTP library they stand on."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from spectool_core import Speculation
from spectool_core.calls import Prompt, ToolCall
from spectool_core.engine import follow, set_current_turn
from spectool_core.events import EngineUnavailable, StreamAborted
from spectool_core.runs import RunContext
from spectool_core.testing import Answer, EngineBehaviour, EngineServer, HttpError, Latch, LeakCheck
from tests.core.fakes import FakeToolbox
from tests.pacing import ANSWERS, FINAL, GUESSES, Pace, asks, named, quiet, speculation_of

TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]


def httpx2_client() -> Any:
    return pytest.importorskip("httpx2").AsyncClient()


CLIENTS: dict[str, Callable[[], Any]] = {
    "httpx": httpx.AsyncClient,
    "httpx2": httpx2_client,
    "aiohttp": openai.DefaultAioHttpClient,
}


@asynccontextmanager
async def a_client(server: EngineServer, http_client: Any = None) -> AsyncIterator[openai.AsyncOpenAI]:
    options = {"base_url": server.base_url, "api_key": "key", "max_retries": 0}
    async with openai.AsyncOpenAI(**options, http_client=http_client or httpx.AsyncClient()) as client:
        yield client


def toolbox() -> FakeToolbox:
    made = FakeToolbox()

    async def lookup(q: str) -> str:
        return f"found {q}"

    made.add_function("lookup", lookup, parameters={"q"})
    return made


class Agent:
    """The loop of an agent in a dozen lines, on a client of the openai package.

    Args:
        client: the user's client.
        speculation: None for stock.
        context: the agent run.
        body: further parameters of each request.
    """

    def __init__(
        self, client: Any, speculation: Speculation | None, context: RunContext | None = None, **body: Any
    ) -> None:
        self.speculation = speculation
        self.context = context or RunContext(run=self)
        self.client = client
        assert speculation is None or follow(client)
        self.messages: list[Any] = [{"role": "user", "content": "go"}]
        self.body = {"model": "m", "tools": TOOLS, **body}
        self.seen: list[Any] = []
        self.toolbox = toolbox()

    def start_turn(self, loop: asyncio.AbstractEventLoop | None) -> Any:
        if self.speculation is None:
            return None
        turn = self.speculation.start_turn(Prompt(self.messages), TOOLS, self.toolbox, self.context, loop=loop)
        set_current_turn(turn.engine_turn)
        return turn

    def take(self, reply: Any) -> list[ToolCall]:
        """Note a whole reply, or the chunks of one, and what it asks for."""
        chunks = [reply] if not isinstance(reply, list) else reply
        self.seen.append([chunk.model_dump() for chunk in chunks])
        whole = None if chunks is reply else chunks[0].choices[0].message.model_dump(exclude_none=True)
        message = {"content": None, **whole} if whole is not None else joined(chunks)
        self.messages.append(message)
        return [
            ToolCall(call["function"]["name"], json.loads(call["function"]["arguments"]), call["id"])
            for call in message.get("tool_calls", ())
        ]

    def give(self, call: ToolCall, content: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    async def run(self) -> None:
        try:
            while True:
                turn = self.start_turn(asyncio.get_running_loop())
                reply = await self.client.chat.completions.create(messages=self.messages, **self.body)
                calls = self.take([chunk async for chunk in reply] if self.body.get("stream") else reply)
                if turn is not None:
                    turn.answer(calls)
                for call in calls:
                    if turn is not None:
                        assert (await turn.claim(call)).outcome != "miss"
                    self.give(call, f"found {call.arguments['q']}")
                if not calls:
                    return
        finally:
            set_current_turn(None)
            if self.speculation is not None:
                self.speculation.end_run(self.context)

    def run_blocking(self) -> None:
        while True:
            turn = self.start_turn(None)
            reply = self.client.chat.completions.create(messages=self.messages, **self.body)
            calls = self.take(list(reply) if self.body.get("stream") else reply)
            if turn is not None:
                turn.answer(calls)
            for call in calls:
                if turn is not None:
                    assert turn.claim_blocking(call).outcome == "hit"
                self.give(call, f"found {call.arguments['q']}")
            if not calls:
                break
        if self.speculation is not None:
            self.speculation.end_run(self.context)


def joined(chunks: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for delta in (choice.delta for chunk in chunks for choice in chunk.choices):
        message["content"] += delta.content or ""
        for piece in delta.tool_calls or ():
            calls = message.setdefault("tool_calls", [])
            if piece.id is not None:
                calls.append({"id": piece.id, "type": "function", "function": {"name": piece.function.name}})
                calls[-1]["function"]["arguments"] = ""
            calls[piece.index]["function"]["arguments"] += piece.function.arguments
    message["content"] = message["content"] or None
    return message


BODIES: Any = pytest.mark.parametrize(
    "body", [{"stream": True, "stream_options": {"include_usage": True}}, {"stream": True}, {}]
)


@pytest.mark.parametrize("library", CLIENTS)
@BODIES
async def test_a_conversation_in_one_request(library: str, body: dict[str, Any]) -> None:
    async def seen(*, is_ours: bool) -> tuple[str, int, Any]:
        pace = Pace(ANSWERS, GUESSES, is_held=is_ours)
        async with LeakCheck(), EngineServer({"m": pace.script}) as server:
            async with a_client(server, CLIENTS[library]()) as client:
                speculation = speculation_of(server, GUESSES, pace) if is_ours else None
                agent = Agent(client, speculation, **body)
                await agent.run()
                if speculation is not None:
                    await quiet(speculation)
                    assert pace.of(EngineUnavailable) == pace.of(StreamAborted) == []
            return named(agent.seen), server.statistics().num_requests, server.engine_statistics()

    stock, num_stock_requests, _ = await seen(is_ours=False)
    ours, num_requests, engine = await seen(is_ours=True)
    assert ours == stock
    assert (num_requests, num_stock_requests) == (1, 3)
    assert (engine.num_outputs, engine.num_injected, engine.num_refused_posts) == (2, 2, 0)


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
@BODIES
def test_a_sync_conversation_in_one_request(library: str, body: dict[str, Any]) -> None:
    kind = pytest.importorskip(library).Client

    def seen(*, is_ours: bool) -> tuple[str, int]:
        pace = Pace(ANSWERS, GUESSES, is_held=is_ours)
        with EngineServer({"m": pace.script}) as server, kind() as http_client:
            speculation = speculation_of(server, GUESSES, pace) if is_ours else None
            client = openai.OpenAI(base_url=server.base_url, api_key="key", max_retries=0, http_client=http_client)
            agent = Agent(client, speculation, **body)
            agent.run_blocking()
            set_current_turn(None)
            if speculation is not None:
                assert len(speculation.engine.idle_streams) == 0  # type: ignore[union-attr]
                speculation.close()
            return named(agent.seen), server.statistics().num_requests

    stock, num_stock_requests = seen(is_ours=False)
    ours, num_requests = seen(is_ours=True)
    assert ours == stock
    assert (num_requests, num_stock_requests) == (1, 3)


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "required"},
        {"n": 2},
        {"stop": ["x"]},
        {"response_format": {"type": "json_object"}},
        {"extra_headers": {"X-Request-Id": "mine"}},
    ],
)
async def test_what_the_engine_would_leave_alone_is_sent_as_it_is(body: dict[str, Any]) -> None:
    pace = Pace(ANSWERS, GUESSES, is_held=False)
    async with LeakCheck(), EngineServer({"m": pace.script}) as server, a_client(server) as client:
        speculation = speculation_of(server, GUESSES, pace)
        agent = Agent(client, speculation, **body)
        await agent.run()
        await quiet(speculation)
        assert server.statistics().num_requests == 3
        assert server.engine_statistics().num_responses == 0
        assert pace.of(EngineUnavailable) == []


async def test_requests_of_no_turn_and_other_requests_pass_through() -> None:
    async with LeakCheck(), EngineServer({"m": FINAL}) as server, a_client(server) as client:
        speculation = speculation_of(server, [])
        follow(client)
        set_current_turn(None)
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}], tools=TOOLS)
        agent = Agent(client, speculation)
        agent.start_turn(asyncio.get_running_loop())
        assert [model.id async for model in client.models.list()] == ["m"]
        set_current_turn(None)
        speculation.end_run(agent.context)
        assert "x-spectool-turns" not in server.requests[0].headers


@pytest.mark.parametrize("status", [400, 503])
async def test_an_error_of_the_server_is_the_users(status: int) -> None:
    async with LeakCheck(), EngineServer({"m": Answer(fault=HttpError(status))}) as server, a_client(server) as client:
        pace = Pace([FINAL], [], is_held=False)
        with pytest.raises(openai.APIStatusError) as caught:
            await Agent(client, speculation_of(server, [], pace)).run()
        assert caught.value.status_code == status
        assert pace.of(EngineUnavailable) == []


async def test_a_server_that_is_not_there() -> None:
    async with EngineServer({"m": FINAL}) as server:
        pass
    pace = Pace([FINAL], [], is_held=False)
    async with LeakCheck(), a_client(server) as client:
        with pytest.raises(openai.APIConnectionError):
            await Agent(client, speculation_of(server, [], pace)).run()
    assert [event.reason for event in pace.of(EngineUnavailable)] == ["unreachable"]


async def test_an_error_instead_of_a_second_turn_is_asked_again() -> None:
    """What the engine says on the resident stream is seen by nobody; the request of its own gets the server's word."""
    answers = iter([Answer(fault=HttpError(400)), FINAL])

    def script(request: Any) -> Answer:
        return pace.script[0] if request.turn == 0 else next(answers)

    pace = Pace([asks("a"), FINAL], [["a"]], is_held=True)
    async with LeakCheck(), EngineServer({"m": script}) as server, a_client(server) as client:
        speculation = speculation_of(server, [["a"]], pace)
        agent = Agent(client, speculation)
        await agent.run()
        await quiet(speculation)
        assert agent.messages[-1]["content"] == FINAL.text
        assert server.statistics().num_requests == 2


async def test_an_engine_that_never_goes_on_ends_the_response() -> None:
    """The tool runs for longer than the engine holds the turn."""
    pace = Pace([asks("a"), FINAL], [[]], is_held=False)
    behaviour = EngineBehaviour(hold_s=0.01)
    async with LeakCheck(), EngineServer({"m": pace.script}, behaviour) as server, a_client(server) as client:
        speculation = speculation_of(server, [["a"]], pace)
        agent = Agent(client, speculation)
        released = asyncio.Event()

        async def lookup(q: str) -> str:
            await released.wait()
            return f"found {q}"

        agent.toolbox.add_function("lookup", lookup, parameters={"q"})
        running = asyncio.create_task(agent.run())
        await server.until_engine(lambda counts: counts.num_pending + counts.num_refused_posts == 1)
        await server.until(lambda counts: counts.num_completed_requests == 1)
        released.set()
        await running
        await quiet(speculation)
        assert server.statistics().num_requests == 2


@BODIES
async def test_the_replys_headers_are_stocks(body: dict[str, Any]) -> None:
    """Frameworks can be told to keep them with the message."""
    pace = Pace(ANSWERS, GUESSES, is_held=False)
    async with LeakCheck(), EngineServer({"m": pace.script}) as server, a_client(server) as client:
        speculation = speculation_of(server, GUESSES, pace)
        agent = Agent(client, speculation)
        agent.start_turn(asyncio.get_running_loop())
        options = {"messages": agent.messages, **agent.body, **body}
        reply = await agent.client.chat.completions.with_raw_response.create(**options)
        parsed = reply.parse()
        if body:
            assert [chunk async for chunk in parsed]
        assert "x-spectool" not in reply.headers
        assert reply.headers["content-type"].startswith("text/event-stream" if body else "application/json")
        set_current_turn(None)
        speculation.end_run(agent.context)
        await quiet(speculation)


class Redirecting(httpx.AsyncBaseTransport):
    """Sends what comes for an address to the same server under its name."""

    def __init__(self) -> None:
        self.inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.host == "127.0.0.1":
            return httpx.Response(307, headers={"location": str(request.url.copy_with(host="localhost"))})
        return await self.inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self.inner.aclose()


@BODIES
async def test_a_request_that_is_sent_elsewhere_is_the_users_own(body: dict[str, Any]) -> None:
    pace = Pace(ANSWERS, GUESSES, is_held=False)
    following = httpx.AsyncClient(transport=Redirecting(), follow_redirects=True)
    async with LeakCheck(), EngineServer({"m": pace.script}) as server, a_client(server, following) as client:
        speculation = speculation_of(server, GUESSES, pace)
        await Agent(client, speculation, **body).run()
        await quiet(speculation)
        assert server.statistics().num_requests == 3
        for request in server.requests:
            assert not {"x-spectool-turns", "x-spectool-secret", "x-request-id"} & set(request.headers)


class SentTwice(httpx.AsyncBaseTransport):
    """As one that sends a request again while the server still has the first: its id is taken."""

    def __init__(self) -> None:
        self.inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if "x-request-id" in request.headers:
            return httpx.Response(409, json={"error": {"code": "duplicate_id"}}, headers={"X-Spectool": "1"})
        return await self.inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self.inner.aclose()


@BODIES
async def test_an_id_that_is_taken_is_no_error_of_the_users(body: dict[str, Any]) -> None:
    pace = Pace(ANSWERS, GUESSES, is_held=False)
    twice = httpx.AsyncClient(transport=SentTwice())
    async with LeakCheck(), EngineServer({"m": pace.script}) as server, a_client(server, twice) as client:
        speculation = speculation_of(server, GUESSES, pace)
        agent = Agent(client, speculation, **body)
        await agent.run()
        await quiet(speculation)
        assert agent.messages[-1]["content"] == FINAL.text


@pytest.mark.parametrize("order", [[True, False, True], [False, True, False]])
async def test_a_stream_is_left_by_a_client_that_cannot_read_it(order: list[bool]) -> None:
    """One node asks through the sync client and the async one in turn."""
    pace = Pace(ANSWERS, GUESSES, is_held=True)
    async with LeakCheck(), EngineServer({"m": pace.script}) as server, a_client(server) as client:
        with httpx.Client() as http_client:
            blocking = openai.OpenAI(base_url=server.base_url, api_key="key", max_retries=0, http_client=http_client)
            speculation = speculation_of(server, GUESSES, pace)
            agent = Agent(client, speculation)
            follow(blocking)
            ask_blocking = blocking.chat.completions.create
            for is_async in order:
                turn = agent.start_turn(asyncio.get_running_loop())
                options = {"messages": agent.messages, **agent.body}
                if is_async:
                    reply = await agent.client.chat.completions.create(**options)
                else:
                    reply = await asyncio.to_thread(ask_blocking, **options)
                calls = agent.take(reply)
                turn.answer(calls)
                for call in calls:
                    agent.give(call, (await turn.claim(call)).result)
            set_current_turn(None)
            speculation.end_run(agent.context)
            await quiet(speculation)
            assert agent.messages[-1]["content"] == FINAL.text
            assert server.statistics().num_requests == 3
            assert pace.of(EngineUnavailable) == []
            assert [event.reason for event in pace.of(StreamAborted)] == ["different_request"] * 2


@pytest.mark.parametrize("client_class", [httpx.AsyncClient, openai.DefaultAioHttpClient])
async def test_a_stream_that_stays_is_not_in_the_way_of_other_requests(client_class: Any) -> None:
    """A tool asks the same server through the same client, which has one connection."""
    http_client = client_class(limits=httpx.Limits(max_connections=1), timeout=5.0)
    pace = Pace([asks("a"), FINAL], [["a"]], is_held=True)
    async with LeakCheck(), EngineServer({"m": pace.script}) as server, a_client(server, http_client) as client:
        speculation = speculation_of(server, [["a"]], pace)
        agent = Agent(client, speculation)
        agent.start_turn(asyncio.get_running_loop())
        pace.open()
        await agent.client.chat.completions.create(messages=agent.messages, **agent.body)
        set_current_turn(None)
        await client.models.list()
        speculation.end_run(agent.context)
        await quiet(speculation)


async def test_a_call_that_somebody_else_answers_is_not_waited_for() -> None:
    """As by a middleware with a limit or a cache of its own, while the early run goes on and the engine holds."""
    pace = Pace([asks("a"), FINAL], [["a"]], is_held=False)
    behaviour = EngineBehaviour(hold_s=60.0)
    released = asyncio.Event()

    async def lookup(q: str) -> str:
        await released.wait()
        return f"found {q}"

    async with LeakCheck(), EngineServer({"m": pace.script}, behaviour) as server, a_client(server) as client:
        speculation = speculation_of(server, [["a"]], pace)
        agent = Agent(client, speculation, stream=True)
        agent.toolbox.add_function("lookup", lookup, parameters={"q"})
        latch = pace.latches[0] = Latch()
        pace.script[0] = Answer(tool_calls=pace.script[0].tool_calls, latch=latch)
        turn = agent.start_turn(asyncio.get_running_loop())
        asked = asyncio.create_task(agent.client.chat.completions.create(messages=agent.messages, **agent.body))
        await server.until_engine(lambda counts: counts.num_pending == 1)
        latch.open()
        (call,) = agent.take([chunk async for chunk in await asked])
        turn.answer([call])
        await server.until_engine(lambda counts: counts.num_parked == 1)
        agent.give(call, "the limit is reached")
        async with asyncio.timeout(20.0):
            agent.start_turn(asyncio.get_running_loop())
            reply = await agent.client.chat.completions.create(messages=agent.messages, **agent.body)
            assert agent.take([chunk async for chunk in reply]) == []
        set_current_turn(None)
        released.set()
        speculation.end_run(agent.context)
        turn.settle()
        await quiet(speculation)
        assert server.statistics().num_requests == 2


async def test_a_request_after_the_answer_is_none_of_the_turns() -> None:
    """As of a node that asks the same client once more, by itself."""
    pace = Pace([asks("a"), FINAL], [["a"]], is_held=True)
    async with LeakCheck(), EngineServer({"m": pace.script}) as server, a_client(server) as client:
        speculation = speculation_of(server, [["a"]], pace)
        agent = Agent(client, speculation)
        turn = agent.start_turn(asyncio.get_running_loop())
        pace.open()
        turn.answer(agent.take(await client.chat.completions.create(messages=agent.messages, **agent.body)))
        await client.chat.completions.create(messages=[{"role": "user", "content": "other"}], **agent.body)
        turn.settle()
        speculation.end_run(agent.context)
        await quiet(speculation)
        assert ["x-spectool-turns" in request.headers for request in server.requests] == [True, False]
        assert [event.reason for event in pace.of(StreamAborted)] == ["run_ended"]


async def test_a_client_that_is_closed_closes_its_own_transport() -> None:
    http_client = httpx.AsyncClient()
    client = openai.AsyncOpenAI(api_key="key", http_client=http_client)
    closed: list[str] = []

    class Inner(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, json={"data": [], "object": "list"})

        async def aclose(self) -> None:
            closed.append("inner")

    http_client._transport = Inner()
    assert follow(client)
    async with client:
        await client.models.list()
    assert closed == ["inner"]
    with pytest.raises(openai.APIConnectionError):
        await client.models.list()


async def test_a_client_lives_no_longer_than_without() -> None:
    client = openai.AsyncOpenAI(api_key="key", http_client=httpx.AsyncClient())
    follow(client)
    there = weakref.ref(client)
    await client.close()
    del client
    gc.collect()
    assert there() is None


@pytest.fixture(autouse=True)
def _no_turn_left() -> Iterator[None]:
    yield
    set_current_turn(None)

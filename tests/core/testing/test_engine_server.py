"""The fake engine keeps the plugin's HTTP contract."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from spectool_core.testing import Answer, EngineBehaviour, EngineServer, Latch, LeakCheck, ScriptedCall
from spectool_core.vllm.wire import OUTPUTS_PATH, REPLY_HEADER, REQUEST_ID_HEADER, SECRET_HEADER, TURNS_HEADER

SECRET = "0123456789abcdef"
ENTRY = {"name": "lookup", "params": {"q": "a"}}
BODY = {"model": "m", "messages": [{"role": "user", "content": "go"}], "stream": True}
PATH = f"{OUTPUTS_PATH}chatcmpl-r"


class Conversation:
    """One response of a fake engine, whose first turn ends when the test says so."""

    def __init__(self, server: EngineServer, client: httpx.AsyncClient, latch: Latch) -> None:
        self.server = server
        self.client = client
        self.latch = latch
        self._reply = asyncio.create_task(self.chat())

    async def chat(self, **headers: str) -> httpx.Response:
        given = {REQUEST_ID_HEADER: "r", SECRET_HEADER: SECRET, TURNS_HEADER: "1", **headers}
        return await self.client.post("/v1/chat/completions", json=BODY, headers=given)

    async def ask(self, method: str, body: Any = None, secret: str = SECRET) -> httpx.Response:
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        return await self.client.request(method, PATH, content=content, headers={SECRET_HEADER: secret})

    async def post(self, *entries: dict[str, Any]) -> Any:
        return (await self.ask("POST", list(entries))).raise_for_status().json()

    async def end(self) -> list[str]:
        """What the engine went on from, once the first turn has ended: the contents of tool messages."""
        self.latch.open()
        lines = (await self._reply).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        return [message["content"] for event in events for message in event.get("messages", ())[1:]]


@asynccontextmanager
async def conversation(behaviour: EngineBehaviour | None = None) -> AsyncIterator[Conversation]:
    latch = Latch()
    answers = [Answer(tool_calls=[ScriptedCall("lookup", {"q": "a"})], latch=latch), Answer("done")]
    async with LeakCheck(), EngineServer({"m": answers}, behaviour) as server, httpx.AsyncClient() as client:
        client.base_url = httpx.URL(server.base_url.removesuffix("/v1"))
        made = Conversation(server, client, latch)
        try:
            await server.until_engine(lambda counts: counts.num_responses == 1)
            yield made
        finally:
            await made.end()


@pytest.mark.parametrize("later", [{"output": "other"}, {"pending": True}, {"pending": False}])
async def test_an_output_that_is_there_stays(later: dict[str, Any]) -> None:
    async with conversation() as talk:
        assert await talk.post({**ENTRY, "output": "first"}) == {"cached": 1}
        assert await talk.post({**ENTRY, **later}) == {"cached": 0}
        assert await talk.end() == ["first"]


@pytest.mark.parametrize(("output", "text"), [("text", "text"), ({"é": [1, None]}, '{"é":[1,null]}'), (None, "null")])
async def test_outputs_are_injected_as_the_plugin_writes_them(output: Any, text: str) -> None:
    async with conversation() as talk:
        await talk.post({**ENTRY, "pending": True}, {**ENTRY, "output": output})
        assert await talk.end() == [text]


async def test_what_is_withdrawn_is_not_waited_for() -> None:
    async with conversation(EngineBehaviour(hold_s=60.0)) as talk:
        assert await talk.post({**ENTRY, "pending": False}) == {"cached": 0}
        assert await talk.post({**ENTRY, "pending": True}, {**ENTRY, "pending": False}) == {"cached": 2}
        assert await talk.end() == []


async def test_the_entry_of_this_turn_goes_before_one_of_any() -> None:
    async with conversation() as talk:
        await talk.post({**ENTRY, "output": "any"}, {**ENTRY, "output": "second", "turn": 2})
        await talk.post({**ENTRY, "output": "first", "turn": 1})
        assert await talk.end() == ["first"]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "malformed_json", None),
        (b"[NaN]", "malformed_json", None),
        ([{"name": ""}], "invalid_field", "0.name"),
        ([ENTRY], "invalid_field", "0.output"),
        ([{**ENTRY, "output": 1, "other": 2}], "invalid_field", "0.other"),
    ],
)
async def test_what_is_no_post_is_refused_in_the_plugins_words(body: Any, code: str, param: str | None) -> None:
    async with conversation() as talk:
        reply = await talk.ask("POST", body)
        assert (reply.status_code, reply.headers[REPLY_HEADER]) == (422, "1")
        assert (reply.json()["error"]["code"], reply.json()["error"]["param"]) == (code, param)
        counts = talk.server.engine_statistics()
        assert (counts.num_posts, counts.num_refused_posts) == (0, 1)


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_without_the_secret_there_is_no_response(method: str) -> None:
    async with conversation() as talk:
        assert (await talk.ask(method, [], secret="another secret of 16")).status_code == 404


async def test_the_status_is_told_and_is_no_post() -> None:
    async with conversation() as talk:
        await talk.post({**ENTRY, "pending": True, "turn": 1})
        told = (await talk.ask("GET")).raise_for_status().json()
        assert (told["response_id"], told["state"], told["turn"]) == ("chatcmpl-r", "running", 1)
        assert told["entries"] == [{**ENTRY, "state": "pending", "turn": 1}]
        await talk.post({**ENTRY, "output": "x", "turn": 1})
        await talk.end()
        told = (await talk.ask("GET")).raise_for_status().json()
        assert (told["state"], told["turn"], told["entries"]) == ("finished", 2, [])
        assert [each["output"] for each in told["injected"]] == ["x"]
        assert talk.server.engine_statistics().num_posts == 2
        assert (await talk.ask("PUT")).status_code == 405


async def test_a_response_that_is_ended_within_a_turn_ends_with_all_of_it() -> None:
    latch, ends = Latch(), [None, "tool_calls"]
    answer = Answer(text="a longer text", tool_calls=[ScriptedCall("lookup", {"q": "a"})], latch=latch)
    async with LeakCheck(), EngineServer({"m": [answer, Answer("done")]}) as server, httpx.AsyncClient() as client:
        client.base_url = httpx.URL(server.base_url.removesuffix("/v1"))
        talk = Conversation(server, client, latch)
        await server.until_engine(lambda counts: counts.num_responses == 1)
        await talk.post({**ENTRY, "output": "x"})
        await talk.ask("DELETE")
        assert await talk.end() == []
        text = (await talk._reply).text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        choices = [choice for each in chunks for choice in each.get("choices", ())]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == "a longer text"
        assert sorted({choice["finish_reason"] for choice in choices}, key=str) == ends
        assert [line for line in text.splitlines() if line.startswith("event")] == ["event: spectool.turn"]
        assert text.endswith("data: [DONE]\n\n")


async def test_a_response_that_its_client_ends_goes_on_to_no_turn() -> None:
    async with conversation() as talk:
        await talk.post({**ENTRY, "output": "x"})
        assert (await talk.ask("DELETE")).json() == {"response_id": "chatcmpl-r", "state": "finished"}
        assert await talk.end() == []
        assert talk.server.engine_statistics().num_deleted == 1


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_a_response_that_has_finished_is_left_alone(method: str) -> None:
    async with conversation() as talk:
        await talk.end()
        reply = await talk.ask(method, [])
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "finished")


async def test_a_chat_request_that_cannot_be_posted_to_is_refused() -> None:
    async with conversation() as talk:
        taken, short = await talk.chat(), await talk.chat(**{REQUEST_ID_HEADER: "other", SECRET_HEADER: "short"})
        assert [(reply.status_code, REPLY_HEADER in reply.headers) for reply in (taken, short)] == [
            (409, True),
            (422, True),
        ]

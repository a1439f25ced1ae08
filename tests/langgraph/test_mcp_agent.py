"""Tools of an MCP server in a speculative agent: marked by name, run early over the same session."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from spectool_core import Speculation, mark
from tests.guessing import Call, Reply, outcomes, predicting
from tests.langgraph.agents import Seen, build, in_order, run

adapters = pytest.importorskip("langchain_mcp_adapters.tools")
memory = pytest.importorskip("mcp.shared.memory")
fastmcp = pytest.importorskip("mcp.server.fastmcp")

REPLIES = [
    Reply(calls=(Call("double", {"x": 1}, "call_0"), Call("double", {"x": "2"}, "call_1")), generation_s=0.3),
    Reply(calls=(Call("store", {"x": 3}, "call_0"),), generation_s=0.0),
    Reply(calls=(Call("fail", {"x": 4}, "call_0"),), generation_s=0.3),
    Reply(text="done", generation_s=0.0),
]


async def test_an_agent_with_mcp_tools() -> None:
    server = fastmcp.FastMCP("numbers", log_level="ERROR")
    ran: list[tuple[str, int]] = []

    @server.tool()
    def double(x: int) -> int:
        """Double a number."""
        ran.append(("double", x))
        return 2 * x

    @server.tool()
    def store(x: int) -> str:
        """Keep a number: not marked."""
        ran.append(("store", x))
        return "stored"

    @server.tool()
    def fail(x: int) -> int:
        """Fail."""
        ran.append(("fail", x))
        raise ValueError("no such number")

    async def play(speculation: Speculation | None) -> tuple[Seen, list[tuple[str, int]]]:
        ran.clear()
        async with memory.create_connected_server_and_client_session(server) as session:
            tools = mark(await adapters.load_mcp_tools(session), names=["double", "fail"])
            seen = await run(build(REPLIES, tools, speculation, handle_tool_errors=True).compile())
        return seen, list(ran)

    speculation = predicting(REPLIES, after_s=0.0)
    (stock, in_stock), (ours, in_ours) = await play(None), await play(speculation)
    assert stock.error is None
    assert ours.messages == stock.messages
    assert [event[:1] for event in in_order(ours.callbacks)] == [event[:1] for event in in_order(stock.callbacks)]
    assert in_stock == [("double", 1), ("double", 2), ("store", 3), ("fail", 4)]
    assert sorted(in_ours) == sorted([*in_stock, ("fail", 4)])
    assert outcomes(speculation, "double") == (2, 0, 0)
    assert outcomes(speculation, "fail") == (0, 0, 1)


async def test_a_hint_of_the_server_marks_nothing() -> None:
    """`readOnlyHint` is the server's word, not the user's."""
    from mcp.types import ToolAnnotations

    server = fastmcp.FastMCP("numbers", log_level="ERROR")
    ran: list[int] = []

    @server.tool(annotations=ToolAnnotations(readOnlyHint=True, idempotentHint=True))
    def double(x: int) -> int:
        """Double a number."""
        ran.append(x)
        return 2 * x

    replies: list[Any] = [Reply(calls=(Call("double", {"x": 1}, "call_0"),), generation_s=0.05), REPLIES[-1]]
    speculation = predicting(replies, after_s=0.0)
    async with memory.create_connected_server_and_client_session(server) as session:
        tools = await adapters.load_mcp_tools(session)
        assert (await run(build(replies, tools, speculation).compile())).error is None
    assert ran == [1]
    assert speculation.statistics().num_turns == 0
    await asyncio.sleep(0)

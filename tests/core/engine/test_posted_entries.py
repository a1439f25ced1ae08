"""What the client posts is what the server takes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from spectool_core.cache import Run
from spectool_core.calls import ToolCall
from spectool_core.canonical import CallKey
from spectool_core.engine import EngineTurn
from spectool_core.engine.idle_streams import Place
from spectool_core.runs import PreparedCall, Scope
from spectool_core.testing import run_virtual
from spectool_core.vllm.wire import call_key, read_tool_outputs
from tests.core.engine.test_turn import ADDRESS, Engine
from tests.core.fakes import READ

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def run_of(params: dict[str, Any], name: str) -> Run:
    call = ToolCall(name, params)
    scope = Scope(None, None)
    key = CallKey(run_of, scope, name)
    prepared = PreparedCall(call, key, scope, READ, run=lambda: None, blocking=False, content=lambda result: result)
    return Run(prepared, "speculator", stamp=0, timeout_s=None)


async def posts(params: dict[str, Any], content: str) -> list[list[dict[str, Any]]]:
    """What is posted for a run that succeeds and one that fails."""
    engine = Engine()
    turn = EngineTurn(1, Place("run", None), asyncio.get_running_loop(), engine)  # type: ignore[arg-type]
    turn.accepted(ADDRESS)
    succeeded, failed = run_of(params, "good"), run_of(params, "bad")
    for run in (succeeded, failed):
        turn.begun(run)
    await asyncio.sleep(0)
    succeeded.result = content
    turn.ended(succeeded, "succeeded")
    turn.ended(failed, "failed")
    await asyncio.sleep(0)
    turn.settled()
    return engine.posts


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.text(max_size=5))
def test_the_server_takes_what_the_client_posts(params: dict[str, Any], content: str) -> None:
    first, second = run_virtual(lambda: posts(params, content))
    assert [entry["pending"] for entry in first] == [True, True]
    assert [entry.get("output", "withdrawn") for entry in second] == [content, "withdrawn"]
    for entries in (first, second):
        taken = read_tool_outputs(json.dumps(entries).encode())
        assert [output.model_dump(exclude_unset=True) for output in taken] == entries
        assert [call_key(output.name, output.params) for output in taken] == [
            call_key(entry["name"], params) for entry in entries
        ]

"""What the client posts is what the server takes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spectool_core.vllm.wire import ToolOutput

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.text(max_size=5))
def test_the_server_takes_what_the_client_posts(params: dict[str, Any], content: str) -> None:
    for told in ({"pending": True}, {"pending": False}, {"output": content}):
        ToolOutput.model_validate({"name": "lookup", "params": params, "turn": 1, **told})

"""Hypothesis strategies for JSON and for text that arrives in pieces."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


def json_values() -> st.SearchStrategy[Any]:
    """Any JSON value."""
    return st.recursive(_scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def json_objects(*, min_size: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    """Any JSON object."""
    return st.dictionaries(st.text(max_size=8), json_values(), min_size=min_size, max_size=4)


@st.composite
def pieces_of(draw: st.DrawFn, text: str) -> list[str]:
    """`text` cut anywhere, with empty pieces too."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

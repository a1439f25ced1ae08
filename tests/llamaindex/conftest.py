"""Settings of the adapter's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from workflows.plugins.basic import InternalAsyncioAdapter


def pytest_configure(config: pytest.Config) -> None:
    # A workflow looks at every attribute of an agent, which is a pydantic model with deprecated ones.
    for category in ("PydanticDeprecatedSince20", "PydanticDeprecatedSince211"):
        config.addinivalue_line("filterwarnings", f"ignore::pydantic.warnings.{category}:inspect")
    # What saves a context leaves the memory out.
    unsaved = "workflows.context.state_store.UnserializableKeyWarning"
    config.addinivalue_line("filterwarnings", f"ignore::{unsaved}")
    # A ReActAgent asks its context whether it is running.
    config.addinivalue_line("filterwarnings", "ignore:is_running called:DeprecationWarning")


async def _loop_time(_: InternalAsyncioAdapter) -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture(scope="package", autouse=True)
def _workflows_on_the_loops_clock() -> Iterator[None]:
    """Workflows measure their timeouts by wall time, and a virtual clock would never get there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InternalAsyncioAdapter, "get_now", _loop_time)
        yield

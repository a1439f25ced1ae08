from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import closing

import pytest
from langchain_core.tools import BaseTool

from examples.demo.archive import Archive
from examples.demo.pages import serve_pages
from examples.demo.tools import ToolLog, archive_tools


def pytest_configure(config: pytest.Config) -> None:
    # looptime's plugin makes an event loop before each sync test and never closes it: a ResourceWarning.
    plugin = config.pluginmanager.get_plugin("looptime_plugin")
    if plugin is not None:
        config.pluginmanager.unregister(plugin)


@pytest.fixture
def archive() -> Iterator[Archive]:
    with closing(Archive()) as archive:
        yield archive


@pytest.fixture
def log() -> ToolLog:
    return ToolLog()


@pytest.fixture
async def tools(archive: Archive, log: ToolLog) -> AsyncIterator[Mapping[str, BaseTool]]:
    async with serve_pages(archive) as site:
        yield {tool.name: tool for tool in archive_tools(archive, site, log, delay_s=0)}

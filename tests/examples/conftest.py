from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import closing

import pytest
from langchain_core.tools import BaseTool

from examples.demo.archive import Archive
from examples.demo.pages import serve_pages
from examples.demo.tools import ToolLog, archive_tools


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

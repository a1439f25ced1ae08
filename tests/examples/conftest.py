from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import closing

import pytest

from examples.demo.archive import Archive
from examples.demo.pages import serve_pages
from examples.demo.tools import Tool, ToolLog, archive_tools


def pytest_configure(config: pytest.Config) -> None:
    # A workflow looks at every attribute of an agent, which is a pydantic model with deprecated ones.
    config.addinivalue_line("filterwarnings", "ignore::pydantic.warnings.PydanticDeprecationWarning:inspect")


@pytest.fixture
def archive() -> Iterator[Archive]:
    with closing(Archive()) as archive:
        yield archive


@pytest.fixture
def log() -> ToolLog:
    return ToolLog()


@pytest.fixture
async def tools(archive: Archive, log: ToolLog) -> AsyncIterator[Mapping[str, Tool]]:
    async with serve_pages(archive) as site:
        yield {tool.__name__: tool for tool in archive_tools(archive, site, log, delay_s=0)}

"""The same papers as a web site on loopback, and how to read a page of it: real sockets, real HTML."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import escape
from html.parser import HTMLParser

from aiohttp import ClientSession, ClientTimeout, web

from examples.demo.archive import Archive, ArchiveError

__all__ = ["fetch_text", "page_of", "serve_pages", "text_of"]

_TIMEOUT = ClientTimeout(total=30)


@asynccontextmanager
async def serve_pages(archive: Archive) -> AsyncIterator[str]:
    """Serve `operations/notice-14.md` as `/operations/notice-14.html`, and so on; gives the site's URL."""

    async def page(request: web.Request) -> web.Response:
        try:
            markdown = archive.read(f"{request.match_info['name']}.md")
        except ArchiveError:
            raise web.HTTPNotFound from None
        return web.Response(text=page_of(markdown), content_type="text/html")

    application = web.Application()
    application.router.add_get("/{name:.+}.html", page)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def fetch_text(url: str) -> str:
    """GET a page and give what a reader would see of it. Raises ArchiveError where there is no such page."""
    async with ClientSession(timeout=_TIMEOUT) as session, session.get(url) as response:
        if not response.ok:
            raise ArchiveError(f"no page {response.url.path} ({response.status})")
        return text_of(await response.text())


def page_of(markdown: str) -> str:
    """Make a page of a document: headings and paragraphs; tables and lists keep their lines."""
    blocks = [block.strip("\n") for block in markdown.split("\n\n") if block.strip()]
    title = escape(blocks[0].lstrip("# "))
    body = "\n".join(_element(block) for block in blocks)
    return f'<!doctype html>\n<html lang="en">\n<head><title>{title}</title></head>\n<body>\n{body}\n</body>\n</html>\n'


def _element(block: str) -> str:
    block = block.replace("**", "")
    for tag, mark in (("h2", "## "), ("h1", "# ")):
        if block.startswith(mark):
            return f"<{tag}>{escape(block.removeprefix(mark))}</{tag}>"
    if block.startswith(("|", "- ", "1. ")):
        return f"<pre>{escape(block)}</pre>"
    return f"<p>{escape(block)}</p>"


def text_of(page: str) -> str:
    """Give the visible text of a page."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    return "\n\n".join(reader.blocks)


class _Reader(HTMLParser):
    """Collects the text of the body, block by block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[str] = []
        self._is_inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self._is_inside = self._is_inside or tag == "body"

    def handle_data(self, data: str) -> None:
        if self._is_inside and data.strip():
            self.blocks.append(data.strip())

"""The agent's tools: full-text search, grep, file reading and a page fetch, marked; and a note book, which is not.

Plain functions, of which each framework makes its own tools. They do their work for real. What is declared is the time
that a network would add: every call first waits `delay_s`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeAlias

from examples.demo.archive import Archive, ArchiveError
from examples.demo.pages import fetch_text
from spectool_core.annotation import speculatable

__all__ = ["Tool", "ToolLog", "ToolRun", "archive_tools", "received"]

P = ParamSpec("P")

Tool: TypeAlias = Callable[..., Awaitable[str]]
"""An async function, named as the models call it."""

_MAX_LINES = 20


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One run of a tool's own code, for the main model or ahead of it.

    Args:
        tool: its name.
        arguments: what it received, defaults included.
        started_s: on the event loop's clock.
        ended_s: on the same clock.
        is_cancelled: whether it was stopped before it had a result.
    """

    tool: str
    arguments: Mapping[str, Any]
    started_s: float
    ended_s: float
    is_cancelled: bool


class ToolLog:
    """Every run of the tools that write to it, in the order in which they ended."""

    def __init__(self) -> None:
        self.runs: list[ToolRun] = []
        self.num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def until_idle(self) -> None:
        """Wait until no tool is running."""
        await self._idle.wait()

    def logged(self, body: Callable[P, Awaitable[str]]) -> Callable[P, Awaitable[str]]:
        """Give `body` with each of its runs written down; signature and name stay."""

        @functools.wraps(body)
        async def run(*args: P.args, **kwargs: P.kwargs) -> str:
            arguments = received(body, *args, **kwargs)
            started_s, is_cancelled = self._now(), False
            self._count(+1)
            try:
                return await body(*args, **kwargs)
            except asyncio.CancelledError:
                is_cancelled = True
                raise
            finally:
                self.runs.append(ToolRun(body.__name__, arguments, started_s, self._now(), is_cancelled))
                self._count(-1)

        vars(run)["__signature__"] = inspect.signature(body)  # its own: it passes on what it is given
        return run

    def _count(self, change: int) -> None:
        self.num_running += change
        if self.num_running:
            self._idle.clear()
        else:
            self._idle.set()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def received(tool: Tool, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
    """The arguments that `tool` receives, defaults included. Raises TypeError where it does not take them."""
    bound = inspect.signature(tool).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def archive_tools(archive: Archive, site: str, log: ToolLog, *, delay_s: float) -> list[Tool]:
    """Make the tools of one agent run.

    Args:
        archive: what they work on.
        site: the URL under which `fetch_page` finds the archive's pages.
        log: where their runs are written down.
        delay_s: the declared network delay of each call.
    """

    def remote(body: Callable[P, Awaitable[str]]) -> Callable[P, Awaitable[str]]:
        @log.logged
        @functools.wraps(body)
        async def run(*args: P.args, **kwargs: P.kwargs) -> str:
            await asyncio.sleep(delay_s)
            try:
                return await body(*args, **kwargs)
            except ArchiveError as refusal:
                return f"error: {refusal}"

        return run

    @speculatable
    @remote
    async def search(query: str, limit: int = 3) -> str:
        """Full-text search over the railway's papers: the best sections, each with its path and an excerpt."""
        passages = archive.search(query, limit)
        return "\n".join(f"{found.path} ({found.heading}): {found.excerpt}" for found in passages) or "nothing found"

    @speculatable
    @remote
    async def grep(pattern: str, under: str = "") -> str:
        """Lines that match a regular expression, in papers whose path begins with `under`."""
        lines = archive.grep(pattern, under)
        shown = [f"{line.path}:{line.number}: {line.text}" for line in lines[:_MAX_LINES]]
        if len(lines) > _MAX_LINES:
            shown.append(f"... and {len(lines) - _MAX_LINES} more")
        return "\n".join(shown) or "no line matches"

    @speculatable
    @remote
    async def read_file(path: str) -> str:
        """The whole text of one paper, by its path."""
        return archive.read(path)

    @speculatable
    @remote
    async def fetch_page(page: str) -> str:
        """The text of a page of the railway's web site, such as `operations/notice-14.html`."""
        return await fetch_text(f"{site}/{page}")

    # It writes, so it carries no mark, and nothing runs it before the main model asks.
    @remote
    async def save_note(title: str, text: str) -> str:
        """Write a note into the note book that the next shift reads."""
        return f"note {archive.save_note(title, text)} saved: {title}"

    return [search, grep, read_file, fetch_page, save_note]

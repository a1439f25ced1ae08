import asyncio
from pathlib import Path

import aiohttp
import pytest

from examples.demo.archive import Archive, ArchiveError
from examples.demo.pages import page_of, serve_pages, text_of
from examples.demo.tools import archive_tools
from spectool_core import policy_of


async def test_search_puts_the_best_section_first_and_keeps_to_the_limit(tools):
    lines = (await tools["search"](query="speed restriction at km 7.2", limit=2)).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("operations/notice-14.md (Operating notice 14")


@pytest.mark.parametrize("query", ['"', "NEAR(", "a AND", "brakes* -OR", "o'clock"])
async def test_search_takes_any_words_and_no_query_language(tools, query):
    assert not (await tools["search"](query=query)).startswith("fts5")


async def test_grep_matches_lines_under_a_path(tools):
    found = await tools["grep"](pattern=r"hours lost: 9\.5", under="operations")
    assert found.startswith("operations/log-2031-02.md:10:")
    assert await tools["grep"](pattern=r"hours lost: 9\.5", under="handbook") == "no line matches"


async def test_grep_says_what_it_left_off(tools):
    assert (await tools["grep"](pattern=".")).splitlines()[-1].endswith(" more")


async def test_a_bad_expression_is_an_answer_not_an_error(tools):
    assert (await tools["grep"](pattern="(")).startswith("error: '(' is not a regular expression")


@pytest.mark.parametrize(
    "path", ["../archive.py", "/etc/passwd", "handbook/../../tasks.py", "handbook/../../../../x.md"]
)
async def test_nothing_outside_the_archive_is_read(tools, path):
    assert "is outside the archive" in await tools["read_file"](path=path)


def test_a_link_out_of_the_archive_is_not_followed(tmp_path: Path):
    root, secret = tmp_path / "root", tmp_path / "secret.md"
    root.mkdir()
    secret.write_text("# secret\n\nx")
    archive = Archive(root)
    (root / "link.md").symlink_to(secret)
    with pytest.raises(ArchiveError, match="outside"):
        archive.read("link.md")
    archive.close()


async def test_read_file_names_what_there_is(tools):
    assert "handbook/brakes.md" in await tools["read_file"](path="handbook/breaks.md")


async def test_a_page_is_fetched_over_http(tools):
    page = await tools["fetch_page"](page="operations/notice-14.html")
    assert "restricted to 10 km/h" in page
    assert "<" not in page


@pytest.mark.parametrize("page", ["operations/notice-99.html", "../agent.html", "%2e%2e/secret.html", "history.md"])
async def test_a_page_that_is_not_there_is_an_answer(tools, page):
    assert (await tools["fetch_page"](page=page)).startswith("error: no page")


async def test_the_page_server_speaks_html(archive):
    async with (
        serve_pages(archive) as site,
        aiohttp.ClientSession() as session,
        session.get(f"{site}/history.html") as response,
    ):
        assert (response.status, response.content_type) == (200, "text/html")
        assert "<h1>A short history</h1>" in await response.text()


def test_a_page_reads_as_its_document(archive):
    for path in archive.paths:
        assert text_of(page_of(archive.read(path))).split("\n\n")[0] == archive.read(path).splitlines()[0].lstrip("# ")


def test_text_is_escaped():
    assert "<script>" not in page_of("# a\n\n<script>alert(1)</script>")
    assert text_of(page_of("# a\n\n1 < 2 & 3")) == "a\n\n1 < 2 & 3"


async def test_a_note_is_written_down(tools, archive):
    assert await tools["save_note"](title="t", text="x") == "note 1 saved: t"
    assert archive.notes() == [("t", "x")]


async def test_all_but_the_note_book_are_marked(tools):
    assert {name for name, tool in tools.items() if policy_of(tool) is None} == {"save_note"}


async def test_each_run_is_written_down_with_its_defaults(tools, log):
    await tools["search"](query="wind")
    (run,) = log.runs
    assert (run.tool, run.arguments, run.is_cancelled) == ("search", {"query": "wind", "limit": 3}, False)


async def test_a_cancelled_run_is_written_down_and_waited_for(archive, log):
    read_file = next(tool for tool in archive_tools(archive, "", log, delay_s=60) if tool.__name__ == "read_file")
    running = asyncio.create_task(read_file("history.md"))
    while not log.num_running:
        await asyncio.sleep(0)
    running.cancel()
    await log.until_idle()
    assert [run.is_cancelled for run in log.runs] == [True]

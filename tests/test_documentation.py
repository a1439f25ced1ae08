"""The Python in README and docs runs, in the order in which it is read."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import ChatOpenAI

from spectool_core.testing import Answer, ModelServer, ScriptedCall, ScriptedModel

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

TURNS = [Answer(tool_calls=[ScriptedCall("search", {"query": "last train"})]), Answer("At ten past eleven.")]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    models = {"gpt-5": ScriptedModel(TURNS, generation_s=0.2), "gpt-5-nano": ScriptedModel(TURNS, generation_s=0.02)}
    with ModelServer(models) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "unused")
        yield server


async def execute(page: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        code = compile(block, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await result
    await close_clients(names)
    return names


async def close_clients(names: dict[str, Any]) -> None:
    """Close the connections that the pages' own chat models keep open."""
    for model in (getattr(value, "bound", None) for value in names.values()):
        if isinstance(model, ChatOpenAI):
            await model.root_async_client.close()
            model.root_client.close()


def test_readme(server: ModelServer, capsys: pytest.CaptureFixture[str]) -> None:
    names = asyncio.run(execute(ROOT / "README.md"))
    assert names["answer"]["messages"][-1].content == "At ten past eleven."
    statistics = names["speculation"].statistics()
    search = statistics.tools["search"]
    assert (search.num_hits, search.num_joins, search.num_misses) == (2, 0, 0)  # once by each way in
    assert statistics.num_turns == 4
    assert capsys.readouterr().out.startswith("1 calls served early, ")
    assert server.statistics().models["gpt-5-nano"].num_requests == 4


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md"], ids=lambda page: page.name)
def test_documentation(page: Path, server: ModelServer) -> None:
    if page.name == "testing.md":  # its last block makes an event loop of its own
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            names: dict[str, Any] = {"__name__": "__main__"}
            exec(compile(block, page.name, "exec", dont_inherit=True), names)
            asyncio.run(close_clients(names))
    else:
        asyncio.run(execute(page))


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"

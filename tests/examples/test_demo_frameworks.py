"""What the demonstration leaves to a framework."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from llama_index.core.tools import FunctionTool, QueryEngineTool
from openai import DefaultAsyncHttpxClient

from examples.demo.__main__ import main
from examples.demo.frameworks import FRAMEWORKS, langgraph, llamaindex, load
from examples.demo.models import Endpoint
from examples.demo.tools import ToolLog
from examples.demo.turns import TurnLog
from spectool_core import policy_of
from spectool_core.testing import Answer, ModelServer, ScriptedCall, ScriptedModel

ROOT = Path(__file__).parents[2]

PACKAGES = {
    "langgraph": ["langchain", "langchain_core", "langchain_openai", "langgraph"],
    "llamaindex": ["llama_index", "llama_index_instrumentation", "workflows"],
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_only_the_framework_that_is_asked_for_is_imported(name):
    others = [package for other in FRAMEWORKS if other != name for package in PACKAGES[other]]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({others}))  # an import of one of them fails
from examples.demo.__main__ import _parse
assert _parse(["--framework", {name!r}]).framework.title
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True)


def test_a_framework_that_is_not_installed_is_named(capsys, monkeypatch):
    def not_installed(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("examples.demo.__main__.load", not_installed)
    with pytest.raises(SystemExit):
        main(["--framework", "llamaindex"])
    assert "--framework llamaindex: No module named 'llamaindex'" in capsys.readouterr().err


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_all_but_the_note_book_are_marked(name, tools):
    made = dict(zip(tools, load(name).tools(list(tools.values())), strict=True))
    assert {name for name, tool in made.items() if policy_of(tool) is None} == {"save_note"}


def test_the_search_of_llamaindex_is_a_query_engine(tools):
    made = llamaindex.FRAMEWORK.tools(list(tools.values()))
    assert [type(tool) for tool in made] == [QueryEngineTool, *[FunctionTool] * 4]


def test_a_query_engine_is_asked_with_one_argument():
    spelled = llamaindex.FRAMEWORK.spelled(ScriptedCall("search", {"query": "wind", "limit": 5}))
    assert spelled == ScriptedCall("search", {"input": "wind"})
    other = ScriptedCall("grep", {"pattern": "wind"})
    assert llamaindex.FRAMEWORK.spelled(other) is other
    assert langgraph.FRAMEWORK.spelled(other) is other


async def test_models_of_any_name_call_functions():
    async with DefaultAsyncHttpxClient() as http:
        for name in ("gpt-4o-mini", "qwen3-1.7b"):
            endpoint = Endpoint(name, "http://127.0.0.1:1/v1", "unused")
            metadata = llamaindex.FRAMEWORK.model(endpoint, http).metadata
            assert (metadata.model_name, metadata.is_function_calling_model) == (name, True)
            assert isinstance(langgraph.FRAMEWORK.model(endpoint, http), ChatOpenAI)


TWO_AT_ONCE = [
    Answer(
        tool_calls=[ScriptedCall("grep", {"pattern": "Heron"}), ScriptedCall("read_file", {"path": "history.md"})],
    ),
    Answer("Heron."),
]


async def run_with(framework, functions, script):
    """Run the stock agent on a script; gives the conversation and the turns."""
    turns = TurnLog(ToolLog(), lambda _: None)
    async with ModelServer({"main": ScriptedModel(script)}) as server, DefaultAsyncHttpxClient() as http:
        model = framework.model(Endpoint("main", server.base_url, "unused"), http)
        return await framework.run("Who?", model, functions, turns, None), turns.turns()


@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_a_run_tells_of_its_turns(name, tools):
    conversation, turns = await run_with(load(name), list(tools.values()), TWO_AT_ONCE)
    assert conversation.answer == "Heron."
    assert [turn.calls for turn in turns] == [
        [("grep", {"pattern": "Heron", "under": ""}), ("read_file", {"path": "history.md"})],
        [],
    ]
    assert all(turn.started_s <= turn.answered_s <= turn.ended_s for turn in turns)
    assert turns[0].answered_s < turns[0].ended_s <= turns[1].started_s


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("call", [("grep", {"depth": 3}), ("dig", {"depth": 3})])
async def test_a_call_that_no_tool_takes_is_told_as_it_is(name, call, tools):
    script = [Answer(tool_calls=[ScriptedCall(*call)]), Answer("No.")]
    _, turns = await run_with(load(name), list(tools.values()), script)
    assert turns[0].calls == [call]


def two_tools(*, first, answer="a line"):
    """`grep` and `read_file`, of which `first` is done first."""
    is_first_done = asyncio.Event()

    async def end_in_order(name):
        if name == first:
            is_first_done.set()
        await is_first_done.wait()

    async def grep(pattern: str, under: str = "") -> str:
        """Lines."""
        await end_in_order("grep")
        return answer

    async def read_file(path: str) -> str:
        """A paper."""
        await end_in_order("read_file")
        return "a paper"

    return [grep, read_file]


@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_the_order_in_which_parallel_results_come_is_no_difference(name):
    one, other = [await run_with(load(name), two_tools(first=tool), TWO_AT_ONCE) for tool in ("grep", "read_file")]
    assert one[0] == other[0]


@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_what_a_tool_returns_is_compared(name):
    tools = [two_tools(first="grep", answer=answer) for answer in ("a line", "another line")]
    one, other = [await run_with(load(name), each, TWO_AT_ONCE) for each in tools]
    assert one[0] != other[0]


@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_what_the_model_says_is_compared(name, tools):
    runs = [await run_with(load(name), list(tools.values()), [Answer(text)]) for text in ("Heron.", "Badger.")]
    assert runs[0][0] != runs[1][0]


def test_messages_of_a_graph_are_compared_without_their_own_ids():
    essence = langgraph._essence
    assert essence(AIMessage("a", id="1")) == essence(AIMessage("a", id="2")) != essence(HumanMessage("a", id="1"))


def test_an_agent_that_comes_to_no_end_stops_the_demonstration(capsys):
    def again(request):
        return Answer(tool_calls=[ScriptedCall("grep", {"pattern": str(request.turn)})] if request.tools else ())

    with ModelServer({"large": again, "small": Answer("-")}) as server:
        arguments = ["--base-url", server.base_url, "--model", "large", "--speculator", "small", "--api-key", "x"]
        assert main([*arguments, "--tool-delay", "0", "--framework", "llamaindex"]) == 2
    assert "stopped by WorkflowRuntimeError: Max iterations" in capsys.readouterr().err

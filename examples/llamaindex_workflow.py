"""`python -m examples.llamaindex_workflow`: two agents and a handoff, built as ever and then made speculative.

Runs offline: the models' words are played back by a server on loopback. Agents, HTTP requests and tools are real.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing, closing

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAI

from examples.demo.archive import Archive
from examples.side_by_side import MAIN_MODEL, SMALL_MODEL, compared, models
from spectool_core import Speculation, mark
from spectool_core.speculators import ModelSpeculator
from spectool_core.testing import Answer, ModelServer, ScriptedCall
from spectool_llamaindex import speculate

QUESTION = (
    "The token instrument at Saddle Halt has failed. Find out who is rung first, and leave the night shift a note."
)


def tools_of(archive: Archive, delay_s: float) -> tuple[FunctionTool, FunctionTool, FunctionTool]:
    """Each as slow as a network would make it."""

    async def search(query: str) -> str:
        """Search the railway's papers."""
        await asyncio.sleep(delay_s)
        return "\n".join(f"{found.path}: {found.excerpt}" for found in archive.search(query, limit=3))

    async def read_file(path: str) -> str:
        """Read one paper."""
        await asyncio.sleep(delay_s)
        return archive.read(path)

    async def save_note(title: str, text: str) -> str:
        """Write into the night shift's book."""
        await asyncio.sleep(delay_s)
        archive.save_note(title, text)
        return f"saved: {title}"

    made = FunctionTool.from_defaults
    return made(search), made(read_file), made(save_note)


def workflow_of(search: FunctionTool, read_file: FunctionTool, save_note: FunctionTool, llm: OpenAI) -> AgentWorkflow:
    """Somebody else's code, which knows nothing of speculation."""
    reader = FunctionAgent(
        name="reader",
        description="Finds out what the papers say.",
        tools=[search, read_file],
        llm=llm,
        can_handoff_to=["clerk"],
    )
    clerk = FunctionAgent(name="clerk", description="Writes notes.", tools=[read_file, save_note], llm=llm)
    return AgentWorkflow(agents=[reader, clerk], root_agent="reader")


def asks_for(tool: str, **arguments: str) -> Answer:
    return Answer(tool_calls=[ScriptedCall(tool, arguments)])


TURNS = [
    asks_for("search", query="token instrument failure reported first to"),
    asks_for("read_file", path="people/contacts.md"),
    asks_for("handoff", to_agent="clerk", reason="The night shift needs a note."),
    asks_for("read_file", path="people/rosters.md"),
    asks_for("save_note", title="Token failed", text="Ring Ines Corvane first: *47."),
    Answer("Ines Corvane, on *47. The night shift has a note."),
]
GUESSES = TURNS
"""The speculator guesses all of it, also the handoff and the note: neither runs early."""


async def main(*, generation_s: float = 0.5, delay_s: float = 0.4) -> int:
    with closing(Archive()) as archive:
        async with ModelServer(models(QUESTION, TURNS, GUESSES, generation_s)) as server:
            llm = OpenAI(model=MAIN_MODEL, api_base=server.base_url, api_key="unused")
            speculator = ModelSpeculator(SMALL_MODEL, base_url=server.base_url, api_key="unused")
            tools = tools_of(archive, delay_s)
            workflow = workflow_of(*tools, llm)

            mark(tools, names=["search", "read_file"])  # 1: they only read
            speculation = Speculation(speculators=[speculator])  # 2: who predicts
            speculative = speculate(workflow, speculation)  # 3: a copy; the workflow stays stock

            async with aclosing(speculator):
                return await compared(QUESTION, workflow, speculative, speculation)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

"""`python -m examples.llamaindex_agent`: a FunctionAgent on a slow query engine, run stock and then speculative.

Runs offline: the models' words are played back by a server on loopback. Agents, HTTP requests and tools are real.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing, closing

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.openai import OpenAI

from examples.demo.archive import Archive
from examples.side_by_side import MAIN_MODEL, SMALL_MODEL, compared, models
from spectool_core import Speculation, speculatable
from spectool_core.speculators import ModelSpeculator
from spectool_core.testing import Answer, ModelServer, ScriptedCall
from spectool_llamaindex import SpeculativeFunctionAgent

QUESTION = "Railcar 13 goes down this week. How fast may it pass km 7.2?"


class Papers(CustomQueryEngine):
    """Full-text search over the papers of an invented railway, with the delay of a network."""

    archive: Archive
    delay_s: float

    def custom_query(self, query_str: str) -> str:
        """Answer without waiting: this agent asks `acustom_query`."""
        found = self.archive.search(query_str, limit=3)
        return "\n".join(f"{passage.path}: {passage.excerpt}" for passage in found) or "nothing found"

    async def acustom_query(self, query_str: str) -> str:
        await asyncio.sleep(self.delay_s)
        return self.custom_query(query_str)


def asks_for(query: str) -> Answer:
    return Answer(tool_calls=[ScriptedCall("search", {"input": query})])


ANSWER = Answer("9 km/h: its dynamic brake is isolated, and that limit is below notice 14's 10 km/h.")
MAIN = [asks_for("speed restriction km 7.2"), asks_for("railcar 13"), asks_for("dynamic brake isolated"), ANSWER]
GUESSES = [
    asks_for("speed restriction km 7.2"),
    asks_for("railcar 13 speed"),
    asks_for("dynamic brake isolated"),
    ANSWER,
]


async def main(*, generation_s: float = 0.5, delay_s: float = 0.4) -> int:
    with closing(Archive()) as archive:
        async with ModelServer(models(QUESTION, MAIN, GUESSES, generation_s)) as server:
            llm = OpenAI(model=MAIN_MODEL, api_base=server.base_url, api_key="unused")
            speculator = ModelSpeculator(SMALL_MODEL, base_url=server.base_url, api_key="unused")
            engine = Papers(archive=archive, delay_s=delay_s)
            search = QueryEngineTool.from_defaults(engine, name="search", description="Searches the railway's papers.")
            stock = FunctionAgent(tools=[search], llm=llm)

            speculatable(search)  # 1: it only reads
            speculation = Speculation(speculators=[speculator])  # 2: who predicts
            agent = SpeculativeFunctionAgent(
                tools=[search], llm=llm, speculation=speculation
            )  # 3: FunctionAgent before

            async with aclosing(speculator):
                return await compared(QUESTION, stock, agent, speculation)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

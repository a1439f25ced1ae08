"""The tools of the scripted agents: marked and unmarked ones of every kind, all writing to one log."""

# Without postponed annotations: LlamaIndex finds the `Context` among a tool's parameters by the class itself.
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.objects import ObjectRetriever
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import BaseTool, FunctionTool, QueryEngineTool, RetrieverTool
from llama_index.core.workflow import Context
from pydantic import Field
from workflows.events import HumanResponseEvent, InputRequiredEvent

from spectool_core import speculatable
from tests.tool_log import ToolLog


class SlowEngine(CustomQueryEngine):
    """A query engine that takes the log's time."""

    log: Any = Field(exclude=True)

    def custom_query(self, query_str: str) -> str:
        raise AssertionError("agents are async")

    async def acustom_query(self, query_str: str) -> str:
        result: str = await self.log.run("search", query_str)
        return result


class SlowRetriever(BaseRetriever):
    """A retriever that takes the log's time."""

    def __init__(self, log: ToolLog) -> None:
        super().__init__(callback_manager=CallbackManager([]))
        self._log = log

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        raise AssertionError("agents are async")

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        text = await self._log.run("recall", query_bundle.query_str.strip())
        return [NodeWithScore(node=TextNode(id_="node", text=text, metadata={"source": "log"}), score=0.5)]


class Choosing(ObjectRetriever[Any]):
    """Retrieves tools by what was asked; notes each request."""

    def __init__(self, tools: list[BaseTool]) -> None:
        self.tools = tools
        self.asked: list[str] = []

    async def aretrieve(self, str_or_query_bundle: Any) -> list[BaseTool]:
        self.asked.append(str_or_query_bundle)
        return list(self.tools)


def make_tools(log: ToolLog) -> list[BaseTool]:
    """Marked: `lookup`, `weigh`, `quote`, `tag`, `search`, `recall`; unmarked: `note`, `remember`."""

    @speculatable
    async def lookup(q: str, n: int = 1) -> str:
        """Look something up."""
        return await log.run("lookup", f"{q}{n!r}")

    @speculatable
    async def weigh(q: str, unit: str = Field("kg", description="the unit")) -> dict[str, Any]:
        """Weigh something; the result can be changed by whoever gets it."""
        return {"result": await log.run("weigh", f"{q} {unit}"), "weighed": [q]}

    @speculatable
    async def quote(q: str, currency: str) -> str:
        """Give a price; the currency is not the model's choice."""
        return await log.run("quote", f"{q} {currency}")

    @speculatable
    async def tag(q: str) -> str:
        """Tag something; a callback words the answer."""
        return await log.run("tag", q)

    async def note(text: str) -> str:
        """Write something down: not marked."""
        return await log.run("note", text)

    async def remember(ctx: Context, text: str) -> str:
        """Write something into the state: not marked."""
        result = await log.run("remember", text)
        async with ctx.store.edit_state() as state:
            state["state"] = {**state.get("state", {}), "remembered": text}
        return result

    engine = speculatable(QueryEngineTool.from_defaults(SlowEngine(log=log), name="search", description="Search."))
    retriever = speculatable(RetrieverTool.from_defaults(SlowRetriever(log), name="recall", description="Recall."))
    return [
        FunctionTool.from_defaults(async_fn=lookup),
        FunctionTool.from_defaults(async_fn=weigh),
        FunctionTool.from_defaults(async_fn=quote, partial_params={"currency": "EUR"}),
        FunctionTool.from_defaults(async_fn=tag, callback=lambda result: f"<{result}>"),
        engine,
        retriever,
        FunctionTool.from_defaults(async_fn=note),
        FunctionTool.from_defaults(async_fn=remember),
    ]


def confirmation(log: ToolLog) -> FunctionTool:
    """An unmarked tool that waits for a human."""

    async def confirm(ctx: Context, q: str) -> str:
        """Ask a human."""
        response = await ctx.wait_for_event(
            HumanResponseEvent, waiter_id=q, waiter_event=InputRequiredEvent(prefix=q), requirements={"q": q}
        )
        await log.run("confirm", q)
        return str(response.response)

    return FunctionTool.from_defaults(async_fn=confirm)


def ending(log: ToolLog) -> FunctionTool:
    """An unmarked tool whose output is the run's."""

    async def finish(text: str) -> str:
        """Say the last word."""
        return await log.run("finish", text)

    return FunctionTool.from_defaults(async_fn=finish, return_direct=True)

"""The public API as a user writes it: read by mypy, never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, assert_type

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool, StructuredTool

from spectool_core import (
    EngineStatistics,
    ModelSpeculator,
    Prompt,
    RunContext,
    Speculation,
    SpeculationStatistics,
    ToolCall,
    ToolPolicy,
    ToolSchema,
    mark,
    policy_of,
    speculatable,
)
from spectool_core.events import Event
from spectool_langgraph import SpeculationCallback, SpeculationMiddleware, SpeculativeToolNode, speculative_model


@speculatable
def search(query: str) -> str:
    """Search."""
    return query


@speculatable(ttl_s=30, max_concurrency=4, reads=["docs"])
async def fetch(page: int) -> bytes:
    """Fetch."""
    return bytes(page)


class Always:
    """A speculator of the user's own."""

    async def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        """Predict."""
        yield ToolCall("search", {"query": str(len(prompt.messages))})


def allowed(call: ToolCall, context: RunContext) -> bool:
    """Allow."""
    return call.name != "search" or context.thread_id is not None


def on_event(event: Event) -> None:
    """Listen."""
    print(event)


def use(tools: list[BaseTool], tool: StructuredTool, model: BaseChatModel) -> None:
    """Use all of it."""
    assert_type(search("q"), str)
    assert_type(speculatable(tool), StructuredTool)
    assert_type(mark(tools, names=["search"], reuse="ttl"), list[BaseTool])
    assert_type(policy_of(tool), ToolPolicy | None)
    speculation = Speculation(
        speculators=[
            "openai:gpt-5-nano",
            ModelSpeculator("small", base_url="http://localhost:8000/v1"),
            Always(),
            model,
        ],
        mode="shadow",
        scope=lambda call, context: (call.name, context.configurable.get("tenant")),
        may_speculate=allowed,
        hooks=[on_event],
        max_runs_per_turn=4,
    )
    Speculation(engine="vllm", engine_url="http://localhost:8000/v1", engine_api_key="key")
    assert_type(speculation.statistics(), SpeculationStatistics)
    assert_type(speculation.statistics().engine, EngineStatistics)
    assert_type(speculation.statistics().total.acceptance_rate, float | None)
    node = SpeculativeToolNode([search, *tools], speculation, handle_tool_errors=True)
    assert_type(speculative_model(model, node), BaseChatModel)
    SpeculationCallback(node)
    agent: Any = create_agent(model, [search], middleware=[SpeculationMiddleware(speculation)])
    agent.invoke({})

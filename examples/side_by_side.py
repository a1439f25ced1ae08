"""What the small examples share: models that are played back, and one question asked of two agents."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.agent.workflow import AgentOutput, AgentWorkflow, ToolCallResult
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent

from spectool_core import Speculation
from spectool_core.testing import Answer, ScriptedModel

__all__ = ["MAIN_MODEL", "SMALL_MODEL", "compared", "models"]

MAIN_MODEL = "gpt-4o-mini"
SMALL_MODEL = "small"
_GREETING = "Hello."


def models(
    question: str, main: Sequence[Answer], guesses: Sequence[Answer], generation_s: float
) -> Mapping[str, ScriptedModel]:
    """The main model, and the speculator, which is five times as fast; each says what its script says, turn by turn."""
    greeting = {_GREETING: Answer(_GREETING)}
    return {
        MAIN_MODEL: ScriptedModel(greeting | {question: main}, generation_s=generation_s),
        SMALL_MODEL: ScriptedModel(greeting | {question: guesses}, generation_s=generation_s / 5),
    }


async def compared(
    question: str,
    stock: BaseWorkflowAgent | AgentWorkflow,
    speculative: BaseWorkflowAgent | AgentWorkflow,
    speculation: Speculation,
) -> int:
    """Ask both, print what came of it, and give the exit code: 0 where answers and tool results are equal."""
    await stock.run(user_msg=_GREETING)  # what LlamaIndex loads late is loaded now
    gc.collect()  # else it falls into one of the runs, and takes tenths of a second after so many imports
    print(f"{question}   (the models are played back)")
    outcomes = []
    for kind, agent in (("stock", stock), ("speculative", speculative)):
        started_s = time.perf_counter()
        output = await agent.run(user_msg=question)
        print(f"  {kind:<12}{time.perf_counter() - started_s:.2f} s  {output}")
        outcomes.append(_outcome(output))
    statistics = speculation.statistics()
    for name, tool in statistics.tools.items():
        counts = (
            f"hits {tool.num_hits}, joins {tool.num_joins}, misses {tool.num_misses}, not run early {tool.num_skipped}"
        )
        print(f"  {name:<12}{counts}; saved {tool.saved_s:.2f} s")
    print(f"  early runs that served no call: {statistics.num_wasted}")
    is_equal = outcomes[0] == outcomes[1]
    print(f"  answers and tool results are {'equal' if is_equal else 'DIFFERENT'}")
    return 0 if is_equal else 1


def _outcome(output: AgentOutput) -> Sequence[Any]:
    """The answer, and what each tool that the run called was given and returned."""
    results = [call for call in output.tool_calls if isinstance(call, ToolCallResult)]
    return [str(output), *((call.tool_name, call.tool_kwargs, call.tool_output.blocks) for call in results)]

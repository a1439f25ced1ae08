"""One run of the agent on a fresh archive: stock or speculative, in the framework that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from examples.demo.archive import Archive
from examples.demo.frameworks import Framework
from examples.demo.tools import ToolLog, archive_tools
from examples.demo.turns import Turn, TurnLog
from spectool_core import Speculation
from spectool_core.events import Event
from spectool_core.speculators import ModelSpeculator

__all__ = ["AgentRun", "Setup", "run_agent"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs share.

    Args:
        framework: of the agent.
        model: the main model, as the framework's own object.
        speculator: the speculative model.
        site: URL of the page server.
        tool_delay_s: declared network delay of each tool call.
    """

    framework: Framework
    model: Any
    speculator: ModelSpeculator
    site: str
    tool_delay_s: float


@dataclass(frozen=True, slots=True)
class AgentRun:
    """One whole run of the agent.

    Args:
        answer: the agent's last words.
        transcript: what there is to compare of its messages, in order.
        turns: in order; the last one asks for no tool.
        notes: what the agent wrote into the note book.
        events: what the library reported; empty for a stock run.
        num_prompt_tokens: read by the speculator.
        num_completion_tokens: written by the speculator.
    """

    answer: str
    transcript: Sequence[Mapping[str, Any]]
    turns: Sequence[Turn]
    notes: Sequence[tuple[str, str]]
    events: Sequence[Event]
    num_prompt_tokens: int
    num_completion_tokens: int

    @property
    def duration_s(self) -> float:
        """From the first prompt to the last answer."""
        return self.turns[-1].ended_s - self.turns[0].started_s


async def run_agent(question: str, setup: Setup, *, is_speculative: bool, on_turn: Callable[[Turn], None]) -> AgentRun:
    """Ask the agent `question`, with a fresh archive and fresh tools; `on_turn` hears of each turn as it ends."""
    log, events = ToolLog(), list[Event]()
    before = setup.speculator.statistics()
    speculation = Speculation([setup.speculator], hooks=[events.append]) if is_speculative else None
    with closing(Archive()) as archive:
        tools = archive_tools(archive, setup.site, log, delay_s=setup.tool_delay_s)
        turns = TurnLog(log, on_turn)
        conversation = await setup.framework.run(question, setup.model, tools, turns, speculation)
        await log.until_idle()
        notes = archive.notes()
    after = setup.speculator.statistics()
    return AgentRun(
        conversation.answer,
        conversation.transcript,
        turns.turns(),
        notes,
        events,
        num_prompt_tokens=after.num_prompt_tokens - before.num_prompt_tokens,
        num_completion_tokens=after.num_completion_tokens - before.num_completion_tokens,
    )

"""What a speculator is: something that predicts the main model's next tool calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from spectool_core.calls import Prompt, ToolCall, ToolSchema

__all__ = ["Speculator", "SpeculatorStatistics"]


@runtime_checkable
class Speculator(Protocol):
    """Predicts the tool calls that the main model is about to make.

    `predict` yields each call as soon as it is complete and may yield none. It is cancelled the moment the main
    model has answered, and must then free what it holds (an HTTP request is closed, so that the server stops
    generating). An exception from it is counted and otherwise ignored. One speculator serves many turns at once,
    on any number of event loops.
    """

    def predict(self, prompt: Prompt, tools: Sequence[ToolSchema]) -> AsyncIterator[ToolCall]:
        """Yield predicted calls for `prompt`, where the model may choose from `tools` (OpenAI format).

        Where `prompt.read_text` is set, the main model was not given the tools and its calls are read from its text.
        """
        ...


@dataclass(frozen=True, slots=True)
class SpeculatorStatistics:
    """What one speculator has cost so far. Counts only; ratios are left to the reader.

    `cost` is in a currency of the user's choice, the one of `ToolPolicy.cost`.
    """

    num_requests: int = 0
    num_cancelled_requests: int = 0
    num_failed_requests: int = 0
    num_malformed_calls: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    cost: float = 0.0

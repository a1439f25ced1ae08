"""What the scripted models count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

__all__ = ["ModelStatistics", "ServerStatistics"]


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """The requests to one model so far, or to all of them.

    Args:
        num_requests: all that came.
        num_active_requests: those being answered now.
        num_completed_requests: those answered to the end.
        num_cancelled_requests: those whose client left first.
        num_failed_requests: those that ended in a fault or an error.
        max_concurrent_requests: the most that were active at once.
        num_prompt_tokens: tokens read, whatever became of the request.
        num_cached_tokens: those of them that the previous turn's request already held.
        num_completion_tokens: tokens generated, up to the moment of cancellation where there was one.
        num_reasoning_tokens: those of them that were reasoning; counted for completed requests only.
        num_tool_calls: the tool calls in completed answers, over all choices.
    """

    num_requests: int = 0
    num_active_requests: int = 0
    num_completed_requests: int = 0
    num_cancelled_requests: int = 0
    num_failed_requests: int = 0
    max_concurrent_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_tool_calls: int = 0

    def plus(self, **changes: int) -> Self:
        """Give the counts with `changes` added and the maximum kept up."""
        counts = {name: getattr(self, name) + change for name, change in changes.items()}
        num_active = counts.get("num_active_requests", self.num_active_requests)
        return replace(self, **counts, max_concurrent_requests=max(num_active, self.max_concurrent_requests))


@dataclass(frozen=True, slots=True)
class ServerStatistics(ModelStatistics):
    """The requests to all models, and to each.

    Args:
        models: the counts of each model by its name.
    """

    models: Mapping[str, ModelStatistics] = field(default_factory=dict)

    def plus_for(self, model: str, **changes: int) -> ServerStatistics:
        """Give the counts with `changes` added in total and to `model`."""
        of_model = self.models.get(model, ModelStatistics()).plus(**changes)
        return replace(self.plus(**changes), models={**self.models, model: of_model})

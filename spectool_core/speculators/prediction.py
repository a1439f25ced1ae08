"""A predicted call that says how likely it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from spectool_core.calls import ToolCall

__all__ = ["Prediction"]


@dataclass(frozen=True, slots=True)
class Prediction(ToolCall):
    """A call that the main model's very next answer holds with the given probability.

    Args:
        probability: between 0 and 1; below `SpeculationConfig.min_probability` the call is not run early.
    """

    probability: float = field(kw_only=True)

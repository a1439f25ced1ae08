"""Speculative tool calls for LLM agents."""

from spectool_core.annotation import ToolPolicy, mark, policy_of, speculatable
from spectool_core.calls import Prompt, ToolCall, ToolSchema
from spectool_core.errors import (
    CanonicalizationError,
    ConfigurationError,
    MissingExtraError,
    NotSpeculatableError,
    SpectoolError,
)
from spectool_core.runs import RunContext
from spectool_core.speculation import Speculation
from spectool_core.speculators import ModelSpeculator, Speculator, SpeculatorStatistics
from spectool_core.statistics import SpeculationStatistics, ToolStatistics

__all__ = [
    "CanonicalizationError",
    "ConfigurationError",
    "MissingExtraError",
    "ModelSpeculator",
    "NotSpeculatableError",
    "Prompt",
    "RunContext",
    "Speculation",
    "SpeculationStatistics",
    "Speculator",
    "SpeculatorStatistics",
    "SpectoolError",
    "ToolCall",
    "ToolPolicy",
    "ToolSchema",
    "ToolStatistics",
    "mark",
    "policy_of",
    "speculatable",
]

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
from spectool_core.speculators import (
    HistorySpeculator,
    HistoryStatistics,
    ModelSpeculator,
    Prediction,
    Speculator,
    SpeculatorStatistics,
    StreamSpeculator,
)
from spectool_core.statistics import EngineStatistics, SourceStatistics, SpeculationStatistics, ToolStatistics

__all__ = [
    "CanonicalizationError",
    "ConfigurationError",
    "EngineStatistics",
    "HistorySpeculator",
    "HistoryStatistics",
    "MissingExtraError",
    "ModelSpeculator",
    "NotSpeculatableError",
    "Prediction",
    "Prompt",
    "RunContext",
    "SourceStatistics",
    "Speculation",
    "SpeculationStatistics",
    "Speculator",
    "SpeculatorStatistics",
    "SpectoolError",
    "StreamSpeculator",
    "ToolCall",
    "ToolPolicy",
    "ToolSchema",
    "ToolStatistics",
    "mark",
    "policy_of",
    "speculatable",
]

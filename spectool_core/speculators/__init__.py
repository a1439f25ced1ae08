"""Speculators: what predicts the main model's next tool calls."""

from spectool_core.speculators.history import HistorySpeculator, HistoryStatistics
from spectool_core.speculators.model import ModelSpeculator
from spectool_core.speculators.prediction import Prediction
from spectool_core.speculators.protocol import Speculator, SpeculatorStatistics
from spectool_core.speculators.stream import StreamSpeculator

__all__ = [
    "HistorySpeculator",
    "HistoryStatistics",
    "ModelSpeculator",
    "Prediction",
    "Speculator",
    "SpeculatorStatistics",
    "StreamSpeculator",
]

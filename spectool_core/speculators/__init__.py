"""Speculators: what predicts the main model's next tool calls."""

from spectool_core.speculators.model import ModelSpeculator
from spectool_core.speculators.protocol import Speculator, SpeculatorStatistics
from spectool_core.speculators.stream import StreamSpeculator

__all__ = ["ModelSpeculator", "Speculator", "SpeculatorStatistics", "StreamSpeculator"]

"""Speculative tool calls for LlamaIndex agents."""

from spectool_llamaindex import _requirements as _requirements
from spectool_llamaindex.agents import (
    SpeculativeAgent,
    SpeculativeCodeActAgent,
    SpeculativeFunctionAgent,
    SpeculativeReActAgent,
)
from spectool_llamaindex.speculate import speculate
from spectool_llamaindex.speculator import LLMSpeculator

__all__ = [
    "LLMSpeculator",
    "SpeculativeAgent",
    "SpeculativeCodeActAgent",
    "SpeculativeFunctionAgent",
    "SpeculativeReActAgent",
    "speculate",
]

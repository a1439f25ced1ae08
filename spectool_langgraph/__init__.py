"""Speculative tool calls for LangGraph and LangChain agents."""

from spectool_langgraph import _requirements as _requirements
from spectool_langgraph.chat_model import SpeculationCallback, speculative_model
from spectool_langgraph.middleware import SpeculationMiddleware
from spectool_langgraph.speculator import ChatModelSpeculator
from spectool_langgraph.tool_node import SpeculativeToolNode

__all__ = [
    "ChatModelSpeculator",
    "SpeculationCallback",
    "SpeculationMiddleware",
    "SpeculativeToolNode",
    "speculative_model",
]

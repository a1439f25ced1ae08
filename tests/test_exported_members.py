"""What each package exports is what it says, and importing it is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

import spectool_core
import spectool_langgraph
import spectool_llamaindex

CORE = {
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
}
LANGGRAPH = {
    "ChatModelSpeculator",
    "SpeculationCallback",
    "SpeculationMiddleware",
    "SpeculativeToolNode",
    "speculative_model",
}
LLAMAINDEX = {
    "LLMSpeculator",
    "SpeculativeAgent",
    "SpeculativeCodeActAgent",
    "SpeculativeFunctionAgent",
    "SpeculativeReActAgent",
    "speculate",
}


def test_exports() -> None:
    assert set(spectool_core.__all__) == CORE
    assert set(spectool_langgraph.__all__) == LANGGRAPH
    assert set(spectool_llamaindex.__all__) == LLAMAINDEX
    for package in (spectool_core, spectool_langgraph, spectool_llamaindex):
        assert all(hasattr(package, name) for name in package.__all__)
        assert all(getattr(package, name).__doc__ for name in package.__all__ if name != "ToolSchema")


def test_the_core_imports_no_framework_and_no_client() -> None:
    code = "import sys, spectool_core; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"langchain_core", "langgraph", "llama_index", "openai", "aiohttp"} & set(done.stdout.split())


HIDDEN = """
import importlib.abc, sys

class Hides(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Hides())
try:
    __import__(sys.argv[2])
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("module", "adapter"),
    [
        ("langgraph", "langgraph"),
        ("langchain", "langgraph"),
        ("langchain_core", "langgraph"),
        ("llama_index.core", "llamaindex"),
    ],
)
def test_a_missing_framework_is_named_with_its_extra(module: str, adapter: str) -> None:
    command = [sys.executable, "-c", HIDDEN, module, f"spectool_{adapter}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"MissingExtraError {module} is not installed; install it with: pip install 'spectool[{adapter}]'\n"
    )

"""What each package exports is what it says, and importing it is cheap."""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import spectool_core
import spectool_langgraph

REQUIREMENTS = Path(spectool_langgraph.__file__).with_name("_requirements.py")

CORE = {
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
}
LANGGRAPH = {
    "ChatModelSpeculator",
    "SpeculationCallback",
    "SpeculationMiddleware",
    "SpeculativeToolNode",
    "speculative_model",
}


def test_exports() -> None:
    assert set(spectool_core.__all__) == CORE
    assert set(spectool_langgraph.__all__) == LANGGRAPH
    for package in (spectool_core, spectool_langgraph):
        assert all(hasattr(package, name) for name in package.__all__)
        assert all(getattr(package, name).__doc__ for name in package.__all__ if name != "ToolSchema")


def test_the_core_imports_no_framework_and_no_client() -> None:
    code = "import sys, spectool_core; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"langchain_core", "langgraph", "openai", "aiohttp"} & set(done.stdout.split())


@pytest.mark.parametrize("module", ["langgraph", "langchain"])
def test_a_missing_framework_is_named_with_its_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else real(name))
    with pytest.raises(spectool_core.MissingExtraError, match=r"pip install 'spectool\[langgraph\]'") as caught:
        runpy.run_path(str(REQUIREMENTS))
    assert caught.value.extra == "langgraph"

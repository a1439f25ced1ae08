"""LangChain's own unit suites for integrations, on what this library makes of tools and models."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.load import dumpd
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from langchain_tests.unit_tests import ChatModelUnitTests, ToolsUnitTests

from spectool_core import Speculation, speculatable
from spectool_langgraph import SpeculativeToolNode, speculative_model
from spectool_langgraph._recording import Recorded
from spectool_langgraph._replay import replaying


@tool
@speculatable
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class TestReplayingTool(ToolsUnitTests):
    """A tool as the stock node executes it on a hit."""

    @property
    def tool_constructor(self) -> BaseTool:  # type: ignore[override]
        return replaying(multiply, Recorded(42))

    @property
    def tool_invoke_params_example(self) -> dict[str, Any]:
        return {"a": 6, "b": 7}


class TestSpeculativeModel(ChatModelUnitTests):
    """A model that has been told of a tool node."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "gpt-5-nano"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"OPENAI_API_KEY": "key"}, {"model": "gpt-5-nano"}, {"openai_api_key": "key"}

    @pytest.fixture
    def model(self, request: Any) -> BaseChatModel:
        params = {**self.standard_chat_model_params, **self.chat_model_params}
        return speculative_model(ChatOpenAI(**params), SpeculativeToolNode([multiply], Speculation()))

    @pytest.fixture(autouse=True)
    def api_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "key")

    @pytest.fixture
    def snapshot(self) -> Any:
        """What the model without its callback is written as: LangChain leaves callbacks out."""
        params = {**self.standard_chat_model_params, **self.chat_model_params}
        return lambda name: dumpd(ChatOpenAI(**params))

    @pytest.fixture
    def benchmark(self) -> Any:
        return lambda function: function()

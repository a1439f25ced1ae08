"""Settings of the adapter's tests."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # LangChain's suites use the marker of pytest-benchmark, which is switched off here.
    config.addinivalue_line("markers", "benchmark: a measurement of langchain-tests")

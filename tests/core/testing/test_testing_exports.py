"""What `spectool_core.testing` exports, and what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import spectool_core.testing
from spectool_core.errors import MissingExtraError
from spectool_core.testing import Answer, ModelServer, run_virtual


def test_exports_are_sorted_and_documented():
    exported = spectool_core.testing.__all__
    assert exported == sorted(exported)
    for name in exported:
        assert getattr(spectool_core.testing, name).__doc__


def test_import_needs_no_extra_and_no_framework():
    loads = "import sys, spectool_core.testing; print(*sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True).stdout.split()
    assert not {"uvicorn", "starlette", "looptime", "langchain_core", "langgraph"} & set(modules)


def test_missing_uvicorn_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "spectool_core.testing.listener", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingExtraError, match=r"uvicorn is not installed; .*spectool\[testing\]"):
        ModelServer({"main": Answer()})


def test_missing_looptime_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "looptime", None)

    async def main() -> None: ...

    with pytest.raises(MissingExtraError, match=r"looptime is not installed; .*spectool\[testing\]"):
        run_virtual(main)

"""The model and the servers of these tests; each server is started once, and only one runs at a time."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from examples.engine.smollm2 import convert
from tests.engine.formats import model_of
from tests.engine.serving import Server, serving

# These tests run where vLLM is: make test-engine.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """vLLM and torch warn when they are imported."""
    config.addinivalue_line("filterwarnings", "default")


# Read by vLLM when it is imported: engines in this process, small and quiet ones, several of them.
IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
for name, value in IN_PROCESS.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M, converted once where SPECTOOL_MODEL_FOLDER names a folder."""
    kept = os.environ.get("SPECTOOL_MODEL_FOLDER")
    return convert(Path(kept) if kept else tmp_path_factory.mktemp("smollm2"))


FORMATS = {"sessions": "llama3_json", "o3": "hermes", "o2+o3": "mistral"}
LIMITS = {"hold_s": 2.0, "max_output_bytes": 10_000, "max_entries": 8, "max_responses": 48, "max_parked": 4}


@pytest.fixture(scope="package", params=FORMATS)
def server(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server at each level, each with another format, with few and small entries."""
    level = str(request.param)
    folder = tmp_path_factory.mktemp("server")
    model = model_of(FORMATS[level], model_folder, folder / "model")
    settings = {**LIMITS, "tool_format": FORMATS[level]}
    flags = ("--api-key", "the-key", "--max-num-seqs", "16")
    with serving(model, folder / "server.log", level, *flags, **settings) as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with server.client(headers={"Authorization": "Bearer the-key"}) as client:
        yield client

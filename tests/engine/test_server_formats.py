"""Llama 3's format over HTTP; the servers of the other tests have hermes, Mistral's and xLAM's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.formats import model_of
from tests.engine.serving import serving
from tests.engine.test_server_turns import STREAMED, goes_on

pytestmark = pytest.mark.timeout(400)


async def test_the_engine_goes_on_from_calls_of_llama_3(model_folder: Path, tmp_path: Path) -> None:
    model = model_of("llama3_json", model_folder, tmp_path / "model")
    with serving(model, tmp_path / "server.log", "o3", tool_format="llama3_json") as server:
        async with server.client() as client:
            await goes_on(client, STREAMED)
            await goes_on(client, {})

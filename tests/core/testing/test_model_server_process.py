"""The scripted server in a process of its own."""

from __future__ import annotations

import openai
import pytest

from spectool_core.errors import ConfigurationError
from spectool_core.testing import Answer, Latch, LeakCheck, ModelServerProcess, ScriptedCall, ScriptedModel

QUESTION = [{"role": "user", "content": "which?"}]
TURNS = [Answer(tool_calls=[ScriptedCall("search", {"query": "tides"})])]


def test_process_serves_counts_and_ends():
    models = {"main": ScriptedModel(TURNS, generation_s=0.01), "small": ScriptedModel(TURNS, acceptance_rate=1.0)}
    with LeakCheck():
        with ModelServerProcess(models) as server:
            with openai.OpenAI(base_url=server.base_url, api_key="unused") as client:
                completion = client.chat.completions.create(model="main", messages=QUESTION)
            assert completion.choices[0].message.tool_calls[0].function.name == "search"
            counts = server.statistics()
            assert counts.num_completed_requests == counts.models["main"].num_completed_requests == 1
            assert counts.models["small"].num_requests == 0
        with pytest.raises(ConnectionRefusedError):
            server.statistics()


@pytest.mark.parametrize("script", [lambda request: Answer(), Answer(latch=Latch())], ids=["lambda", "latch"])
def test_what_cannot_be_pickled_is_refused(script):
    with pytest.raises(ConfigurationError, match="can be pickled"):
        ModelServerProcess({"main": script})


def test_child_that_cannot_start_is_reported(capfd):
    with pytest.raises(RuntimeError, match="ended before it was ready"), ModelServerProcess({}):
        pass
    assert "at least one model by name" in capfd.readouterr().err
